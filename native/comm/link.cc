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
  if (outgoing_.size() + bulk_.size() >= limits_.pending_limit) {
    throw CommError("rank " + std::to_string(own_rank_) + ": more than " + std::to_string(limits_.pending_limit) +
                    " sends to rank " + std::to_string(peer_) + " are pending");
  }
  if (request->lane == Lane::kBulk) {
    bulk_.push_back({request});
    return true;
  }
  FrameHeader header;
  header.generation = request->generation;
  header.tag = request->tag;
  header.length = request->bytes;
  const bool next = outgoing_.empty() && (!under_way_ || under_way_->header.kind != FrameKind::kMessage);
  outgoing_.push_back({header, request, request->data, true});
  if (next && request->bytes <= kInlineBytes && !write_broken_) progress_send(kInlineBytes + sizeof header);
  return has_output() || write_broken_;
}

bool Link::post_recv(const RequestPtr& request) {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    fail(request, aborted_);
    return false;
  }
  if (request->generation < generation_) {
    fail(request, superseded(generation_));  // what it waits for would be dropped
    return false;
  }
  const Key key{request->generation, request->tag};
  const auto slot = slots_.find(key);
  if (slot != slots_.end() && !slot->second.arrivals.empty()) {
    settle_with_arrival(request, slot);
    return std::exchange(stalled_, false) || owes_word();
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
  release(*arrival);
  const auto coming =
      std::find_if(incoming_.begin(), incoming_.end(), [&](Incoming& each) { return each.arrival == arrival; });
  if (coming != incoming_.end()) coming->arrival = nullptr;
  if (arrival->bytes != request->bytes) {
    fail(request, mismatch(*request, arrival->bytes));
    return;
  }
  if (arrival->filled > 0) std::memcpy(request->data, arrival->data.get(), arrival->filled);
  if (coming != incoming_.end()) {
    coming->receive = request;
  } else {
    complete(request);
  }
}

// What it took in memory that is bounded, here and at the sender, is free.
void Link::release(Arrival& arrival) {
  pool_bytes_ -= std::exchange(arrival.pooled, 0);
  taken_ += std::exchange(arrival.untaken, 0);
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

bool Link::arm_channel() { return !channel_->arm(!stalled_, has_output() && !write_broken_); }

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
  while (moved < budget && (under_way_ || choose_frame())) {
    const std::size_t written = write_some(budget - moved);
    if (written == 0) break;
    moved += written;
  }
  return moved;
}

// Of the frame that is under way; 0: the channel takes nothing right now, or nothing any more.
std::size_t Link::write_some(std::size_t budget) {
  Outgoing& frame = *under_way_;
  const std::size_t total = sizeof frame.header + frame.header.length;
  iovec parts[2];
  int count = 0;
  std::size_t data_at = 0;
  if (frame.sent < sizeof frame.header) {
    parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + frame.sent, sizeof frame.header - frame.sent};
  } else {
    data_at = frame.sent - sizeof frame.header;
  }
  const std::size_t bytes = std::min<std::size_t>(frame.header.length - data_at, budget);
  if (bytes > 0) parts[count++] = {const_cast<std::byte*>(frame.data) + data_at, bytes};
  const std::ptrdiff_t n = channel_->write(parts, count);
  if (n == Channel::kClosed) {
    // The peer may have said something before it went; the reading side finds the end and loses the link.
    write_broken_ = true;
    hangup_ = true;
    stalled_ = false;
    return 0;
  }
  frame.sent += static_cast<std::size_t>(n);
  if (frame.sent == total) finish_frame_sent();
  return static_cast<std::size_t>(n);
}

// Whether the peer has room for the next piece.
bool Link::may_cut() const {
  if (bulk_.empty()) return false;
  const std::size_t bytes = std::min(kPieceBytes, bulk_.front().request->bytes - bulk_.front().cut);
  return cut_ - peer_took_ + held_bytes(bytes) <= kMostAhead;
}

