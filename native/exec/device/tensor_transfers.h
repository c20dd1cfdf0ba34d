// Tensors over an endpoint, for one engine: keeps what is in flight alive, applies the step's deadline, counts the time
// spent waiting. Private to exec/; same thread as the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "comm/endpoint.h"
#include "ids.h"

namespace elaswave::exec {

class TensorTransfers {
 public:
  TensorTransfers(RankId rank, std::shared_ptr<comm::Endpoint> endpoint)
      : rank_(rank), endpoint_(std::move(endpoint)) {}
  ~TensorTransfers();
  TensorTransfers(const TensorTransfers&) = delete;
  TensorTransfers& operator=(const TensorTransfers&) = delete;

  RankId rank() const { return rank_; }
  // Of the links; 0 without.
  std::uint32_t generation() const { return endpoint_ ? endpoint_->generation() : 0; }
  // As Endpoint::cut; a rank that is alone is cut off from nobody.
  void cut(double seconds) {
    if (endpoint_) endpoint_->cut(seconds);
  }
  void set_deadline(double deadline_s);
  // All ranks of the step: the loss of one ends every wait, for the others may have left the step because of it.
  void set_members(const std::vector<RankId>& world);
  // Throws comm::DeadlineExceeded, with `what` in its message, if the deadline has passed.
  void check_deadline(const std::string& what) const;

  // `tensor` must be contiguous, on the CPU, and must not change until the transfer is done. Never block. Throw
  // ExecError without an endpoint, CommError as the endpoint does.
  comm::Transfer send(const at::Tensor& tensor, RankId peer, std::uint64_t tag, comm::Lane lane = comm::Lane::kStep);
  comm::Transfer receive(const at::Tensor& into, RankId peer, std::uint64_t tag);

  // Blocks until all are done, at most until the deadline. Throws like Endpoint::wait.
  void wait(std::span<const comm::Transfer> transfers);
  void wait_all_sends();  // of step messages
  // Whether it is done; never blocks. Throws like Endpoint::test.
  bool test(const comm::Transfer& transfer);
  // The same without a look at the link, which others take; false when it failed. Also after a failed wait.
  bool arrived(const comm::Transfer& transfer) const noexcept;
  // Throws comm::Aborted while an abort lasts, comm::PeerLost when a member is gone.
  void check_members() const;
  // Has all ranks leave the step; without a suspect nobody is accused.
  void broadcast_abort(std::optional<RankId> suspect) noexcept;
  // The rank that a wait waits for, if something is waited for. For other threads too.
  std::optional<RankId> awaited() const {
    const int awaited = awaited_.load(std::memory_order_relaxed);
    return awaited == kNobody ? std::nullopt : std::optional(RankId(awaited));
  }
  // Lets go of the tensors of finished sends, in each lane up to the first that is not. Throws like Endpoint::test.
  void reap();
  // Cancels all that is in flight; nobody touches the tensors afterwards. For failures.
  void drop() noexcept;

  double wait_seconds() const { return wait_seconds_; }
  // How many waits did not find everything there.
  std::int64_t waits() const { return waits_; }

 private:
  struct Posted {
    comm::Transfer transfer;
    at::Tensor tensor;
  };
  static constexpr int kNobody = -1;  // as an atomic: an optional is too large to be one
  comm::Endpoint& endpoint(RankId peer);

  RankId rank_;
  std::shared_ptr<comm::Endpoint> endpoint_;
  comm::Deadline deadline_ = comm::Deadline::after(0);
  double deadline_s_ = 0.0;
  double wait_seconds_ = 0.0;
  std::int64_t waits_ = 0;
  std::atomic<int> awaited_{kNobody};
  std::vector<int> members_;                 // without this rank; as the endpoint takes them
  std::array<std::deque<Posted>, 2> sends_;  // by lane, in which they are done one after the other
  std::unordered_map<const comm::Request*, Posted> receives_;
};

// Engine's own kinds of tags; values use kinds 1 and 2.
inline constexpr std::uint64_t kReduceTag = 3, kGatherTag = 4, kVoteTag = 6;
// 7, 11 and 14 are the worker's, for handing state back and for checkpoints.
inline constexpr std::uint64_t kRecordTag = 8, kRecordHeaderTag = 9, kStateTag = 10;
inline constexpr std::uint64_t kResidualCountTag = 12, kResidualsTag = 13, kStateAnswerTag = 15, kCatchUpRecordTag = 16;
inline std::uint64_t tag_of(std::uint64_t kind, std::size_t index) { return kind << 56 | std::uint64_t{index} << 32; }

}  // namespace elaswave::exec
