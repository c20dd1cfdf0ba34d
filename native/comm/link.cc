#include "comm/link.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

constexpr std::size_t kStaging = std::size_t{32} << 10;
// Messages up to this size are written by the caller's thread; larger ones are left to the IO thread.
constexpr std::size_t kInlineBytes = std::size_t{64} << 10;

}  // namespace

std::size_t Link::KeyHash::operator()(const Key& key) const {
  // The finalizer of MurmurHash3: tags differ in few bits.
  std::uint64_t h = key.tag ^ (std::uint64_t{key.generation} << 32 | key.generation);
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdULL;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return static_cast<std::size_t>(h ^ (h >> 33));
}

Link::Link(int own_rank, int peer, std::unique_ptr<Channel> channel, LinkLimits limits, Signal& signal,
           PendingAbort& pending_abort)
    : own_rank_(own_rank),
      peer_(peer),
      kind_(channel->kind()),
      limits_(limits),
      signal_(signal),
      pending_abort_(pending_abort),
      channel_(std::move(channel)),
      staging_(kStaging) {}

// ---- posting ----------------------------------------------------------------------------------------------------

bool Link::post_send(const RequestPtr& request) {
  const std::lock_guard lock(mutex_);
  if (lost_ || aborted_) {
    fail(request, lost_ ? lost_ : aborted_);
    return false;
  }
  if (outgoing_.size() >= limits_.pending_limit) {
    throw CommError("rank " + std::to_string(own_rank_) + ": more than " + std::to_string(limits_.pending_limit) +
                    " sends to rank " + std::to_string(peer_) + " are pending");
  }
  FrameHeader header;
  header.generation = request->generation;
  header.tag = request->tag;
  header.length = request->bytes;
  const bool alone = outgoing_.empty();
  outgoing_.push_back({header, request, request->data, nullptr, 0});
  if (alone && request->bytes <= kInlineBytes && !write_broken_) progress_send(kInlineBytes + sizeof header);
  return !outgoing_.empty() || write_broken_;
}

bool Link::post_recv(const RequestPtr& request) {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    fail(request, aborted_);
    return false;
  }
  const Key key{request->generation, request->tag};
  const auto slot = slots_.find(key);
  if (slot != slots_.end() && !slot->second.arrivals.empty()) {
    settle_with_arrival(request, slot);
    return std::exchange(stalled_, false);
  }
  if (lost_) {
    fail(request, lost_);
    return false;
  }
  if (receives_posted_ >= limits_.pending_limit) {
    throw CommError("rank " + std::to_string(own_rank_) + ": more than " + std::to_string(limits_.pending_limit) +
                    " receives from rank " + std::to_string(peer_) + " are pending");
  }
  slots_[key].receives.push_back(request);
  ++receives_posted_;
  return std::exchange(stalled_, false);
}

// Gives a new receive the oldest message that waits for it; takes over in the middle if that is still coming in.
void Link::settle_with_arrival(const RequestPtr& request, Slots::iterator slot) {
  const std::shared_ptr<Arrival> arrival = slot->second.arrivals.front();
  slot->second.arrivals.pop_front();
  if (slot->second.arrivals.empty()) slots_.erase(slot);
  pool_bytes_ -= held_bytes(arrival->bytes);
  const bool coming = in_message_ && incoming_.arrival == arrival;
  if (coming) incoming_.arrival = nullptr;
  if (arrival->bytes != request->bytes) {
    fail(request, mismatch(*request, arrival->bytes));
    return;
  }
  if (arrival->filled > 0) std::memcpy(request->data, arrival->data.get(), arrival->filled);
  if (coming) {
    incoming_.receive = request;
  } else {
    complete(request);
  }
}

// ---- progress ---------------------------------------------------------------------------------------------------

Link::Progress Link::progress(std::size_t budget) {
  const std::lock_guard lock(mutex_);
  if (lost_) return Progress::kLost;
  const std::size_t received = progress_receive(budget);
  if (lost_) return Progress::kLost;
  const std::size_t sent = write_broken_ ? 0 : progress_send(budget);
  return received + sent > 0 ? Progress::kMoved : Progress::kIdle;
}

bool Link::try_progress(std::size_t budget) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || lost_) return false;
  const std::size_t received = progress_receive(budget);
  if (lost_) return false;
  return received + (write_broken_ ? 0 : progress_send(budget)) > 0;
}

bool Link::arm() {
  const std::lock_guard lock(mutex_);
  if (lost_) return false;
  return drivers_ > 0 || arm_channel();
}

bool Link::arm_channel() { return !channel_->arm(!stalled_, !outgoing_.empty() && !write_broken_); }

void Link::enter() {
  const std::lock_guard lock(mutex_);
  if (drivers_++ == 0 && !lost_) channel_->disarm();
}