// The frame to be written next: a word on what was taken, which the peer's pieces wait for, step messages, then bulk;
// a piece that was overtaken by enough goes before the next step message.
bool Link::choose_frame() {
  if (owes_word()) {
    FrameHeader header;
    header.kind = FrameKind::kTaken;
    header.tag = acknowledged_ = taken_;
    under_way_.emplace(Outgoing{header, nullptr, nullptr});
    return true;
  }
  const bool bulk = may_cut();
  if (bulk && (outgoing_.empty() || overtaken_by_ >= kOvertakeMost)) {
    cut_piece();
    return true;
  }
  if (outgoing_.empty()) return false;
  under_way_.emplace(std::move(outgoing_.front()));
  outgoing_.pop_front();
  if (bulk) overtaken_by_ += under_way_->header.length;
  return true;
}

void Link::cut_piece() {
  Bulk& bulk = bulk_.front();
  const RequestPtr request = bulk.request;
  FrameHeader header;
  header.kind = FrameKind::kPiece;
  header.generation = request->generation;
  header.tag = request->tag;
  header.total = request->bytes;
  header.piece = bulk.pieces++;
  header.length = std::min(kPieceBytes, request->bytes - bulk.cut);
  const std::byte* data = request->data + bulk.cut;
  bulk.cut += header.length;
  const bool last = bulk.cut == request->bytes;
  if (last) bulk_.pop_front();
  under_way_.emplace(Outgoing{header, request, data, last});
  cut_ += held_bytes(header.length);
  overtaken_by_ = 0;
}

void Link::finish_frame_sent() {
  bytes_sent_ += under_way_->header.length;
  if (under_way_->request && under_way_->completes) complete(under_way_->request);
  under_way_.reset();
}

