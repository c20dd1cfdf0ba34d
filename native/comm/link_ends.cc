// How transfers and links end other than well: cancelled, aborted, superseded, closed, lost.
#include <cstring>
#include <utility>

#include "comm/errors.h"
#include "comm/link.h"

namespace elaswave::comm {
namespace {

// Bytes read and thrown away, at most, when a link is closed here.
constexpr std::size_t kTurnAwayBytes = std::size_t{16} << 20;

FailurePtr comm_failure(std::string message) {
  return std::make_shared<const Failure>(Failure{Failure::Kind::kComm, std::move(message), std::nullopt, 0});
}

}  // namespace

// ---- taking back ------------------------------------------------------------------------------------------------

void Link::cancel(const RequestPtr& request, const FailurePtr& reason) {
  const std::lock_guard lock(mutex_);
  if (request->state.load() != Request::State::kPending) return;
  const auto chosen = [&](const Request& other) { return &other == request.get(); };
  if (request->kind == Request::Kind::kSend) {
    withdraw_sends(chosen, reason);
  } else {
    withdraw_receives(chosen, reason);
  }
}

// A frame that is partly on its way is completed from a private copy: the stream must not lose its step.
void Link::withdraw_sends(const std::function<bool(const Request&)>& chosen, const FailurePtr& reason) {
  if (under_way_ && under_way_->request && chosen(*under_way_->request)) {
    Outgoing& frame = *under_way_;
    if (const std::size_t length = frame.header.length; length > 0) {
      frame.copy = std::make_unique_for_overwrite<std::byte[]>(length);
      const std::size_t done = frame.sent > sizeof frame.header ? frame.sent - sizeof frame.header : 0;
      std::memcpy(frame.copy.get() + done, frame.data + done, length - done);
      frame.data = frame.copy.get();
    }
    const RequestPtr request = std::exchange(frame.request, nullptr);
    if (frame.completes) fail(request, reason);  // else the rest of it is still in `bulk_`
  }
  const auto withdraw = [&](const auto& each) {
    const bool is_chosen = each.request && chosen(*each.request);
    if (is_chosen) fail(each.request, reason);
    return is_chosen;
  };
  std::erase_if(outgoing_, withdraw);
  std::erase_if(bulk_, withdraw);
}

void Link::withdraw_receives(const std::function<bool(const Request&)>& chosen, const FailurePtr& reason) {
  for (Incoming& message : incoming_) {
    if (message.receive && chosen(*message.receive)) fail(std::exchange(message.receive, nullptr), reason);
  }
  for (auto slot = slots_.begin(); slot != slots_.end();) {
    auto& receives = slot->second.receives;
    for (auto it = receives.begin(); it != receives.end();) {
      if (!chosen(**it)) {
        ++it;
        continue;
      }
      fail(*it, reason);
      it = receives.erase(it);
      --receives_posted_;
    }
    slot = receives.empty() && slot->second.arrivals.empty() ? slots_.erase(slot) : std::next(slot);
  }
}

void Link::abort(const FailurePtr& reason) {
  const std::lock_guard lock(mutex_);
  const auto all = [](const Request&) { return true; };
  withdraw_sends(all, reason);
  withdraw_receives(all, reason);
  aborted_ = reason;
}

bool Link::post_abort(PendingAbort::Abort abort) {
  const std::lock_guard lock(mutex_);
  if (lost_ || write_broken_) return false;
  FrameHeader header;
  header.kind = FrameKind::kAbort;
  header.generation = abort.generation;
  header.tag = PendingAbort::code_of(abort.suspect);
  outgoing_.push_front({header, nullptr, nullptr});
  if (!under_way_) progress_send(sizeof header);  // else what is written in part goes first
  return has_output() || write_broken_;
}

void Link::advance(std::uint32_t generation) {
  const std::lock_guard lock(mutex_);
  aborted_ = nullptr;
  generation_ = generation;
  if (told_ && told_->generation <= generation) hear(*std::exchange(told_, std::nullopt));
  const auto older = [&](const Request& request) { return request.generation < generation; };
  const FailurePtr reason = superseded(generation);
  withdraw_sends(older, reason);
  withdraw_receives(older, reason);
  for (auto slot = slots_.begin(); slot != slots_.end();) {
    if (slot->first.generation >= generation) {
      ++slot;
      continue;
    }
    for (const auto& arrival : slot->second.arrivals) {
      release(*arrival);
      for (Incoming& message : incoming_) {
        if (message.arrival == arrival) message.arrival = nullptr;
      }
    }
    slot = slots_.erase(slot);
  }
  stalled_ = false;
}

FailurePtr Link::superseded(std::uint32_t generation) const {
  return comm_failure("rank " + std::to_string(own_rank_) + ": a transfer with rank " + std::to_string(peer_) +
                      " is of a generation before " + std::to_string(generation));
}

void Link::close(const FailurePtr& reason) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  // Replicas may be under way when a job ends: their piece goes first, if there is room for it.
  while (under_way_ && under_way_->header.kind == FrameKind::kPiece && write_some(kPieceBytes) > 0) continue;
  if (!under_way_) {
    FrameHeader goodbye;
    goodbye.kind = FrameKind::kGoodbye;
    iovec part{&goodbye, sizeof goodbye};
    // A full pipe swallows it or a part of it: the peer then sees the end of the stream alone.
    channel_->write(&part, 1);
  }
  channel_->finish_writing();
  // Closing a TCP socket with unread bytes in it resets the connection, which could overtake what we wrote.
  for (std::size_t read = 0; read < kTurnAwayBytes;) {
    const std::ptrdiff_t n = channel_->read(staging_.data(), staging_.size());
    if (n <= 0) break;
    read += static_cast<std::size_t>(n);
  }
  fail_everything(reason);
}

