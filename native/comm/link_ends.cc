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
  for (auto it = outgoing_.begin(); it != outgoing_.end();) {
    if (!it->request || !chosen(*it->request)) {
      ++it;
      continue;
    }
    const RequestPtr request = std::exchange(it->request, nullptr);
    if (it->sent == 0) {
      it = outgoing_.erase(it);
    } else {
      const std::size_t length = it->header.length;
      if (length > 0) {
        it->copy = std::make_unique_for_overwrite<std::byte[]>(length);
        const std::size_t done = it->sent > sizeof it->header ? it->sent - sizeof it->header : 0;
        std::memcpy(it->copy.get() + done, it->data + done, length - done);
        it->data = it->copy.get();
      }
      ++it;
    }
    fail(request, reason);
  }
}

void Link::withdraw_receives(const std::function<bool(const Request&)>& chosen, const FailurePtr& reason) {
  if (in_message_ && incoming_.receive && chosen(*incoming_.receive)) {
    fail(std::exchange(incoming_.receive, nullptr), reason);
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
  // A frame that is partly written goes first: the stream must keep its step.
  const bool under_way = !outgoing_.empty() && outgoing_.front().sent > 0;
  outgoing_.insert(outgoing_.begin() + (under_way ? 1 : 0), {header, nullptr, nullptr, nullptr, 0});
  if (!under_way) progress_send(sizeof header);
  return !outgoing_.empty() || write_broken_;
}

void Link::advance(std::uint32_t generation) {
  const std::lock_guard lock(mutex_);
  aborted_ = nullptr;
  generation_ = generation;
  if (told_ && told_->generation <= generation) hear(*std::exchange(told_, std::nullopt));
  const auto older = [&](const Request& request) { return request.generation < generation; };
  const FailurePtr reason =
      comm_failure("rank " + std::to_string(own_rank_) + ": a transfer with rank " + std::to_string(peer_) +
                   " is of a generation before " + std::to_string(generation));
  withdraw_sends(older, reason);
  withdraw_receives(older, reason);
  for (auto slot = slots_.begin(); slot != slots_.end();) {
    if (slot->first.generation >= generation) {
      ++slot;
      continue;
    }
    for (const auto& arrival : slot->second.arrivals) {
      pool_bytes_ -= held_bytes(arrival->bytes);
      if (incoming_.arrival == arrival) incoming_.arrival = nullptr;
    }
    slot = slots_.erase(slot);
  }
  stalled_ = false;
}

void Link::close(const FailurePtr& reason) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  if (outgoing_.empty() || outgoing_.front().sent == 0) {
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
  for (const Outgoing& out : outgoing_) {
    if (out.request) fail(out.request, reason);
  }
  outgoing_.clear();
  withdraw_receives([](const Request&) { return true; }, reason);
  drop_incoming();
  signal_.notify();
}

// Takes back a message that will never be whole.
void Link::drop_incoming() {
  if (!in_message_) return;
  in_message_ = false;
  const std::shared_ptr<Arrival> arrival = std::exchange(incoming_.arrival, nullptr);
  if (!arrival) return;
  pool_bytes_ -= held_bytes(arrival->bytes);
  const auto slot = slots_.find({incoming_.header.generation, incoming_.header.tag});
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
