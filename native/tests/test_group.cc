// Collectives: results, order of additions, uneven intervals, routes.
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cluster.h"
#include "comm/group.h"
#include "comm/window.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

namespace {

// Values whose float sum depends on the order of addition.
template <typename T>
T value_of(int rank, std::size_t i) {
  const auto raw = static_cast<std::int64_t>((i * 2654435761u + static_cast<std::size_t>(rank) * 40503u) % 100003);
  if constexpr (std::is_integral_v<T>) return static_cast<T>(raw);
  return static_cast<T>(raw) * static_cast<T>(rank % 2 == 0 ? 1e-3 : 1e3);
}

template <typename T>
T sum_of(const std::vector<int>& ranks, std::size_t i) {
  T sum = value_of<T>(ranks[0], i);
  for (std::size_t m = 1; m < ranks.size(); ++m) sum += value_of<T>(ranks[m], i);
  return sum;
}

template <typename T>
void check_all_reduce(LinkKind kind, const std::vector<std::size_t>& counts) {
  const std::vector<int> order{2, 0, 3, 1};  // member order is not rank order
  Cluster four(4, kind);
  in_threads(4, [&](int rank) {
    Group group(four.at(rank), 1, order, 0);
    for (const std::size_t count : counts) {
      std::vector<T> data(count);
      for (std::size_t i = 0; i < count; ++i) data[i] = value_of<T>(rank, i);
      group.all_reduce(data.data(), count, plenty());
      for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == sum_of<T>(order, i));
    }
  });
}

// Three endpoints, of which `apart` shares memory with neither of the others.
template <typename T>
void check_three(const std::function<void(EndpointOptions&)>& choose, int apart, const std::vector<int>& order,
                 std::size_t count) {
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  std::map<int, PeerAddress> table;
  for (int rank = 0; rank < 3; ++rank) {
    EndpointOptions options;
    options.rank = rank;
    options.token = "the job's token";
    options.host_id = "host";
    choose(options);
    endpoints.push_back(std::make_unique<Endpoint>(options));
    table[rank] = {"127.0.0.1", endpoints.back()->port(), options.host_id};
  }
  in_threads(3, [&](int rank) { endpoints[static_cast<std::size_t>(rank)]->connect(table, plenty()); });
  CHECK(endpoints[0]->link_kind(3 - apart) == LinkKind::kSharedMemory);
  CHECK(endpoints[0]->link_kind(apart) == LinkKind::kTcp);
  in_threads(3, [&](int rank) {
    Group group(*endpoints[static_cast<std::size_t>(rank)], 1, order, 0);
    std::vector<T> data(count);
    for (std::size_t i = 0; i < count; ++i) data[i] = value_of<T>(rank, i);
    group.all_reduce(data.data(), count, plenty());
    for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == sum_of<T>(order, i));
  });
}

}  // namespace

TEST_BOTH(all_reduce_adds_floats_in_member_order) {
  check_all_reduce<float>(kind, {0, 1, 3, 2047, 2049, 100001, 1000003});
}
TEST_BOTH(all_reduce_adds_doubles_and_integers) {
  check_all_reduce<double>(kind, {5, 70001});
  check_all_reduce<std::int64_t>(kind, {5, 70001});
}

TEST_BOTH(reduce_scatter_with_uneven_intervals) {
  Cluster three(3, kind);
  const std::vector<int> order{0, 1, 2};
  const std::vector<Interval> intervals{{0, 300001}, {300001, 300001}, {300001, 300008}};
  in_threads(3, [&](int rank) {
    Group group(three.at(rank), 1, order, 0);
    std::vector<float> input(300008);
    for (std::size_t i = 0; i < input.size(); ++i) input[i] = value_of<float>(rank, i);
    const Interval own = intervals[static_cast<std::size_t>(rank)];
    std::vector<float> output(own.size() + 1, -1.0f);
    for (int round = 0; round < 3; ++round) {
      group.reduce_scatter<float>(input.data(), intervals, output.data(), plenty());
      for (std::size_t i = 0; i < own.size(); ++i) CHECK(output[i] == sum_of<float>(order, own.lo + i));
      CHECK(output[own.size()] == -1.0f);
    }
    // In place: the own part of the input is the output.
    group.reduce_scatter<float>(input.data(), intervals, input.data() + own.lo, plenty());
    for (std::size_t i = own.lo; i < own.hi; ++i) CHECK(input[i] == sum_of<float>(order, i));
  });
}

