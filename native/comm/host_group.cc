// Collectives of members that share a host: each writes what the others want into its window once, and they read it
// there. By messages every byte is copied twice for every member that it goes to.
//
// Time goes in rounds of a part each. Between two rounds all members meet, so what one wrote before a meeting the
// others read after it. Halves of a window take turns: what is written in a round is not what is read in it.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/core.h"
#include "comm/errors.h"
#include "comm/group.h"
#include "comm/group_batch.h"
#include "comm/sums.h"
#include "comm/window.h"

namespace elaswave::comm {
namespace {

// The part of `whole` that has its turn in round `round`, by `step` at a time; empty once `whole` is through.
Interval piece_of(Interval whole, std::size_t round, std::size_t step) {
  const std::size_t lo = std::min(whole.hi, whole.lo + round * step);
  return {lo, std::min(whole.hi, lo + step)};
}

std::size_t rounds_of(std::span<const Interval> intervals, std::size_t step) {
  std::size_t longest = 0;
  for (const Interval& interval : intervals) longest = std::max(longest, interval.size());
  return (longest + step - 1) / step;
}

// Of a call: members that call something else, or with other sizes, say another number.
std::uint64_t signature(std::uint64_t operation, std::size_t element_bytes, std::span<const Interval> intervals) {
  std::uint64_t hash = 1469598103934665603u;
  const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  add(operation);
  add(element_bytes);
  for (const Interval& interval : intervals) {
    add(interval.lo);
    add(interval.hi);
  }
  return hash;
}

constexpr std::uint64_t kAllReduce = 1, kReduceScatter = 2, kAllGather = 3;

// What members say when they meet.
struct Greeting {
  Claim claim;
  std::uint64_t call = 0;
};

}  // namespace

class Group::Windows {
 public:
  Windows(Group& group, std::uint64_t call)
      : group_(group),
        tag_(group.next_tag()),
        call_(call),
        lease_(*group.endpoint_->core_->window()),
        claims_(group.ranks_.size()) {
    claims_[static_cast<std::size_t>(group.index_)] = lease_.claim();
    for (const int rank : group.ranks_) {
      const bool own = rank == group.endpoint_->rank();
      const auto link = own ? nullptr : group.endpoint_->core_->table().find(rank);
      views_.push_back(link ? link->window() : nullptr);
      // It was broken and opened anew, without memory: messages of this generation are lost with it anyway.
      if (!own && !views_.back()) throw CommError(complaint(rank, "shares no memory any more"));
    }
  }

  std::byte* own_part(std::size_t round) const { return lease_.part(round % 2); }
  std::byte* own_sum(std::size_t round) const { return lease_.sum(round % 2); }
  const std::byte* part_of(std::size_t m, std::size_t round) const { return views_[m]->part(claims_[m], round % 2); }
  const std::byte* sum_of(std::size_t m, std::size_t round) const { return views_[m]->sum(claims_[m], round % 2); }

  // Returns once every member has come here as often as we have.
  void meet(Deadline deadline) {
    const Greeting own{lease_.claim(), call_};
    std::vector<Greeting> theirs(claims_.size(), own);
    Batch batch(group_, tag_);
    for (int m = 0; m < group_.size(); ++m) {
      if (m != group_.index_) batch.recv(m, kMeetPhase, &theirs[static_cast<std::size_t>(m)], sizeof own);
    }
    for (int m = 0; m < group_.size(); ++m) {
      if (m != group_.index_) batch.send(m, kMeetPhase, &own, sizeof own);
    }
    batch.wait(deadline);
    for (std::size_t m = 0; m < claims_.size(); ++m) {
      if (theirs[m].call != call_) throw CommError(complaint(group_.ranks_[m], "calls another one, or other sizes"));
      claims_[m] = theirs[m].claim;
    }
  }

  // Throws CommError unless all that was read since the last meeting was meant for this collective: a member may have
  // left it and given its place to another.
  void check() const {
    for (std::size_t m = 0; m < views_.size(); ++m) {
      if (views_[m] && !views_[m]->stands(claims_[m])) throw CommError(complaint(group_.ranks_[m], "left it"));
    }
  }

 private:
  std::string complaint(int rank, const std::string& fact) const {
    return "rank " + std::to_string(group_.endpoint_->rank()) + ": a collective of group " +
           std::to_string(group_.id_) + ": rank " + std::to_string(rank) + " " + fact;
  }

