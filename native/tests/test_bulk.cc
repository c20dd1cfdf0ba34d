// Bulk messages: step messages overtake them, they get their share, and wait at the sender for their receives.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "cluster.h"
#include "comm/frame.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

std::vector<std::uint8_t> pattern(std::size_t bytes, std::uint32_t seed) {
  std::vector<std::uint8_t> data(bytes);
  std::uint32_t x = seed;
  for (std::uint8_t& each : data) each = static_cast<std::uint8_t>((x = x * 1664525u + 1013904223u) >> 24);
  return data;
}

Transfer send_bulk(Endpoint& from, int to, std::uint64_t tag, const std::vector<std::uint8_t>& data) {
  return from.send(to, tag, data.data(), data.size(), from.generation(), Lane::kBulk);
}

Transfer receive(Endpoint& at, int from, std::uint64_t tag, std::vector<std::uint8_t>& data) {
  return at.recv(from, tag, data.data(), data.size());
}

void exchange(Cluster& pair, std::uint64_t tag, const std::vector<std::uint8_t>& sent) {
  std::vector<std::uint8_t> got(sent.size());
  const Transfer send = pair.at(0).send(1, tag, sent.data(), sent.size());
  pair.at(1).wait(receive(pair.at(1), 0, tag, got), plenty());
  pair.at(0).wait(send, plenty());
  CHECK(got == sent);
}

}  // namespace

TEST_BOTH(bulk_of_all_sizes_arrives_in_order_both_ways) {
  Cluster pair(2, kind);
  const std::vector<std::size_t> sizes = {0, 1, kPieceBytes - 1, kPieceBytes, kPieceBytes + 1, std::size_t{9} << 20};
  in_threads(2, [&](int rank) {
    const int peer = 1 - rank;
    std::vector<std::vector<std::uint8_t>> sent, got;
    std::vector<Transfer> all;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      sent.push_back(pattern(sizes[i], static_cast<std::uint32_t>(i)));
      got.emplace_back(sizes[i]);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      all.push_back(send_bulk(pair.at(rank), peer, i, sent[i]));
      all.push_back(receive(pair.at(rank), peer, i, got[i]));
    }
    pair.at(rank).wait(all, plenty());
    CHECK(got == sent);
  });
}

// A link of 20 MB/s carries 10 MB of bulk in half a second; what is sent meanwhile has a few pieces before it, which
// take 13 ms each. One that is overtaken by none waits until all of it has gone. A machine that is busy, or a
// sanitizer, may let the sender in late, so the shortest wait of a few attempts counts.
TEST_BOTH(a_step_message_overtakes_bulk) {
  EndpointOptions slow;
  slow.paces[0] = {0.0, 20e6};
  Cluster pair(2, kind, slow);
  const auto bulk = pattern(10'000'000, 1), step = pattern(1000, 2);
  double shortest = 1.0;
  for (std::uint64_t attempt = 0; attempt < 5 && shortest >= 0.1; ++attempt) {
    std::vector<std::uint8_t> got(bulk.size());
    const Transfer coming = receive(pair.at(1), 0, 10 + attempt, got);
    const auto began = std::chrono::steady_clock::now();
    const Transfer going = send_bulk(pair.at(0), 1, 10 + attempt, bulk);
    while (!pair.at(0).test(going)) {
      const auto before = std::chrono::steady_clock::now();
      exchange(pair, 2, step);
      if (pair.at(0).test(going)) break;
      shortest = std::min(shortest, std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count());
    }
    pair.at(1).wait(coming, plenty());
    CHECK(got == bulk);
    CHECK(std::chrono::steady_clock::now() - began >= std::chrono::milliseconds(450));
  }
  CHECK(shortest < 0.1);
}

// While step messages never leave the link idle.
TEST_BOTH(bulk_is_not_starved) {
  Cluster pair(2, kind);
  const auto bulk = pattern(std::size_t{8} << 20, 1), step = pattern(kPieceBytes, 2);
  std::vector<std::uint8_t> got(bulk.size());
  std::atomic<bool> arrived{false};
  in_threads(2, [&](int rank) {
    if (rank == 1) {
      const Transfer coming = receive(pair.at(1), 0, 1, got);
      std::vector<std::uint8_t> taken(step.size());
      for (bool last = false; !last;) {
        pair.at(1).wait(receive(pair.at(1), 0, 2, taken), plenty());
        last = taken[0] != step[0];
        if (!arrived.load() && pair.at(1).test(coming)) arrived.store(true);
      }
      return;
    }
    // Always a megabyte waits.
    const Transfer going = send_bulk(pair.at(0), 1, 1, bulk);
    std::vector<Transfer> steps;
    const Deadline deadline = plenty();
    while (!arrived.load() && !deadline.expired()) {
      while (steps.size() < 16) steps.push_back(pair.at(0).send(1, 2, step.data(), step.size()));
      pair.at(0).wait(steps.front(), deadline);
      steps.erase(steps.begin());
    }
    std::vector<std::uint8_t> last = step;
    last[0] ^= 0xff;
    steps.push_back(pair.at(0).send(1, 2, last.data(), last.size()));
    steps.push_back(going);
    pair.at(0).wait(steps, plenty());
  });
  CHECK(got == bulk);
}