TEST_BOTH(all_gather_with_uneven_intervals) {
  Cluster three(3, kind);
  const std::vector<Interval> intervals{{0, 5}, {2000, 3002000}, {5, 5}};
  in_threads(3, [&](int rank) {
    Group group(three.at(rank), 1, {0, 1, 2}, 0);
    std::vector<std::uint8_t> data(3002000, 0);
    const Interval own = intervals[static_cast<std::size_t>(rank)];
    for (std::size_t i = own.lo; i < own.hi; ++i) data[i] = static_cast<std::uint8_t>(i * 7 + 1);
    group.all_gather(data.data(), intervals, plenty());
    for (const Interval& interval : intervals) {
      for (std::size_t i = interval.lo; i < interval.hi; ++i) CHECK(data[i] == static_cast<std::uint8_t>(i * 7 + 1));
    }
    for (std::size_t i = 5; i < 2000; ++i) CHECK(data[i] == 0);
  });
}

TEST_BOTH(broadcast_and_barrier) {
  Cluster three(3, kind);
  std::atomic<int> entered{0};
  in_threads(3, [&](int rank) {
    Group group(three.at(rank), 1, {0, 1, 2}, 0);
    std::vector<int> data(100000, rank);
    group.broadcast(1, data.data(), data.size() * sizeof(int), plenty());
    for (const int x : data) CHECK_EQUAL(x, 1);
    for (int round = 1; round <= 20; ++round) {
      ++entered;
      group.barrier(plenty());
      CHECK(entered.load() >= 3 * round);
      group.barrier(plenty());
    }
  });
}

TEST_BOTH(groups_on_one_endpoint_do_not_mix) {
  Cluster pair(2, kind);
  in_threads(2, [&](int rank) {
    Group a(pair.at(rank), 1, {0, 1}, 0);
    Group b(pair.at(rank), 2, {1, 0}, 0);
    in_threads(2, [&](int which) {
      Group& group = which == 0 ? a : b;
      for (int round = 0; round < 50; ++round) {
        std::int64_t value = which * 1000 + round;
        group.all_reduce(&value, 1, plenty());
        CHECK_EQUAL(value, 2 * (which * 1000 + round));
      }
    });
  });
}

// All sizes of one collective in turn, and two groups at once, each with places of its own in the windows.
TEST_BOTH(large_collectives_of_two_groups_run_at_once) {
  Cluster three(3, kind);
  const std::vector<Interval> slices{{0, 1 << 20}, {1 << 20, 2 << 20}, {2 << 20, 3 << 20}};
  in_threads(3, [&](int rank) {
    in_threads(2, [&](int which) {
      Group group(three.at(rank), static_cast<std::uint32_t>(1 + which), {0, 1, 2}, 0);
      std::vector<std::uint8_t> bytes(3 << 20);
      std::vector<std::int64_t> numbers(200000);
      for (int round = 0; round < 5; ++round) {
        const int salt = 7 * which + round;
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<std::int64_t>(i) * (rank + salt);
        group.all_reduce(numbers.data(), numbers.size(), plenty());
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          CHECK_EQUAL(numbers[i], static_cast<std::int64_t>(i) * (3 + 3 * salt));
        }
        const Interval own = slices[static_cast<std::size_t>(rank)];
        std::fill_n(bytes.data() + own.lo, own.size(), static_cast<std::uint8_t>(rank + salt));
        group.all_gather(bytes.data(), slices, plenty());
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          CHECK_EQUAL(bytes[i], static_cast<std::uint8_t>(static_cast<int>(i >> 20) + salt));
        }
      }
    });
  });
}