  Group& group_;
  const std::uint64_t tag_, call_;
  Window::Lease lease_;
  std::vector<Claim> claims_;
  std::vector<std::shared_ptr<const WindowView>> views_;  // null for the own one
};

// A link of one host that could share no memory is TCP, and only its two ends know.
bool Group::on_one_host(Deadline deadline) {
  if (!on_one_host_) {
    std::int64_t can = endpoint_->core_->window() != nullptr && ranks_.size() <= Window::kMembers ? 1 : 0;
    for (const int rank : ranks_) {
      if (rank == endpoint_->rank()) continue;
      const auto link = endpoint_->core_->table().find(rank);
      if (!link || !link->window()) can = 0;
    }
    all_reduce_small(&can, 1, deadline);
    on_one_host_ = can == size();
  }
  return *on_one_host_;
}

// The own interval's sum comes to `output`. With `everywhere`, which is like `input`, all others' sums come there.
template <typename T>
void Group::reduce_on_host(const T* input, std::span<const Interval> intervals, T* output, T* everywhere,
                           Deadline deadline) {
  const std::size_t members = ranks_.size();
  const auto self = static_cast<std::size_t>(index_);
  const std::size_t step = Window::kPartBytes / members / Window::kLineBytes * Window::kLineBytes / sizeof(T);
  const std::size_t rounds = rounds_of(intervals, step);
  Windows windows(*this, signature(everywhere != nullptr ? kAllReduce : kReduceScatter, sizeof(T), intervals));

  const auto give = [&](std::size_t round) {
    auto* part = reinterpret_cast<T*>(windows.own_part(round));
    for (std::size_t m = 0; m < members; ++m) {
      const Interval theirs = piece_of(intervals[m], round, step);
      if (m != self) std::copy_n(input + theirs.lo, theirs.size(), part + m * step);
    }
  };
  const auto add = [&](std::size_t round) {
    const Interval own = piece_of(intervals[self], round, step);
    std::vector<const T*> inputs;
    for (std::size_t m = 0; m < members; ++m) {
      inputs.push_back(m == self ? input + own.lo
                                 : reinterpret_cast<const T*>(windows.part_of(m, round)) + self * step);
    }
    T* sum = output + (own.lo - intervals[self].lo);
    sum_in_order<T>(inputs, sum, own.size());
    if (everywhere != nullptr) std::copy_n(sum, own.size(), reinterpret_cast<T*>(windows.own_sum(round)));
  };
  const auto take = [&](std::size_t round) {
    for (std::size_t m = 0; m < members; ++m) {
      const Interval theirs = piece_of(intervals[m], round, step);
      if (m == self) continue;
      std::copy_n(reinterpret_cast<const T*>(windows.sum_of(m, round)), theirs.size(), everywhere + theirs.lo);
    }
  };

  give(0);
  const std::size_t last = everywhere != nullptr ? rounds + 1 : rounds;
  for (std::size_t round = 0; round < last; ++round) {
    windows.meet(deadline);
    if (everywhere != nullptr && round > 0) take(round - 1);
    if (round < rounds) add(round);
    windows.check();
    if (round + 1 < rounds) give(round + 1);
  }
  windows.meet(deadline);  // nobody takes a window away while another reads in it
}

void Group::gather_on_host(std::byte* data, std::span<const Interval> intervals, Deadline deadline) {
  constexpr std::size_t kStep = Window::kPartBytes;
  const auto self = static_cast<std::size_t>(index_);
  const std::size_t rounds = rounds_of(intervals, kStep);
  Windows windows(*this, signature(kAllGather, 1, intervals));

  const auto give = [&](std::size_t round) {
    const Interval own = piece_of(intervals[self], round, kStep);
    std::copy_n(data + own.lo, own.size(), windows.own_part(round));
  };
  give(0);
  for (std::size_t round = 0; round < rounds; ++round) {
    windows.meet(deadline);
    for (std::size_t m = 0; m < ranks_.size(); ++m) {
      const Interval theirs = piece_of(intervals[m], round, kStep);
      if (m != self) std::copy_n(windows.part_of(m, round), theirs.size(), data + theirs.lo);
    }
    windows.check();
    if (round + 1 < rounds) give(round + 1);
  }
  windows.meet(deadline);
}

template void Group::reduce_on_host(const float*, std::span<const Interval>, float*, float*, Deadline);
template void Group::reduce_on_host(const double*, std::span<const Interval>, double*, double*, Deadline);
template void Group::reduce_on_host(const std::int64_t*, std::span<const Interval>, std::int64_t*, std::int64_t*,
                                    Deadline);

}  // namespace elaswave::comm
