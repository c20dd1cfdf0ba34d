// Messages between healthy endpoints: matching, order, sizes, back-pressure, generations.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "cluster.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

std::vector<std::uint8_t> pattern(std::size_t bytes, std::uint32_t seed) {
  std::vector<std::uint8_t> data(bytes);
  std::uint64_t x = seed + 1;
  for (std::size_t at = 0; at < bytes; at += sizeof x) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(data.data() + at, &x, std::min(sizeof x, bytes - at));
  }
  return data;
}

}  // namespace

TEST_BOTH(posted_before_and_after_the_message) {
  Cluster pair(2, kind);
  const auto sent = pattern(1000, 1);
  std::vector<std::uint8_t> first(1000), second(1000);
  const Transfer early = pair.at(1).recv(0, 7, first.data(), first.size());
  pair.at(0).wait(pair.at(0).send(1, 7, sent.data(), sent.size()), plenty());
  pair.at(1).wait(early, plenty());
  CHECK(first == sent);

  pair.at(0).wait(pair.at(0).send(1, 8, sent.data(), sent.size()), plenty());
  // A later message on another tag proves that the first has arrived before its receive is posted.
  pair.at(0).wait(pair.at(0).send(1, 9, nullptr, 0), plenty());
  pair.at(1).wait(pair.at(1).recv(0, 9, nullptr, 0), plenty());
  pair.at(1).wait(pair.at(1).recv(0, 8, second.data(), second.size()), plenty());
  CHECK(second == sent);
}

TEST_BOTH(equal_tags_keep_their_order_and_others_do_not_matter) {
  Cluster pair(2, kind);
  constexpr int kCount = 200;
  std::vector<int> values(kCount), even(kCount), odd(kCount);
  std::iota(values.begin(), values.end(), 0);
  std::vector<Transfer> all;
  for (int i = 0; i < kCount; ++i) {
    all.push_back(pair.at(0).send(1, static_cast<std::uint64_t>(i % 2), &values[static_cast<std::size_t>(i)], 4));
  }
  std::vector<Transfer> receives;
  for (int i = 0; i < kCount / 2; ++i) receives.push_back(pair.at(1).recv(0, 1, &odd[static_cast<std::size_t>(i)], 4));
  for (int i = 0; i < kCount / 2; ++i) receives.push_back(pair.at(1).recv(0, 0, &even[static_cast<std::size_t>(i)], 4));
  pair.at(0).wait(all, plenty());
  pair.at(1).wait(receives, plenty());
  for (int i = 0; i < kCount / 2; ++i) {
    CHECK_EQUAL(even[static_cast<std::size_t>(i)], 2 * i);
    CHECK_EQUAL(odd[static_cast<std::size_t>(i)], 2 * i + 1);
  }
}

TEST_BOTH(large_messages_both_ways_at_once) {
  Cluster pair(2, kind);
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  in_threads(2, [&](int rank) {
    const int peer = 1 - rank;
    const auto sent = pattern(kBytes, static_cast<std::uint32_t>(rank));
    std::vector<std::uint8_t> got(kBytes);
    const std::vector<Transfer> both{pair.at(rank).send(peer, 1, sent.data(), kBytes),
                                     pair.at(rank).recv(peer, 1, got.data(), kBytes)};
    pair.at(rank).wait(both, plenty());
    CHECK(got == pattern(kBytes, static_cast<std::uint32_t>(peer)));
  });
  CHECK_EQUAL(pair.at(0).bytes_sent(), kBytes);
  CHECK_EQUAL(pair.at(0).bytes_received(), kBytes);
}