TEST(members_of_two_hosts_reduce_by_messages) {
  check_three<float>([](EndpointOptions& options) { options.host_id = options.rank < 2 ? "one" : "two"; }, 2, {2, 0, 1},
                     300001);
}

// Rank 1 says what a member of a collective says, without being in one: its window holds nothing for rank 0.
TEST(what_a_member_wrote_for_another_collective_is_not_taken) {
  struct Greeting {
    Claim claim;
    std::uint64_t call = 0;
  };
  constexpr std::uint64_t kGroup = std::uint64_t{1} << 63 | std::uint64_t{1} << 40;
  constexpr std::uint64_t kFirst = kGroup, kSecond = kGroup | 1u << 8 | 2;  // the vote; meetings of what comes next
  const auto against = [&](const Claim& claim, bool same_call) {
    Cluster pair(2, LinkKind::kSharedMemory);
    in_threads(2, [&](int rank) {
      if (rank == 0) {
        Group group(pair.at(0), 1, {0, 1}, 0);
        std::vector<float> data(300000, 1.0f);
        const std::string fact = !same_call ? "rank 1 calls another one" : claim.place < 4 ? "rank 1 left it" : "has 4";
        CHECK_THROWS(CommError, fact, group.all_reduce(data.data(), data.size(), plenty()));
        return;
      }
      const std::int64_t yes = 1;
      std::int64_t vote = 0;
      Greeting theirs;
      pair.at(1).wait(pair.at(1).send(0, kFirst, &yes, sizeof yes), plenty());
      pair.at(1).wait(pair.at(1).recv(0, kFirst, &vote, sizeof vote), plenty());
      pair.at(1).wait(pair.at(1).recv(0, kSecond, &theirs, sizeof theirs), plenty());
      const Greeting ours{claim, same_call ? theirs.call : theirs.call + 1};
      pair.at(1).wait(pair.at(1).send(0, kSecond, &ours, sizeof ours), plenty());
    });
  };
  against({0, 1}, true);
  against({Window::kPlaces, 1}, true);
  against({0, 0}, false);
}

TEST(members_that_call_different_collectives_are_told) {
  Cluster pair(2, LinkKind::kSharedMemory);
  in_threads(2, [&](int rank) {
    Group group(pair.at(rank), 1, {0, 1}, 0);
    std::vector<float> data(4000, 1.0f);
    CHECK_THROWS(CommError, "calls another one, or other sizes",
                 group.all_reduce(data.data(), rank == 0 ? 3000 : 4000, plenty()));
  });
}

TEST_BOTH(collectives_of_one_and_of_many) {
  constexpr int kMany = 6;
  Cluster many(kMany, kind);
  in_threads(kMany, [&](int rank) {
    Group all(many.at(rank), 1, {5, 4, 3, 2, 1, 0}, 0);
    std::vector<float> data(400001);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = value_of<float>(rank, i);
    all.all_reduce(data.data(), data.size(), plenty());
    for (std::size_t i = 0; i < data.size(); ++i) CHECK(data[i] == sum_of<float>({5, 4, 3, 2, 1, 0}, i));
    Group alone(many.at(rank), static_cast<std::uint32_t>(2 + rank), {rank}, 0);
    const std::vector<Interval> whole{{0, data.size()}};
    std::vector<float> copy(data.size());
    alone.reduce_scatter<float>(data.data(), whole, copy.data(), plenty());
    CHECK(copy == data);
    alone.all_gather(copy.data(), std::vector<Interval>{{0, copy.size() * sizeof(float)}}, plenty());
    CHECK(copy == data);
  });
}

