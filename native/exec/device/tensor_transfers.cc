#include "exec/device/tensor_transfers.h"

#include <chrono>
#include <string>

#include "comm/request.h"
#include "exec/program/program.h"

namespace elaswave::exec {
namespace {

// As comm/ names ranks.
int number_of(RankId rank) { return static_cast<int>(rank.value()); }

}  // namespace

TensorTransfers::~TensorTransfers() { drop(); }

void TensorTransfers::set_deadline(double deadline_s) {
  deadline_ = comm::Deadline::after(deadline_s);
  deadline_s_ = deadline_s;
  wait_seconds_ = 0.0;
}

void TensorTransfers::set_members(const std::vector<RankId>& world) {
  members_.clear();
  for (const RankId rank : world) {
    if (rank != rank_) members_.push_back(number_of(rank));
  }
}

void TensorTransfers::check_deadline(const std::string& what) const {
  if (!deadline_.expired()) return;
  throw comm::DeadlineExceeded("rank " + std::to_string(rank_.value()) + ": the deadline of " +
                               std::to_string(deadline_s_) + " s passed before " + what);
}

comm::Endpoint& TensorTransfers::endpoint(RankId peer) {
  if (!endpoint_) {
    throw ExecError("rank " + std::to_string(rank_.value()) + ": a transfer with rank " + std::to_string(peer.value()) +
                    ", but the engine was made without an endpoint");
  }
  return *endpoint_;
}

comm::Transfer TensorTransfers::send(const at::Tensor& tensor, RankId peer, std::uint64_t tag, comm::Lane lane) {
  TORCH_INTERNAL_ASSERT(tensor.is_contiguous() && tensor.is_cpu());
  comm::Endpoint& from = endpoint(peer);
  const comm::Transfer transfer =
      from.send(number_of(peer), tag, tensor.const_data_ptr(), tensor.nbytes(), from.generation(), lane);
  sends_[static_cast<std::size_t>(lane)].push_back({transfer, tensor});
  return transfer;
}

comm::Transfer TensorTransfers::receive(const at::Tensor& into, RankId peer, std::uint64_t tag) {
  TORCH_INTERNAL_ASSERT(into.is_contiguous() && into.is_cpu());
  const comm::Transfer transfer = endpoint(peer).recv(number_of(peer), tag, into.mutable_data_ptr(), into.nbytes());
  receives_[transfer.request().get()] = {transfer, into};
  return transfer;
}

namespace {

// The rank of the first transfer that is not done, for those who watch.
std::optional<int> first_pending(std::span<const comm::Transfer> transfers) {
  for (const comm::Transfer& transfer : transfers) {
    if (transfer.valid() && transfer.request()->state.load() == comm::Request::State::kPending) {
      return transfer.request()->peer;
    }
  }
  return std::nullopt;
}

}  // namespace

void TensorTransfers::wait(std::span<const comm::Transfer> transfers) {
  if (transfers.empty()) return;
  const auto begin = std::chrono::steady_clock::now();
  const std::optional<int> awaited = first_pending(transfers);
  if (awaited) ++waits_;
  awaited_.store(awaited.value_or(kNobody), std::memory_order_relaxed);
  endpoint_->wait(transfers, deadline_, members_);
  awaited_.store(kNobody, std::memory_order_relaxed);
  wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const comm::Transfer& transfer : transfers) receives_.erase(transfer.request().get());
}

bool TensorTransfers::test(const comm::Transfer& transfer) {
  if (!endpoint_->test(transfer)) return false;
  receives_.erase(transfer.request().get());
  return true;
}

bool TensorTransfers::arrived(const comm::Transfer& transfer) const noexcept {
  return transfer.request()->state.load() == comm::Request::State::kDone;
}

void TensorTransfers::check_members() const {
  if (endpoint_) endpoint_->check(members_);
}

void TensorTransfers::broadcast_abort(std::optional<RankId> suspect) noexcept {
  if (endpoint_) endpoint_->broadcast_abort(suspect ? std::optional(number_of(*suspect)) : std::nullopt);
}

void TensorTransfers::wait_all_sends() {
  std::vector<comm::Transfer> transfers;
  std::deque<Posted>& sends = sends_[static_cast<std::size_t>(comm::Lane::kStep)];
  for (const Posted& posted : sends) transfers.push_back(posted.transfer);
  wait(transfers);
  sends.clear();
}

void TensorTransfers::reap() {
  for (std::deque<Posted>& sends : sends_) {
    while (!sends.empty() && endpoint_->test(sends.front().transfer)) sends.pop_front();
  }
}

void TensorTransfers::drop() noexcept {
  std::vector<comm::Transfer> transfers;
  for (const std::deque<Posted>& sends : sends_) {
    for (const Posted& posted : sends) transfers.push_back(posted.transfer);
  }
  for (const auto& [request, posted] : receives_) transfers.push_back(posted.transfer);
  if (endpoint_ && !transfers.empty()) endpoint_->cancel(transfers);
  for (std::deque<Posted>& sends : sends_) sends.clear();
  receives_.clear();
  awaited_.store(kNobody, std::memory_order_relaxed);
}

}  // namespace elaswave::exec
