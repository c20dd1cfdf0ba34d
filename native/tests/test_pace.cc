// Links of a pace: what comes over them is late, and otherwise as it was sent.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "cluster.h"
#include "comm/channel.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

EndpointOptions paced(double latency_s, double bytes_per_s) {
  EndpointOptions options;
  for (int rank = 0; rank < 3; ++rank) options.paces[rank] = {latency_s, bytes_per_s};
  return options;
}

// Sends `count` messages of `bytes` each from rank 0 and waits for them at rank 1; the seconds until the last is there.
double exchange(Cluster& pair, int count, std::size_t bytes) {
  const std::vector<std::uint8_t> sent(bytes, 7);
  std::vector<std::vector<std::uint8_t>> got(static_cast<std::size_t>(count), std::vector<std::uint8_t>(bytes));
  std::vector<Transfer> receives, sends;
  for (auto& each : got) receives.push_back(pair.at(1).recv(0, 1, each.data(), bytes));
  const double begun = now_s();
  for (int i = 0; i < count; ++i) sends.push_back(pair.at(0).send(1, 1, sent.data(), bytes));
  pair.at(1).wait(receives, plenty());
  const double seconds = now_s() - begun;
  pair.at(0).wait(sends, plenty());
  for (const auto& each : got) CHECK(each == sent);
  return seconds;
}

}  // namespace

TEST_BOTH(a_message_is_under_way_for_the_latency) {
  Cluster pair(2, kind, paced(0.05, kInfinity));
  CHECK(exchange(pair, 1, 100) >= 0.05);
}

TEST_BOTH(bytes_go_one_after_another) {
  Cluster pair(2, kind, paced(0.0, 1e6));
  CHECK(exchange(pair, 10, 5000) >= 0.05);
}

TEST_BOTH(the_latency_is_no_time_of_the_link) {
  Cluster pair(2, kind, paced(0.2, 1e9));
  // One after another they would take ten seconds, on any machine.
  CHECK(exchange(pair, 50, 1000) < 5.0);
}

TEST_BOTH(a_message_larger_than_what_is_held) {
  Cluster pair(2, kind, paced(0.001, 1e9));
  CHECK(exchange(pair, 2, std::size_t{24} << 20) >= 0.048);
}

TEST_BOTH(both_ways_at_once_and_without_a_receive) {
  Cluster three(3, kind, paced(0.002, 2e7));
  in_threads(3, [&](int rank) {
    std::vector<std::vector<std::uint32_t>> sent, got;
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < 3; ++peer) {
      for (std::uint64_t tag = 0; peer != rank && tag < 20; ++tag) {
        sent.emplace_back(100 * (tag + 1), static_cast<std::uint32_t>(100 * rank + tag));
      }
    }
    std::size_t at = 0;
    for (int peer = 0; peer < 3; ++peer) {
      for (std::uint64_t tag = 0; peer != rank && tag < 20; ++tag, ++at) {
        transfers.push_back(three.at(rank).send(peer, tag, sent[at].data(), 4 * sent[at].size()));
      }
    }
    for (int peer = 0; peer < 3; ++peer) {
      for (std::uint64_t tag = 20; peer != rank && tag-- > 0;) {
        got.emplace_back(100 * (tag + 1));
        three.at(rank).wait(three.at(rank).recv(peer, tag, got.back().data(), 4 * got.back().size()), plenty());
        CHECK(got.back() == std::vector<std::uint32_t>(100 * (tag + 1), static_cast<std::uint32_t>(100 * peer + tag)));
      }
    }
    three.at(rank).wait(transfers, plenty());
  });
}

TEST_BOTH(what_a_peer_sent_before_it_went_is_delivered) {
  Cluster pair(2, kind, paced(0.05, 1e7));
  const std::vector<std::uint8_t> sent(100'000, 3);
  std::vector<std::uint8_t> got(sent.size());
  const Transfer receive = pair.at(1).recv(0, 1, got.data(), got.size());
  pair.at(0).wait(pair.at(0).send(1, 1, sent.data(), sent.size()), plenty());
  pair.at(0).close();
  pair.at(1).wait(receive, plenty());
  CHECK(got == sent);
  CHECK_THROWS(PeerLost, "rank 0", pair.at(1).wait(pair.at(1).recv(0, 2, got.data(), got.size()), plenty()));
}

// The other end of a paced channel, as one that reads from a socket: how often it is woken until `bytes` are there.
int wakes(std::size_t bytes, bool expects) {
  std::array<int, 2> ends{};
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const Fd peer(ends[0]), epoll(::epoll_create1(0));
  const auto channel = make_paced_channel(make_tcp_channel(Fd(ends[1]), std::chrono::minutes(1)), {0.0, 1e6});
  channel->watch(epoll.get(), 1);
  std::vector<std::byte> data(bytes);
  CHECK(::write(peer.get(), data.data(), bytes) == static_cast<ssize_t>(bytes));
  std::size_t done = 0;
  for (int woken = 0;; ++woken) {
    do {
      std::ptrdiff_t n = 0;
      while (done < bytes && (n = channel->read(data.data() + done, bytes - done)) > 0) {
        done += static_cast<std::size_t>(n);
      }
      if (done == bytes) return woken;
      if (expects) channel->expect(bytes - done);
    } while (channel->arm(true, false));
    epoll_event event{};
    CHECK(::epoll_wait(epoll.get(), &event, 1, 10'000) == 1);
    channel->on_event();
  }
}

TEST(a_reader_is_not_woken_for_less_than_it_expects) {
  CHECK(wakes(50'000, false) > 10);
  CHECK(wakes(50'000, true) <= 3);
}

TEST(a_pace_that_is_none_is_refused) {
  using Pace = std::pair<double, double>;
  for (const Pace& pace : {Pace{-1.0, 1e9}, Pace{std::nan(""), 1e9}, Pace{0.0, 0.0}, Pace{0.0, std::nan("")}}) {
    CHECK_THROWS(CommError, "a rate above 0", Endpoint(paced(pace.first, pace.second)));
  }
}

int main(int argc, char** argv) { return run(argc, argv); }
