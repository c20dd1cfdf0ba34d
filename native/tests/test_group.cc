// Groups: what ranks agree on between steps.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cluster.h"
#include "comm/group.h"

using namespace elaswave::comm;
using namespace elaswave::tests;

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

TEST_BOTH(groups_of_every_size_gather_what_each_member_gives) {
  constexpr int kMost = 9;
  Cluster nine(kMost, kind);
  in_threads(kMost, [&](int rank) {
    std::vector<int> members;
    for (int size = 1; size <= kMost; ++size) {
      members.insert(members.begin(), size - 1);  // not in the order of ranks
      if (rank >= size) continue;
      Group group(nine.at(rank), static_cast<std::uint32_t>(size), members, 0);
      std::vector<Interval> intervals;  // some empty, in the reverse order of members
      for (int m = 0, hi = 100; m < size; ++m) {
        const int bytes = (m + size) % 4;
        intervals.push_back({static_cast<std::size_t>(hi - bytes), static_cast<std::size_t>(hi)});
        hi -= bytes;
      }
      const auto word = [&](int m) { return static_cast<std::uint8_t>(10 * size + m); };
      std::vector<std::uint8_t> data(100, 0);
      const Interval own = intervals[static_cast<std::size_t>(group.index())];
      std::fill_n(data.begin() + static_cast<std::ptrdiff_t>(own.lo), own.size(), word(group.index()));
      group.all_gather(data.data(), intervals, plenty());
      for (int m = 0; m < size; ++m) {
        const Interval& part = intervals[static_cast<std::size_t>(m)];
        for (std::size_t i = part.lo; i < part.hi; ++i)
          CHECK_EQUAL(static_cast<int>(data[i]), static_cast<int>(word(m)));
      }
    }
  });
}

TEST_BOTH(nobody_leaves_a_barrier_before_all_have_entered) {
  Cluster five(5, kind);
  std::atomic<int> entered{0};
  in_threads(5, [&](int rank) {
    Group group(five.at(rank), 1, {0, 1, 2, 3, 4}, 0);
    for (int round = 1; round <= 20; ++round) {
      ++entered;
      group.barrier(plenty());
      CHECK(entered.load() >= 5 * round);
      group.barrier(plenty());
    }
  });
}

TEST_BOTH(groups_on_one_endpoint_do_not_mix) {
  Cluster pair(2, kind);
  in_threads(2, [&](int rank) {
    in_threads(2, [&](int which) {
      const std::vector<int> order = which == 0 ? std::vector<int>{0, 1} : std::vector<int>{1, 0};
      Group group(pair.at(rank), static_cast<std::uint32_t>(1 + which), order, 0);
      for (int round = 0; round < 50; ++round) {
        std::int64_t words[2] = {-1, -1};
        words[group.index()] = which * 1000 + round * 10 + rank;
        group.all_gather(words, std::vector<Interval>{{0, 8}, {8, 16}}, plenty());
        for (std::size_t m = 0; m < 2; ++m) CHECK_EQUAL(words[m], which * 1000 + round * 10 + order[m]);
      }
    });
  });
}

TEST_BOTH(a_group_of_one_waits_for_nobody) {
  Cluster pair(2, kind);
  Group alone(pair.at(1), 1, {1}, 0);
  std::int64_t word = 3;
  alone.all_gather(&word, std::vector<Interval>{{0, 8}}, plenty());
  alone.barrier(plenty());
  CHECK_EQUAL(word, 3);
}

TEST(bad_groups_are_refused) {
  Cluster pair(2, LinkKind::kTcp);
  CHECK_THROWS(CommError, "group 3: rank 1 is in it twice", Group(pair.at(0), 3, {0, 1, 1}, 0));
  CHECK_THROWS(CommError, "group 3: rank 0 is not in it", Group(pair.at(0), 3, {1}, 0));
  Group group(pair.at(0), 3, {0, 1}, 0);
  float x = 0;
  const std::vector<Interval> one{{0, 1}};
  CHECK_THROWS(CommError, "has 2 members but got 1 intervals", group.all_gather(&x, one, plenty()));
  const std::vector<Interval> backwards{{0, 1}, {2, 1}};
  CHECK_THROWS(CommError, "runs backwards", group.all_gather(&x, backwards, plenty()));
}

TEST_BOTH(a_lost_member_ends_a_collective) {
  Cluster three(3, kind);
  in_threads(3, [&](int rank) {
    if (rank == 2) {
      three.at(2).close();
      return;
    }
    Group group(three.at(rank), 1, {0, 1, 2}, 0);
    CHECK_THROWS(PeerLost, "rank 2 is lost", group.barrier(plenty()));
  });
}

int main(int argc, char** argv) { return run(argc, argv); }