// Sums that fill their place in the window, and one element more.
TEST(sums_of_two_members_at_the_bound_of_a_window) {
  constexpr std::size_t kFull = 2 * Window::kSumBytes / sizeof(float);
  check_all_reduce<float>(LinkKind::kSharedMemory, {kFull, kFull + 1});
  Cluster pair(2, LinkKind::kSharedMemory);
  in_threads(2, [&](int rank) {
    Group group(pair.at(rank), 1, {0, 1}, 0);
    for (const std::size_t count : {kFull, kFull + 1}) {
      std::vector<float> data(count, static_cast<float>(1 + rank));
      group.all_reduce(data.data(), count, plenty());
      CHECK(data == std::vector<float>(count, 3.0f));
    }
  });
}

TEST(a_member_that_shares_no_memory_reduces_by_messages) {
  check_three<double>([](EndpointOptions& options) { options.allow_shm = options.rank != 1; }, 1, {0, 1, 2}, 100001);
}

// Samples [0,4) and [4,10) on two senders go to [0,3), [3,5), [5,10) on three receivers; ranks are both at once.
TEST_BOTH(routes_between_layouts_that_do_not_line_up) {
  Cluster three(3, kind);
  const std::vector<Interval> from{{0, 4}, {4, 10}, {10, 10}};
  const std::vector<Interval> to{{0, 3}, {3, 5}, {5, 10}};
  in_threads(3, [&](int rank) {
    Group group(three.at(rank), 1, {0, 1, 2}, 0);
    const auto me = static_cast<std::size_t>(rank);
    std::vector<int> source, target(to[me].size(), -1);
    for (std::size_t i = from[me].lo; i < from[me].hi; ++i) source.push_back(static_cast<int>(100 + i));
    std::vector<SendPiece> sends;
    std::vector<RecvPiece> receives;
    for (std::size_t other = 0; other < 3; ++other) {
      const std::size_t lo = std::max(from[me].lo, to[other].lo), hi = std::min(from[me].hi, to[other].hi);
      if (lo < hi) sends.push_back({static_cast<int>(other), 1, &source[lo - from[me].lo], 4 * (hi - lo)});
      const std::size_t a = std::max(from[other].lo, to[me].lo), b = std::min(from[other].hi, to[me].hi);
      if (a < b) receives.push_back({static_cast<int>(other), 1, &target[a - to[me].lo], 4 * (b - a)});
    }
    group.route(sends, receives, plenty());
    for (std::size_t i = 0; i < target.size(); ++i) CHECK_EQUAL(target[i], static_cast<int>(100 + to[me].lo + i));
  });
}

TEST(bad_groups_and_routes_are_refused) {
  Cluster pair(2, LinkKind::kTcp);
  CHECK_THROWS(CommError, "group 3: rank 1 is in it twice", Group(pair.at(0), 3, {0, 1, 1}, 0));
  CHECK_THROWS(CommError, "group 3: rank 0 is not in it", Group(pair.at(0), 3, {1}, 0));
  Group group(pair.at(0), 3, {0, 1}, 0);
  float x = 0;
  const std::vector<Interval> one{{0, 1}};
  CHECK_THROWS(CommError, "has 2 members but got 1 intervals", group.reduce_scatter<float>(&x, one, &x, plenty()));
  const std::vector<Interval> backwards{{0, 1}, {2, 1}};
  CHECK_THROWS(CommError, "runs backwards", group.all_gather(&x, backwards, plenty()));
  const std::vector<SendPiece> piece{{0, 9, &x, 4}};
  CHECK_THROWS(CommError, "tag 9: nothing receives it", group.route(piece, {}, plenty()));
  CHECK_THROWS(CommError, "has no member 2", group.send(2, 0, &x, 4));
}

TEST_BOTH(a_lost_member_ends_a_collective) {
  Cluster three(3, kind);
  in_threads(3, [&](int rank) {
    if (rank == 2) {
      three.at(2).close();
      return;
    }
    Group group(three.at(rank), 1, {0, 1, 2}, 0);
    std::vector<float> data(1000000, 1.0f);
    CHECK_THROWS(PeerLost, "rank 2 is lost", group.all_reduce(data.data(), data.size(), plenty()));
  });
}

int main(int argc, char** argv) { return run(argc, argv); }