// A message without a receive stays at its sender, but for a few pieces, and takes no place in the pool.
TEST_BOTH(bulk_waits_for_its_receive) {
  EndpointOptions tight;
  tight.pool_soft_bytes = tight.pool_hard_bytes = 4096;
  Cluster pair(2, kind, tight);
  const auto first = pattern(std::size_t{4} << 20, 1), second = pattern(100'000, 2);
  const std::vector<Transfer> going = {send_bulk(pair.at(0), 1, 1, first), send_bulk(pair.at(0), 1, 2, second)};
  for (int i = 0; i < 50; ++i) exchange(pair, 3, pattern(1000, 3));
  CHECK(!pair.at(0).test(going[0]) && pair.at(0).bytes_sent() <= 50 * 1000 + kMostAhead);
  std::vector<std::uint8_t> got(first.size()), next(second.size());
  const std::vector<Transfer> coming = {receive(pair.at(1), 0, 2, next), receive(pair.at(1), 0, 1, got)};
  pair.at(1).wait(coming, plenty());
  pair.at(0).wait(going, plenty());
  CHECK(got == first && next == second);
}

// What is taken back midway has not been sent: the receive takes the next one.
TEST_BOTH(bulk_that_is_taken_back_leaves_its_receive) {
  EndpointOptions slow;
  slow.paces[0] = {0.0, 10e6};
  Cluster pair(2, kind, slow);
  const auto first = pattern(std::size_t{4} << 20, 1), second = pattern(first.size(), 2);
  std::vector<std::uint8_t> got(first.size());
  const Transfer coming = receive(pair.at(1), 0, 1, got);
  const Transfer going = send_bulk(pair.at(0), 1, 1, first);
  while (pair.at(0).bytes_sent() == 0) std::this_thread::yield();
  pair.at(0).cancel({&going, 1});
  CHECK_THROWS(CommError, "cancelled", pair.at(0).test(going));
  CHECK(pair.at(0).bytes_sent() < first.size());
  pair.at(0).wait(send_bulk(pair.at(0), 1, 1, second), plenty());
  pair.at(1).wait(coming, plenty());
  CHECK(got == second);
}

TEST_BOTH(a_receive_that_is_taken_back_does_not_stop_the_lane) {
  Cluster pair(2, kind);
  const auto first = pattern(std::size_t{16} << 20, 1), second = pattern(1000, 2);
  std::vector<std::uint8_t> got(first.size()), next(second.size());
  const std::vector<Transfer> going = {send_bulk(pair.at(0), 1, 1, first), send_bulk(pair.at(0), 1, 2, second)};
  const Transfer coming = receive(pair.at(1), 0, 1, got);
  // So much is not sent before some of it has been taken into the receive.
  while (pair.at(0).bytes_sent() <= kMostAhead) std::this_thread::yield();
  pair.at(1).cancel({&coming, 1});
  pair.at(1).wait(receive(pair.at(1), 0, 2, next), plenty());
  pair.at(0).wait(going, plenty());
  CHECK(next == second);
}

// Pieces of an older generation, with and without a receive, make room for those of the next.
TEST_BOTH(generations_of_bulk_keep_apart) {
  Cluster pair(2, kind);
  const auto old = pattern(std::size_t{2} << 20, 1), next = pattern(std::size_t{2} << 20, 2);
  std::vector<std::uint8_t> got(old.size());
  for (std::uint32_t generation = 1; generation < 6; ++generation) {
    const Transfer stale = send_bulk(pair.at(0), 1, 1, old);
    if (generation % 2 == 0) (void)receive(pair.at(1), 0, 1, got);
    std::this_thread::sleep_for(std::chrono::milliseconds(generation % 3));
    for (const int rank : {generation % 2 == 0 ? 0 : 1, generation % 2 == 0 ? 1 : 0}) pair.at(rank).advance(generation);
    got.assign(got.size(), 0);
    const Transfer coming = receive(pair.at(1), 0, 1, got);
    pair.at(0).wait(send_bulk(pair.at(0), 1, 1, next), plenty());
    pair.at(1).wait(coming, plenty());
    CHECK(got == next);
  }
}

TEST_BOTH(an_abort_overtakes_bulk_and_a_lost_peer_ends_it) {
  Cluster pair(2, kind);
  const auto sent = pattern(std::size_t{64} << 20, 1);
  std::vector<std::uint8_t> got(sent.size());
  Transfer coming = receive(pair.at(1), 0, 1, got);
  Transfer going = send_bulk(pair.at(0), 1, 1, sent);
  pair.at(0).broadcast_abort(std::nullopt);
  CHECK_THROWS(Aborted, "nobody is suspected", pair.at(1).wait(coming, plenty()));
  CHECK_THROWS(Aborted, "nobody is suspected", pair.at(0).wait(going, plenty()));
  for (int rank = 0; rank < 2; ++rank) pair.at(rank).advance(1);
  coming = receive(pair.at(1), 0, 1, got);
  going = send_bulk(pair.at(0), 1, 1, sent);
  pair.at(1).close();
  CHECK_THROWS(PeerLost, "rank 1 is lost", pair.at(0).wait(going, plenty()));
}

// In the middle of a piece, too.
TEST_BOTH(who_closes_with_bulk_under_way_says_goodbye) {
  for (int round = 0; round < 20; ++round) {
    Cluster pair(2, kind);
    const auto sent = pattern(std::size_t{4} << 20, 1);
    std::vector<std::uint8_t> got(sent.size());
    (void)receive(pair.at(1), 0, 1, got);
    (void)send_bulk(pair.at(0), 1, 1, sent);
    (void)send_bulk(pair.at(0), 1, 2, sent);  // never received: it is under way whenever the first has come
    const Transfer never = pair.at(1).recv(0, 3, nullptr, 0);
    std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
    pair.at(0).close();
    CHECK_THROWS(PeerLost, "closed its endpoint", pair.at(1).wait(never, plenty()));
  }
}

int main(int argc, char** argv) { return run(argc, argv); }
