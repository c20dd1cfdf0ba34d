// The messages of one collective. Private to comm/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "comm/group.h"

namespace elaswave::comm {

// The lowest bits of a collective's tags.
constexpr std::uint64_t kReducePhase = 0;
constexpr std::uint64_t kGatherPhase = 1;
constexpr std::uint64_t kMeetPhase = 2;

// Cancels what is not done when a collective is left by an exception: none of its buffers is touched afterwards.
class Group::Batch {
 public:
  Batch(Group& group, std::uint64_t tag) : group_(group), tag_(tag) {}
  ~Batch() { group_.endpoint_->cancel(transfers_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void send(int member, std::uint64_t phase, const void* data, std::size_t bytes) {
    transfers_.push_back(group_.endpoint_->send(group_.rank_of(member), tag_ | phase, data, bytes, group_.generation_));
  }
  void recv(int member, std::uint64_t phase, void* data, std::size_t bytes) {
    transfers_.push_back(group_.endpoint_->recv(group_.rank_of(member), tag_ | phase, data, bytes, group_.generation_));
  }
  void add(Transfer transfer) { transfers_.push_back(std::move(transfer)); }
  void wait(Deadline deadline) { group_.endpoint_->wait(transfers_, deadline, group_.ranks_); }
  void wait(const std::vector<Transfer>& some, Deadline deadline) {
    group_.endpoint_->wait(some, deadline, group_.ranks_);
  }
  const Transfer& last() const { return transfers_.back(); }

 private:
  Group& group_;
  std::uint64_t tag_;
  std::vector<Transfer> transfers_;
};

}  // namespace elaswave::comm