// The IO threads alone move the data: nobody waits while it travels.
TEST_BOTH(transfers_go_on_without_a_waiter) {
  Cluster pair(2, kind);
  const auto sent = pattern(std::size_t{16} << 20, 5);
  std::vector<std::uint8_t> got(sent.size());
  const Transfer receive = pair.at(1).recv(0, 3, got.data(), got.size());
  const Transfer send = pair.at(0).send(1, 3, sent.data(), sent.size());
  const Deadline deadline = plenty();
  while (receive.request() && !deadline.expired() && pair.at(1).bytes_received() < got.size()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(pair.at(1).test(receive));
  pair.at(0).wait(send, plenty());
  CHECK(got == sent);
}

// A receive that is posted while its message is coming in takes over in the middle.
TEST_BOTH(a_receive_posted_midway) {
  Cluster pair(2, kind);
  const auto sent = pattern(std::size_t{8} << 20, 6);
  std::vector<std::uint8_t> got(sent.size());
  for (int round = 0; round < 5; ++round) {
    std::fill(got.begin(), got.end(), 0);
    const Transfer send = pair.at(0).send(1, 4, sent.data(), sent.size());
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    pair.at(1).wait(pair.at(1).recv(0, 4, got.data(), got.size()), plenty());
    pair.at(0).wait(send, plenty());
    CHECK(got == sent);
  }
}

TEST_BOTH(a_wrong_size_names_both_and_leaves_the_link_whole) {
  Cluster pair(2, kind);
  const auto sent = pattern(300000, 1);
  std::vector<std::uint8_t> got(300000);
  const Transfer posted = pair.at(1).recv(0, 5, got.data(), 100);
  std::vector<Transfer> sends;
  for (const std::uint64_t tag : {5, 6, 7}) sends.push_back(pair.at(0).send(1, tag, sent.data(), sent.size()));
  CHECK_THROWS(CommError, "100 bytes: the message has 300000 bytes", pair.at(1).wait(posted, plenty()));
  pair.at(1).wait(pair.at(1).recv(0, 7, got.data(), got.size()), plenty());  // by now 6 has come unexpected
  CHECK(got == sent);
  CHECK_THROWS(CommError, "rank 0, tag 0x6, 5 bytes", pair.at(1).wait(pair.at(1).recv(0, 6, got.data(), 5), plenty()));
  pair.at(0).wait(sends, plenty());
}

// More than the pool's soft bound is sent before any receive: the sender is held back, nothing is lost.
TEST_BOTH(a_full_pool_holds_the_sender_back) {
  EndpointOptions base;
  base.pool_soft_bytes = 1 << 20;
  Cluster pair(2, kind, base);
  constexpr std::size_t kMessages = 64, kBytes = std::size_t{1} << 20;
  const auto sent = pattern(kBytes, 9);
  std::vector<Transfer> sends;
  for (std::size_t i = 0; i < kMessages; ++i) sends.push_back(pair.at(0).send(1, i, sent.data(), kBytes));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(pair.at(1).bytes_received() <= 4 * kBytes);
  CHECK(!pair.at(0).test(sends.back()));
  std::vector<std::uint8_t> got(kBytes);
  for (std::size_t i = 0; i < kMessages; ++i) {
    std::fill(got.begin(), got.end(), 0);
    pair.at(1).wait(pair.at(1).recv(0, i, got.data(), kBytes), plenty());
    CHECK(got == sent);
  }
  pair.at(0).wait(sends, plenty());
}

// The message that is waited for lies behind more than the soft bound: the pool grows instead of standing still.
TEST_BOTH(a_receive_behind_a_full_pool_is_reached) {
  EndpointOptions base;
  base.pool_soft_bytes = 1 << 20;
  Cluster pair(2, kind, base);
  const auto sent = pattern(std::size_t{1} << 20, 9);
  std::vector<Transfer> sends;
  for (std::uint64_t i = 0; i < 16; ++i) sends.push_back(pair.at(0).send(1, i, sent.data(), sent.size()));
  std::vector<std::uint8_t> got(sent.size());
  for (std::uint64_t i = 16; i-- > 0;) {
    pair.at(1).wait(pair.at(1).recv(0, i, got.data(), got.size()), plenty());
    CHECK(got == sent);
  }
  pair.at(0).wait(sends, plenty());
}

TEST_BOTH(the_hard_bound_of_the_pool_is_an_error) {
  EndpointOptions base;
  base.pool_soft_bytes = 1 << 16;
  base.pool_hard_bytes = 1 << 20;
  Cluster pair(2, kind, base);
  const auto sent = pattern(std::size_t{1} << 19, 9);
  std::vector<Transfer> sends;
  for (std::uint64_t i = 0; i < 64; ++i) sends.push_back(pair.at(0).send(1, i, sent.data(), sent.size()));
  std::vector<std::uint8_t> got(sent.size());
  CHECK_THROWS(CommError, "hard bound of 1048576 bytes",
               pair.at(1).wait(pair.at(1).recv(0, 99, got.data(), got.size()), plenty()));
  CHECK_THROWS(PeerLost, "rank 1 is lost", pair.at(0).wait(sends, plenty()));
}

TEST_BOTH(generations_keep_apart) {
  Cluster pair(2, kind);
  int old_value = 1, new_value = 2, got = 0;
  // The receiver is behind: it holds the newer message until it has advanced itself.
  pair.at(0).advance(5);
  pair.at(0).wait(pair.at(0).send(1, 1, &new_value, 4), plenty());
  const Transfer stale = pair.at(1).recv(0, 1, &got, 4);
  CHECK(!pair.at(1).test(stale));
  pair.at(1).advance(5);
  CHECK_THROWS(CommError, "generation before 5", pair.at(1).wait(stale, plenty()));
  // Nothing would come for one that is posted now.
  CHECK_THROWS(CommError, "generation before 5", pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4, 4), plenty()));
  pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 2);
  // An older message is dropped on arrival; the one after it is not.
  pair.at(1).advance(6);
  pair.at(0).wait(pair.at(0).send(1, 1, &old_value, 4), plenty());
  pair.at(0).advance(6);
  pair.at(0).wait(pair.at(0).send(1, 1, &new_value, 4), plenty());
  got = 0;
  pair.at(1).wait(pair.at(1).recv(0, 1, &got, 4), plenty());
  CHECK_EQUAL(got, 2);
  CHECK_THROWS(CommError, "older than the current 6", pair.at(1).advance(5));
}

TEST_BOTH(many_threads_share_an_endpoint) {
  Cluster pair(2, kind);
  constexpr int kThreads = 4, kRounds = 100;
  in_threads(2 * kThreads, [&](int i) {
    const int rank = i % 2;
    const auto tag = static_cast<std::uint64_t>(i / 2);
    for (int round = 0; round < kRounds; ++round) {
      int value = round, got = -1;
      const std::vector<Transfer> both{pair.at(rank).recv(1 - rank, tag, &got, 4),
                                       pair.at(rank).send(1 - rank, tag, &value, 4)};
      pair.at(rank).wait(both, plenty());
      CHECK_EQUAL(got, round);
    }
  });
}

int main(int argc, char** argv) { return run(argc, argv); }
