// Real processes, real SIGKILLs. The parent forks before it makes an endpoint, and never has one itself.
#include <cstdint>
#include <vector>

#include "cluster.h"
#include "comm/group.h"
#include "process.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

constexpr int kMost = 4;

// Ports by rank, passed through pipes by the parent.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}

  // In a child: makes the endpoint of `rank` and links it to all others.
  std::unique_ptr<Endpoint> join(int rank, LinkKind kind) {
    EndpointOptions options;
    options.rank = rank;
    options.token = "token";
    options.host_id = "host";
    options.allow_shm = kind == LinkKind::kSharedMemory;
    auto endpoint = std::make_unique<Endpoint>(options);
    to_parent_[rank].put(endpoint->port());
    std::map<int, PeerAddress> peers;
    for (int r = 0; r < size_; ++r) {
      peers[r] = {"127.0.0.1", to_child_[rank].get<std::uint16_t>(), "host"};
    }
    endpoint->connect(peers, plenty());
    for (int r = 0; r < size_; ++r) CHECK(r == rank || endpoint->link_kind(r) == kind);
    return endpoint;
  }

  // In the parent.
  void introduce() {
    std::uint16_t ports[kMost];
    for (int r = 0; r < size_; ++r) ports[r] = to_parent_[r].get<std::uint16_t>();
    for (int r = 0; r < size_; ++r) {
      for (int other = 0; other < size_; ++other) to_child_[r].put(ports[other]);
    }
  }

 private:
  int size_;
  Pipe to_parent_[kMost];
  Pipe to_child_[kMost];
};

}  // namespace

// Rank 1 is killed while a large message is on its way in both directions; rank 0 learns of it at once.
TEST_BOTH(a_peer_killed_midway_is_lost) {
  Meeting meeting(2);
  Pipe started;
  Child victim([&] {
    const auto endpoint = meeting.join(1, kind);
    std::vector<std::uint8_t> data(std::size_t{64} << 20, 1);
    const Transfer send = endpoint->send(0, 1, data.data(), data.size());
    int got = 0;
    endpoint->wait(endpoint->recv(0, 3, &got, 4), plenty());
    started.put(1);
    endpoint->wait(endpoint->recv(0, 4, &got, 4), plenty());  // never comes
  });
  Child witness([&] {
    const auto endpoint = meeting.join(0, kind);
    std::vector<std::uint8_t> in(std::size_t{64} << 20), out(std::size_t{256} << 20, 1);
    int value = 1;
    endpoint->wait(endpoint->send(1, 3, &value, 4), plenty());
    std::vector<Transfer> both;
    for (int i = 0; i < 4; ++i) both.push_back(endpoint->send(1, 2, out.data(), out.size()));
    both.push_back(endpoint->recv(1, 9, in.data(), in.size()));
    try {
      endpoint->wait(both, plenty());
      CHECK(false);
    } catch (const PeerLost& lost) {
      CHECK_EQUAL(lost.rank(), 1);
    }
    CHECK_THROWS(PeerLost, "rank 1 is lost", endpoint->wait(endpoint->recv(1, 9, in.data(), in.size()), plenty()));
    CHECK_THROWS(PeerLost, "rank 1 is lost", endpoint->wait(endpoint->send(1, 9, in.data(), in.size()), plenty()));
  });
  meeting.introduce();
  started.get<int>();
  victim.kill(SIGKILL);
  CHECK(WIFSIGNALED(victim.join()));
  CHECK_EQUAL(witness.join(), 0);
}

// The loss of one member is not the end of the others: they form a smaller group with the next generation.
TEST_BOTH(survivors_go_on_in_a_smaller_group) {
  Meeting meeting(3);
  Pipe ready;
  constexpr std::size_t kPart = std::size_t{1} << 20;
  const std::vector<Interval> parts{{0, kPart}, {kPart, 2 * kPart}, {2 * kPart, 3 * kPart}};
  const auto survive = [&](int rank) {
    const auto endpoint = meeting.join(rank, kind);
    Group all(*endpoint, 1, {0, 1, 2}, 0);
    std::vector<std::uint8_t> data(3 * kPart, static_cast<std::uint8_t>(1 + rank));
    all.all_gather(data.data(), parts, plenty());
    ready.put(1);
    CHECK_THROWS(PeerLost, "rank 2 is lost", {
      for (;;) all.all_gather(data.data(), parts, plenty());
    });
    endpoint->abort("rank 2 is lost");
    endpoint->advance(1);
    Group rest(*endpoint, 1, {0, 1}, 1);
    std::fill(data.begin(), data.end(), static_cast<std::uint8_t>(11 + rank));
    for (int round = 0; round < 3; ++round) rest.all_gather(data.data(), std::span(parts).first(2), plenty());
    for (std::size_t i = 0; i < 2 * kPart; ++i) CHECK(data[i] == 11 + i / kPart);
    rest.barrier(plenty());
  };
  Child zero([&] { survive(0); });
  Child one([&] { survive(1); });
  Child victim([&] {
    const auto endpoint = meeting.join(2, kind);
    Group all(*endpoint, 1, {0, 1, 2}, 0);
    std::vector<std::uint8_t> data(3 * kPart, 3);
    for (;;) all.all_gather(data.data(), parts, plenty());
  });
  meeting.introduce();
  ready.get<int>();
  ready.get<int>();
  victim.kill(SIGKILL);
  CHECK(WIFSIGNALED(victim.join()));
  CHECK_EQUAL(zero.join(), 0);
  CHECK_EQUAL(one.join(), 0);
}

// A rank that computes and waits for nobody asks from time to time, and learns of a loss all the same.
TEST_BOTH(a_lost_member_is_noticed_between_transfers) {
  Meeting meeting(2);
  Pipe ready;
  Child busy([&] {
    const auto endpoint = meeting.join(0, kind);
    endpoint->check(std::vector<int>{1});
    ready.put(1);
    const auto wait_until_lost = [&] {
      for (int i = 0; i < 60'000; ++i) {
        endpoint->check(std::vector<int>{1});
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    CHECK_THROWS(PeerLost, "rank 1 is lost", wait_until_lost());
    endpoint->check({});  // it was a member of nothing that counts now
  });
  Child victim([&] {
    const auto endpoint = meeting.join(1, kind);
    int got = 0;
    endpoint->wait(endpoint->recv(0, 1, &got, 4), plenty());
  });
  meeting.introduce();
  ready.get<int>();
  victim.kill(SIGKILL);
  CHECK(WIFSIGNALED(victim.join()));
  CHECK_EQUAL(busy.join(), 0);
}

// Rank 0 awaits only rank 1, which is alive but says nothing: the loss of rank 2 ends their common operation.
TEST_BOTH(a_loss_ends_an_operation_that_awaits_others) {
  Meeting meeting(3);
  Pipe ready;
  Child waiting([&] {
    const auto endpoint = meeting.join(0, kind);
    int got = 0;
    const std::vector<Transfer> part{endpoint->recv(1, 1, &got, 4)};
    ready.put(1);
    const std::vector<int> members{0, 1, 2};
    CHECK_THROWS(PeerLost, "rank 2 is lost", endpoint->wait(part, plenty(), members));
  });
  const auto stay = [&](int rank) {
    const auto endpoint = meeting.join(rank, kind);
    ready.put(1);
    ::pause();
  };
  Child silent([&] { stay(1); });
  Child victim([&] { stay(2); });
  meeting.introduce();
  for (int i = 0; i < 3; ++i) ready.get<int>();
  victim.kill(SIGKILL);
  CHECK_EQUAL(waiting.join(), 0);
}

int main(int argc, char** argv) { return run(argc, argv); }
