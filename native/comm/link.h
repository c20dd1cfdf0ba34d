// One link to one peer: frames, queues and the matching of messages to receives. Private to comm/.
//
// Everything is guarded by the link's own lock; callers and the IO thread alike make progress under it, a bounded
// number of bytes at a time, so that nobody waits long for the lock. Nothing here blocks.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "comm/channel.h"
#include "comm/frame.h"
#include "comm/request.h"
#include "commit/admission.h"

namespace elaswave::comm {

struct LinkLimits {
  std::size_t pool_soft_bytes;
  std::size_t pool_hard_bytes;
  std::size_t pending_limit;
};

class Link {
 public:
  enum class Progress {
    kIdle,   // nothing to do until an event
    kMoved,  // bytes moved; there may be more
    kLost,   // the link is over: detach it from epoll and drop the channel
  };

  Link(int own_rank, int peer, std::unique_ptr<Channel> channel, LinkLimits limits, Signal& signal,
       PendingAbort& pending_abort);

  int peer() const { return peer_; }
  LinkKind kind() const { return kind_; }

  // Accept a request. True: the IO thread has to look at this link. Throw CommError at the bound of pending transfers.
  bool post_send(const RequestPtr& request);
  bool post_recv(const RequestPtr& request);

  // Moves at most about `budget` bytes each way.
  Progress progress(std::size_t budget);
  // For a waiter: the same unless another thread is at it. True when bytes moved.
  bool try_progress(std::size_t budget);
  void watch(int epoll, std::uint64_t number);
  // For the IO thread: true when it may sleep on this link's events.
  bool arm();
  // Between these the caller looks after the link and the IO thread is not woken for it. `leave` returns true when the
  // IO thread has to look at once.
  void enter();
  bool leave();
  void on_event(bool hangup);
  // Ends the link, and returns true, if the peer has acknowledged nothing for too long; see Channel::is_silent.
  bool check_silence(std::chrono::steady_clock::time_point now, bool look_afresh);

  // The library does not touch the request's buffer once these return.
  void cancel(const RequestPtr& request, const FailurePtr& reason);
  void abort(const FailurePtr& reason);
  // Queues an abort frame before everything that is not on its way yet, but for one piece of a bulk message. True: the
  // IO thread has to look at this link.
  bool post_abort(PendingAbort::Abort abort);
  // Ends an abort; drops what is older than `generation`.
  void advance(std::uint32_t generation);
  // Ends the link for good; says goodbye if the stream stands between two messages.
  void close(const FailurePtr& reason);

  // After kLost: the channel, for the IO thread to let go of.
  std::unique_ptr<Channel> take_channel();
  // Null while the link is alive, which is cheap to learn.
  FailurePtr lost() const;
  int fd() const;
  std::uint64_t bytes_sent() const;
  std::uint64_t bytes_received() const;
  std::uint64_t older_frames_rule_consulted() const;

 private:
  struct Key {
    std::uint32_t generation;
    std::uint64_t tag;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const;
  };
  // A message that came before its receive: all of it, of a bulk message as much as may come without one.
  struct Arrival {
    std::size_t bytes;
    std::unique_ptr<std::byte[]> data;
    std::size_t pooled = 0;   // what it counts in the pool
    std::size_t untaken = 0;  // what its pieces weigh, which the sender is told of when they have a place
    std::size_t filled = 0;
  };
  // What waits under one key: receives or arrivals, never both.
  struct Slot {
    std::list<RequestPtr> receives;
    std::list<std::shared_ptr<Arrival>> arrivals;
  };
  using Slots = std::unordered_map<Key, Slot, KeyHash>;
  // A message that is coming in, one of each lane. Into `receive`, else into `arrival`, else thrown away.
  struct Incoming {
    Key key{};
    std::size_t bytes = 0;
    bool open = false;
    std::uint32_t pieces = 0;  // that have begun
    std::size_t filled = 0;
    RequestPtr receive{};
    std::shared_ptr<Arrival> arrival{};
  };
  // A frame to be written.
  struct Outgoing {
    FrameHeader header;
    RequestPtr request;      // whose bytes they are; null once it was cancelled
    const std::byte* data;   // the request's, or `copy`
    bool completes = false;  // with its last byte the request is done
    std::unique_ptr<std::byte[]> copy{};
    std::size_t sent = 0;  // of header and data together
  };
  // A bulk message, of which pieces have been cut so far.
  struct Bulk {
    RequestPtr request;
    std::size_t cut = 0;  // bytes
    std::uint32_t pieces = 0;
  };