// ---- ends -------------------------------------------------------------------------------------------------------

void Link::lose(Failure::Kind kind, const std::string& why, bool orderly) {
  Failure failure;
  failure.orderly = orderly;
  failure.kind = kind;
  failure.rank = peer_;
  failure.epoch = generation_;
  failure.message = "rank " + std::to_string(own_rank_) + ": " +
                    (kind == Failure::Kind::kLost ? "rank " + std::to_string(peer_) + " is lost: "
                                                  : "the link to rank " + std::to_string(peer_) + " failed: ") +
                    why + " (epoch " + std::to_string(generation_) + ")";
  fail_everything(std::make_shared<const Failure>(std::move(failure)));
  if (!orderly) pending_abort_.post_loss();
}

void Link::fail_everything(const FailurePtr& reason) {
  lost_ = reason;
  over_.store(true);
  if (under_way_ && under_way_->request && under_way_->completes) fail(under_way_->request, reason);
  under_way_.reset();
  const auto all = [](const Request&) { return true; };
  withdraw_sends(all, reason);
  withdraw_receives(all, reason);
  outgoing_.clear();
  for (Incoming& message : incoming_) drop_incoming(message);
  signal_.notify();
}

// Takes back a message that will never be whole.
void Link::drop_incoming(Incoming& message) {
  if (!std::exchange(message.open, false)) return;
  const std::shared_ptr<Arrival> arrival = std::exchange(message.arrival, nullptr);
  if (!arrival) return;
  release(*arrival);
  const auto slot = slots_.find(message.key);
  slot->second.arrivals.remove(arrival);
  if (slot->second.arrivals.empty()) slots_.erase(slot);
}

FailurePtr Link::mismatch(const Request& request, std::size_t message_bytes) const {
  return comm_failure("rank " + std::to_string(own_rank_) + ": " + request.describe() + ": the message has " +
                      std::to_string(message_bytes) + " bytes; both must be equal");
}

void Link::complete(const RequestPtr& request) {
  request->state.store(Request::State::kDone);
  signal_.notify();
}

void Link::fail(const RequestPtr& request, const FailurePtr& failure) {
  request->failure = failure;
  request->state.store(Request::State::kFailed);
  signal_.notify();
}

}  // namespace elaswave::comm
