#include "courier.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>

#include "comm/request.h"
#include "program.h"

namespace elaswave::exec {

Courier::~Courier() { drop(); }

void Courier::set_deadline(double deadline_s) {
  deadline_ = comm::Deadline::after(deadline_s);
  deadline_s_ = deadline_s;
  wait_seconds_ = 0.0;
}

void Courier::set_members(const std::vector<int>& world) {
  members_.clear();
  std::copy_if(world.begin(), world.end(), std::back_inserter(members_), [this](int rank) { return rank != rank_; });
}

void Courier::check_deadline(const std::string& what) const {
  if (!deadline_.expired()) return;
  throw comm::DeadlineExceeded("rank " + std::to_string(rank_) + ": the deadline of " + std::to_string(deadline_s_) +
                               " s passed before " + what);
}

comm::Endpoint& Courier::endpoint(int peer) {
  if (!endpoint_) {
    throw ExecError("rank " + std::to_string(rank_) + ": a transfer with rank " + std::to_string(peer) +
                    ", but the engine was made without an endpoint");
  }
  return *endpoint_;
}

comm::Transfer Courier::send(const at::Tensor& tensor, int peer, std::uint64_t tag) {
  TORCH_INTERNAL_ASSERT(tensor.is_contiguous() && tensor.is_cpu());
  const comm::Transfer transfer = endpoint(peer).send(peer, tag, tensor.const_data_ptr(), tensor.nbytes());
  sends_.push_back({transfer, tensor});
  return transfer;
}

comm::Transfer Courier::receive(const at::Tensor& into, int peer, std::uint64_t tag) {
  TORCH_INTERNAL_ASSERT(into.is_contiguous() && into.is_cpu());
  const comm::Transfer transfer = endpoint(peer).recv(peer, tag, into.mutable_data_ptr(), into.nbytes());
  receives_[transfer.request().get()] = {transfer, into};
  return transfer;
}

namespace {

// The rank of the first transfer that is not done, for those who watch.
int first_pending(std::span<const comm::Transfer> transfers) {
  for (const comm::Transfer& transfer : transfers) {
    if (transfer.valid() && transfer.request()->state.load() == comm::Request::State::kPending) {
      return transfer.request()->peer;
    }
  }
  return -1;
}

}  // namespace

void Courier::wait(std::span<const comm::Transfer> transfers) {
  if (transfers.empty()) return;
  const auto begin = std::chrono::steady_clock::now();
  const int awaited = first_pending(transfers);
  if (awaited != -1) ++waits_;
  awaited_.store(awaited, std::memory_order_relaxed);
  endpoint_->wait(transfers, deadline_, members_);
  awaited_.store(-1, std::memory_order_relaxed);
  wait_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const comm::Transfer& transfer : transfers) receives_.erase(transfer.request().get());
}

bool Courier::test(const comm::Transfer& transfer) {
  if (!endpoint_->test(transfer)) return false;
  receives_.erase(transfer.request().get());
  return true;
}

bool Courier::arrived(const comm::Transfer& transfer) const noexcept {
  return transfer.request()->state.load() == comm::Request::State::kDone;
}

void Courier::check_members() const {
  if (endpoint_) endpoint_->check(members_);
}

void Courier::flood(int suspect) noexcept {
  if (endpoint_) endpoint_->broadcast_abort(suspect < 0 ? std::nullopt : std::optional<int>(suspect));
}

void Courier::wait_all_sends() {
  std::vector<comm::Transfer> transfers;
  for (const Posted& posted : sends_) transfers.push_back(posted.transfer);
  wait(transfers);
  sends_.clear();
}

void Courier::reap() {
  while (!sends_.empty() && endpoint_->test(sends_.front().transfer)) sends_.pop_front();
}

void Courier::drop() noexcept {
  std::vector<comm::Transfer> transfers;
  for (const Posted& posted : sends_) transfers.push_back(posted.transfer);
  for (const auto& [request, posted] : receives_) transfers.push_back(posted.transfer);
  if (endpoint_ && !transfers.empty()) endpoint_->cancel(transfers);
  sends_.clear();
  receives_.clear();
  awaited_.store(-1, std::memory_order_relaxed);
}

}  // namespace elaswave::exec