bool Link::leave() {
  const std::lock_guard lock(mutex_);
  if (--drivers_ > 0) return false;
  return lost_ || !arm_channel();
}

void Link::watch(int epoll, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (channel_) channel_->watch(epoll, number);  // it may be over already, and let go of
}

void Link::on_event(bool hangup) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  channel_->on_event();
  if (hangup) {
    hangup_ = true;
    stalled_ = false;
  }
}

bool Link::check_silence(std::chrono::steady_clock::time_point now, bool look_afresh) {
  const std::lock_guard lock(mutex_);
  if (lost_ || !channel_->is_silent(now, look_afresh)) return false;
  lose(Failure::Kind::kLost, "its machine acknowledges nothing any more");
  return true;
}

std::size_t Link::progress_send(std::size_t budget) {
  std::size_t moved = 0;
  while (!outgoing_.empty() && moved < budget) {
    Outgoing& front = outgoing_.front();
    const std::size_t total = sizeof front.header + front.header.length;
    iovec parts[2];
    int count = 0;
    std::size_t data_at = 0;
    if (front.sent < sizeof front.header) {
      parts[count++] = {reinterpret_cast<std::byte*>(&front.header) + front.sent, sizeof front.header - front.sent};
    } else {
      data_at = front.sent - sizeof front.header;
    }
    const std::size_t piece = std::min<std::size_t>(front.header.length - data_at, budget - moved);
    if (piece > 0) parts[count++] = {const_cast<std::byte*>(front.data) + data_at, piece};
    const std::ptrdiff_t n = channel_->write(parts, count);
    if (n == Channel::kClosed) {
      // The peer may have said something before it went; the reading side finds the end and loses the link.
      write_broken_ = true;
      hangup_ = true;
      stalled_ = false;
      return moved;
    }
    if (n == 0) return moved;
    moved += static_cast<std::size_t>(n);
    front.sent += static_cast<std::size_t>(n);
    if (front.sent == total) {
      bytes_sent_ += front.header.length;
      if (front.request) complete(front.request);
      outgoing_.pop_front();
    }
  }
  return moved;
}

std::size_t Link::progress_receive(std::size_t budget) {
  std::size_t moved = 0;
  bool blocked = false;
  while (moved < budget && !blocked && !lost_) {
    if (!in_message_) {
      if (!fill_header() || !begin_message()) return moved;
      moved += sizeof(FrameHeader);
    } else {
      moved += read_payload(budget - moved, blocked);
    }
    if (in_message_ && incoming_.filled == incoming_.header.length) finish_message();
  }
  return moved;
}

// Reads until a whole header is staged; false: not yet, or never.
bool Link::fill_header() {
  while (staged_end_ - staged_begin_ < sizeof(FrameHeader)) {
    if (staged_begin_ > 0) {
      std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
      staged_end_ -= std::exchange(staged_begin_, 0);
    }
    const std::ptrdiff_t n = channel_->read(staging_.data() + staged_end_, staging_.size() - staged_end_);
    if (n == 0) return false;
    if (n == Channel::kClosed) {
      lose(Failure::Kind::kLost, channel_->trouble());
      return false;
    }
    staged_end_ += static_cast<std::size_t>(n);
  }
  return true;
}

// Takes the staged header and finds the place for its payload. False: it has to wait in the stream, or the link is
// lost.
bool Link::begin_message() {
  FrameHeader header;
  std::memcpy(&header, staging_.data() + staged_begin_, sizeof header);
  if (!accepts(header)) return false;
  incoming_ = Incoming{header, 0, nullptr, nullptr};
  if (is_admitted(header) && !find_place(header)) return false;
  staged_begin_ += sizeof header;
  in_message_ = true;
  return true;
}

// A receive that waits for the message, else memory of the pool. False: there is none, and the link is lost.
bool Link::find_place(const FrameHeader& header) {
  const Key key{header.generation, header.tag};
  const auto waiting = slots_.find(key);
  if (waiting == slots_.end() || waiting->second.receives.empty()) {
    // Any length may be announced: what the system has not got ends this link, and not the thread that serves all.
    std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[header.length]);
    if (!memory) {
      lose(Failure::Kind::kComm, "no memory for a message of " + std::to_string(header.length) + " bytes");
      return false;
    }
    incoming_.arrival = std::make_shared<Arrival>(Arrival{header.length, std::move(memory), 0});
    pool_bytes_ += held_bytes(header.length);
    slots_[key].arrivals.push_back(incoming_.arrival);
    return true;
  }
  auto& receives = waiting->second.receives;
  const RequestPtr receive = receives.front();
  receives.pop_front();
  --receives_posted_;
  if (receives.empty()) slots_.erase(waiting);
  if (receive->bytes == header.length) {
    incoming_.receive = receive;
  } else {
    fail(receive, mismatch(*receive, header.length));
  }
  return true;
}

