#include "comm/group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "comm/errors.h"

namespace elaswave::comm {

namespace {

// Tags of groups have the top bit set: | 1 | id 23 bits | the collective's number 32 bits | 8 bits of 0 |.
constexpr std::uint64_t kGroupBit = std::uint64_t{1} << 63;
constexpr int kIdShift = 40;
constexpr int kSequenceShift = 8;
constexpr std::uint32_t kIdBound = 1u << 23;

}  // namespace

// Cancels what is not done when a collective is left by an exception: none of its buffers is touched afterwards.
class Group::Batch {
 public:
  explicit Batch(Group& group) : group_(group), tag_(group.next_tag()) {}
  ~Batch() { group_.endpoint_->cancel(transfers_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void send(int rank, const void* data, std::size_t bytes) {
    transfers_.push_back(group_.endpoint_->send(rank, tag_, data, bytes, group_.generation_));
  }
  void recv(int rank, void* data, std::size_t bytes) {
    transfers_.push_back(group_.endpoint_->recv(rank, tag_, data, bytes, group_.generation_));
  }
  void wait(Deadline deadline) { group_.endpoint_->wait(transfers_, deadline, group_.ranks_); }

 private:
  Group& group_;
  std::uint64_t tag_;
  std::vector<Transfer> transfers_;
};

Group::Group(Endpoint& endpoint, std::uint32_t id, std::vector<int> ranks, std::uint32_t generation)
    : endpoint_(&endpoint), id_(id), ranks_(std::move(ranks)), generation_(generation), index_(-1) {
  const std::string name = "group " + std::to_string(id);
  if (id >= kIdBound) throw CommError(name + ": ids are below " + std::to_string(kIdBound));
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (std::find(ranks_.begin(), ranks_.begin() + static_cast<std::ptrdiff_t>(i), ranks_[i]) !=
        ranks_.begin() + static_cast<std::ptrdiff_t>(i)) {
      throw CommError(name + ": rank " + std::to_string(ranks_[i]) + " is in it twice");
    }
    if (ranks_[i] == endpoint.rank()) index_ = static_cast<int>(i);
  }
  if (index_ < 0) throw CommError(name + ": rank " + std::to_string(endpoint.rank()) + " is not in it");
}

std::uint64_t Group::next_tag() {
  return kGroupBit | std::uint64_t{id_} << kIdShift | std::uint64_t{sequence_++} << kSequenceShift;
}

void Group::check_intervals(std::span<const Interval> intervals) const {
  if (intervals.size() != ranks_.size()) {
    throw CommError("group " + std::to_string(id_) + " has " + std::to_string(ranks_.size()) + " members but got " +
                    std::to_string(intervals.size()) + " intervals");
  }
  for (const Interval& interval : intervals) {
    if (interval.lo > interval.hi) {
      throw CommError("group " + std::to_string(id_) + ": interval [" + std::to_string(interval.lo) + ", " +
                      std::to_string(interval.hi) + ") runs backwards");
    }
  }
}

// In about log2(size) rounds (Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8(11), 1997, section 3.1): a member
// that has the data of the k members from itself on hands it to the one k places before it. A message costs a rank far
// more than its bytes do.
void Group::all_gather(void* data, std::span<const Interval> intervals, Deadline deadline) {
  check_intervals(intervals);
  const std::size_t size = ranks_.size();
  const auto member = [&](std::size_t place) { return (static_cast<std::size_t>(index_) + place) % size; };
  std::vector<std::size_t> starts(size + 1);  // in `packed`, by place from this member on
  for (std::size_t place = 0; place < size; ++place) {
    starts[place + 1] = starts[place] + intervals[member(place)].size();
  }
  std::vector<std::byte> packed(starts[size]);
  auto* bytes = static_cast<std::byte*>(data);
  std::copy_n(bytes + intervals[member(0)].lo, starts[1], packed.begin());
  Batch batch(*this);
  for (std::size_t held = 1; held < size; held *= 2) {
    const std::size_t count = std::min(held, size - held);
    batch.recv(ranks_[member(held)], packed.data() + starts[held], starts[held + count] - starts[held]);
    batch.send(ranks_[member(size - held)], packed.data(), starts[count]);
    batch.wait(deadline);
  }
  for (std::size_t place = 1; place < size; ++place) {
    std::copy_n(packed.data() + starts[place], starts[place + 1] - starts[place], bytes + intervals[member(place)].lo);
  }
}

void Group::barrier(Deadline deadline) { all_gather(nullptr, std::vector<Interval>(ranks_.size()), deadline); }

}  // namespace elaswave::comm