std::size_t Link::progress_receive(std::size_t budget) {
  std::size_t moved = 0;
  bool blocked = false;
  while (moved < budget && !blocked && !lost_) {
    if (!in_frame_) {
      if (!fill_header() || !begin_frame()) return moved;
      moved += sizeof(FrameHeader);
    } else {
      moved += read_payload(budget - moved, blocked);
    }
    if (in_frame_ && frame_filled_ == frame_.length) finish_frame();
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
    if (n == 0) {
      channel_->expect(sizeof(FrameHeader) - staged_end_);
      return false;
    }
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
bool Link::begin_frame() {
  FrameHeader header;
  std::memcpy(&header, staging_.data() + staged_begin_, sizeof header);
  if (!accepts(header)) return false;
  if (header.kind == FrameKind::kPiece) {
    begin_piece(header);
  } else if (header.kind == FrameKind::kMessage) {
    Incoming& message = incoming(Lane::kStep);
    message = Incoming{{header.generation, header.tag}, header.length, true};
    if (is_admitted(header)) find_place(message, header.length, held_bytes(header.length));
  }
  if (lost_) return false;
  staged_begin_ += sizeof header;
  in_frame_ = true;
  frame_ = header;
  frame_filled_ = 0;
  return true;
}

void Link::begin_piece(const FrameHeader& header) {
  Incoming& message = incoming(Lane::kBulk);
  if (header.piece == 0) {
    give_up_bulk();
    message = Incoming{{header.generation, header.tag}, header.total, true};
    // Without a receive no more comes than may come unasked.
    if (is_admitted(header)) find_place(message, std::min<std::size_t>(header.total, kMostAhead), 0);
  }
  ++message.pieces;
  came_ += held_bytes(header.length);
}

// A bulk message that goes on no more, for its sender has taken it back, has not been sent: its receive waits again.
void Link::give_up_bulk() {
  Incoming& message = incoming(Lane::kBulk);
  if (!message.open) return;
  drop_incoming(message);
  const RequestPtr receive = std::exchange(message.receive, nullptr);
  if (!receive) return;
  const auto slot = slots_.find(message.key);
  if (slot != slots_.end() && !slot->second.arrivals.empty()) return settle_with_arrival(receive, slot);
  slots_[message.key].receives.push_front(receive);
  ++receives_posted_;
}

// A receive that waits for the message, else memory, of which the pool counts `pooled`. False: there is none, and the
// link is lost.
bool Link::find_place(Incoming& message, std::size_t capacity, std::size_t pooled) {
  const auto waiting = slots_.find(message.key);
  if (waiting == slots_.end() || waiting->second.receives.empty()) {
    // Any length may be announced: what the system has not got ends this link, and not the thread that serves all.
    std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[capacity]);
    if (!memory) {
      lose(Failure::Kind::kComm, "no memory for a message of " + std::to_string(message.bytes) + " bytes");
      return false;
    }
    message.arrival = std::make_shared<Arrival>(Arrival{message.bytes, std::move(memory), pooled});
    pool_bytes_ += pooled;
    slots_[message.key].arrivals.push_back(message.arrival);
    return true;
  }
  auto& receives = waiting->second.receives;
  const RequestPtr receive = receives.front();
  receives.pop_front();
  --receives_posted_;
  if (receives.empty()) slots_.erase(waiting);
  if (receive->bytes == message.bytes) {
    message.receive = receive;
  } else {
    fail(receive, mismatch(*receive, message.bytes));
  }
  return true;
}

// Whether it is a message that is delivered now, or held until this side is in its generation, too.
bool Link::is_admitted(const FrameHeader& header) {
  return (header.kind == FrameKind::kMessage || header.kind == FrameKind::kPiece) &&
         commit::admit(header.generation, generation_, older_frames_are_dropped_) != commit::Admission::kDrop;
}

bool Link::accepts(const FrameHeader& header) {
  const char* fault = fault_of(header);
  if (fault == nullptr) fault = fault_here(header);
  if (fault != nullptr) {
    lose(Failure::Kind::kComm, "the stream is out of step (" + std::string(fault) + ")");
    return false;
  }
  if (header.kind != FrameKind::kMessage || !is_admitted(header)) return true;
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

// What is wrong with a header after those that came before it.
const char* Link::fault_here(const FrameHeader& header) const {
  if (header.kind == FrameKind::kTaken) {
    return header.tag >= peer_took_ && header.tag <= cut_ ? nullptr : "an acknowledgement of what was not sent";
  }
  if (header.kind != FrameKind::kPiece) return nullptr;
  if (came_ - taken_ + held_bytes(header.length) > kMostAhead) return "more pieces than there is room for";
  const Incoming& message = incoming_[static_cast<std::size_t>(Lane::kBulk)];
  const bool goes_on = message.open && header.piece == message.pieces && header.total == message.bytes &&
                       message.key == Key{header.generation, header.tag} &&
                       header.length <= message.bytes - message.filled;
  return header.piece == 0 || goes_on ? nullptr : "a piece that is not the next one";
}

std::size_t Link::read_payload(std::size_t budget, bool& blocked) {
  Incoming& message = incoming(frame_.kind == FrameKind::kPiece ? Lane::kBulk : Lane::kStep);
  const std::size_t wanted = std::min<std::size_t>(frame_.length - frame_filled_, budget);
  std::byte* to = nullptr;
  if (message.receive) to = message.receive->data + message.filled;
  if (message.arrival) to = message.arrival->data.get() + message.filled;
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
    if (blocked) channel_->expect(frame_.length - frame_filled_);
    got = static_cast<std::size_t>(n);
  }
  frame_filled_ += got;
  message.filled += got;
  if (message.arrival) message.arrival->filled = message.filled;
  return got;
}

void Link::finish_frame() {
  in_frame_ = false;
  switch (frame_.kind) {
    case FrameKind::kMessage:
      return finish_message(incoming(Lane::kStep));
    case FrameKind::kPiece:
      return finish_piece();
    case FrameKind::kTaken:
      peer_took_ = frame_.tag;
      return;
    case FrameKind::kAbort:
      return hear({frame_.generation, PendingAbort::suspect_of(frame_.tag)});
    case FrameKind::kGoodbye:
      return lose(Failure::Kind::kLost, "it closed its endpoint", true);
  }
}

void Link::finish_piece() {
  Incoming& message = incoming(Lane::kBulk);
  (message.arrival ? message.arrival->untaken : taken_) += held_bytes(frame_.length);
  if (message.filled == message.bytes) finish_message(message);
}

void Link::finish_message(Incoming& message) {
  message.open = false;
  bytes_received_ += message.bytes;
  message.arrival = nullptr;
  if (const RequestPtr receive = std::exchange(message.receive, nullptr)) complete(receive);
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