// Whether it is a message that is delivered now, or held until this side is in its generation, too.
bool Link::is_admitted(const FrameHeader& header) {
  return header.kind == FrameKind::kMessage &&
         commit::admit(header.generation, generation_, older_frames_are_dropped_) != commit::Admission::kDrop;
}

bool Link::accepts(const FrameHeader& header) {
  if (const char* fault = fault_of(header)) {
    lose(Failure::Kind::kComm, "the stream is out of step (" + std::string(fault) + ")");
    return false;
  }
  if (!is_admitted(header)) return true;
  const auto slot = slots_.find({header.generation, header.tag});
  if (slot != slots_.end() && !slot->second.receives.empty()) return true;
  if (header.length > limits_.pool_hard_bytes || pool_bytes_ + held_bytes(header.length) > limits_.pool_hard_bytes) {
    lose(Failure::Kind::kComm, "messages without a receive would exceed the hard bound of " +
                                   std::to_string(limits_.pool_hard_bytes) +
                                   " bytes (held: " + std::to_string(pool_bytes_) + "; next: tag " +
                                   std::to_string(header.tag) + ", " + std::to_string(header.length) + " bytes)");
    return false;
  }
  // The first message is always taken: one message larger than the bound must not stand still for ever.
  const bool full = pool_bytes_ > 0 && pool_bytes_ + held_bytes(header.length) > limits_.pool_soft_bytes;
  if (full && receives_posted_ == 0 && !hangup_) {
    stalled_ = true;
    return false;
  }
  stalled_ = false;
  return true;
}

std::size_t Link::read_payload(std::size_t budget, bool& blocked) {
  const std::size_t wanted = std::min<std::size_t>(incoming_.header.length - incoming_.filled, budget);
  std::byte* to = nullptr;
  if (incoming_.receive) to = incoming_.receive->data + incoming_.filled;
  if (incoming_.arrival) to = incoming_.arrival->data.get() + incoming_.filled;
  std::size_t got = std::min(wanted, staged_end_ - staged_begin_);
  if (got > 0) {
    if (to != nullptr) std::memcpy(to, staging_.data() + staged_begin_, got);
    staged_begin_ += got;
  } else if (wanted > 0) {
    // Nothing is staged here, so what is thrown away may go through the staging buffer.
    const bool keep = to != nullptr;
    const std::ptrdiff_t n =
        channel_->read(keep ? to : staging_.data(), keep ? wanted : std::min(wanted, staging_.size()));
    if (n == Channel::kClosed) {
      lose(Failure::Kind::kLost, channel_->trouble());
      return 0;
    }
    blocked = n == 0;
    got = static_cast<std::size_t>(n);
  }
  incoming_.filled += got;
  if (incoming_.arrival) incoming_.arrival->filled = incoming_.filled;
  return got;
}

void Link::finish_message() {
  in_message_ = false;
  bytes_received_ += incoming_.header.length;
  incoming_.arrival = nullptr;
  if (const RequestPtr receive = std::exchange(incoming_.receive, nullptr)) complete(receive);
  if (incoming_.header.kind == FrameKind::kAbort) {
    hear({incoming_.header.generation, PendingAbort::suspect_of(incoming_.header.tag)});
  }
  if (incoming_.header.kind == FrameKind::kGoodbye) lose(Failure::Kind::kLost, "it closed its endpoint", true);
}

// One of a newer generation waits here until we get there: what one peer says of later ones must not hide what another
// says of this one.
void Link::hear(PendingAbort::Abort abort) {
  if (abort.generation > generation_) {
    if (!told_ || told_->generation < abort.generation) told_ = abort;
    return;
  }
  pending_abort_.post(abort);
  signal_.notify();
}

std::unique_ptr<Channel> Link::take_channel() {
  const std::lock_guard lock(mutex_);
  return std::move(channel_);
}

FailurePtr Link::lost() const {
  if (!over_.load()) return nullptr;
  const std::lock_guard lock(mutex_);
  return lost_;
}

int Link::fd() const {
  const std::lock_guard lock(mutex_);
  return channel_ ? channel_->fd() : -1;
}

std::uint64_t Link::bytes_sent() const {
  const std::lock_guard lock(mutex_);
  return bytes_sent_;
}

std::uint64_t Link::bytes_received() const {
  const std::lock_guard lock(mutex_);
  return bytes_received_;
}

std::uint64_t Link::older_frames_rule_consulted() const {
  const std::lock_guard lock(mutex_);
  return older_frames_are_dropped_.consulted();
}

}  // namespace elaswave::comm