  bool arm_channel();
  std::size_t progress_send(std::size_t budget);
  std::size_t write_some(std::size_t budget);
  bool owes_word() const { return taken_ - acknowledged_ >= kTellAt; }
  bool may_cut() const;
  bool has_output() const { return under_way_ || !outgoing_.empty() || owes_word() || may_cut(); }
  bool choose_frame();
  void cut_piece();
  void finish_frame_sent();
  std::size_t progress_receive(std::size_t budget);
  bool begin_frame();
  void begin_piece(const FrameHeader& header);
  void give_up_bulk();
  bool find_place(Incoming& message, std::size_t capacity, std::size_t pooled);
  std::size_t read_payload(std::size_t budget, bool& blocked);
  void finish_frame();
  void finish_piece();
  void finish_message(Incoming& message);
  Incoming& incoming(Lane lane) { return incoming_[static_cast<std::size_t>(lane)]; }
  void release(Arrival& arrival);
  void hear(PendingAbort::Abort abort);
  bool fill_header();
  bool accepts(const FrameHeader& header);
  const char* fault_here(const FrameHeader& header) const;
  bool is_admitted(const FrameHeader& header);
  void settle_with_arrival(const RequestPtr& request, Slots::iterator slot);
  void drop_incoming(Incoming& message);
  void withdraw_sends(const std::function<bool(const Request&)>& chosen, const FailurePtr& reason);
  void withdraw_receives(const std::function<bool(const Request&)>& chosen, const FailurePtr& reason);
  void lose(Failure::Kind kind, const std::string& why, bool orderly = false);
  void fail_everything(const FailurePtr& reason);
  FailurePtr superseded(std::uint32_t generation) const;
  FailurePtr mismatch(const Request& request, std::size_t message_bytes) const;
  void complete(const RequestPtr& request);
  void fail(const RequestPtr& request, const FailurePtr& failure);

  const int own_rank_;
  const int peer_;
  const LinkKind kind_;
  const LinkLimits limits_;
  Signal& signal_;
  PendingAbort& pending_abort_;

  mutable std::mutex mutex_;
  std::unique_ptr<Channel> channel_;
  std::uint32_t generation_ = 0;  // older messages are dropped
  commit::Guard older_frames_are_dropped_;
  FailurePtr lost_;                          // set once, for good
  std::atomic<bool> over_{false};            // lost_ is set
  FailurePtr aborted_;                       // until the next generation
  std::optional<PendingAbort::Abort> told_;  // by the peer, of the newest generation that is still to come
  bool hangup_ = false;  // the peer writes no more: what remains is read whatever the pool's soft bound
  bool write_broken_ = false;

  std::optional<Outgoing> under_way_;  // written in part
  std::deque<Outgoing> outgoing_;      // aborts, then step messages
  std::deque<Bulk> bulk_;
  std::size_t overtaken_by_ = 0;  // bytes of step messages since the last piece
  // What pieces weigh, since the link began: those that were cut here and those that the peer has taken of them, those
  // that have begun to come, those of them that have been taken, and what the peer was told of that.
  std::uint64_t cut_ = 0, peer_took_ = 0, came_ = 0, taken_ = 0, acknowledged_ = 0;

  Slots slots_;
  std::size_t receives_posted_ = 0;
  std::size_t pool_bytes_ = 0;
  int drivers_ = 0;       // threads between `enter` and `leave`
  bool stalled_ = false;  // a message waits in the stream for the pool to have room

  bool in_frame_ = false;
  FrameHeader frame_;  // whose payload is being read
  std::size_t frame_filled_ = 0;
  std::array<Incoming, 2> incoming_;  // by lane
  std::vector<std::byte> staging_;    // headers and small messages are read through this
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;

  std::uint64_t bytes_sent_ = 0;
  std::uint64_t bytes_received_ = 0;
};

}  // namespace elaswave::comm
