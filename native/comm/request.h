// What a Transfer stands for, and how its waiter is woken. Private to comm/.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/deadline.h"
#include "comm/endpoint.h"

namespace elaswave::comm {

class Link;

// Why transfers failed; shared by all that failed for one reason.
struct Failure {
  enum class Kind { kComm, kLost, kAborted };
  Kind kind = Kind::kComm;
  std::string message;
  std::optional<int> rank;  // who is lost, or suspected
  std::uint32_t epoch = 0;
  bool orderly = false;  // kLost: the peer said goodbye, so it had nothing more to do

  // Throws the CommError that `kind` stands for.
  [[noreturn]] void raise() const;
};
using FailurePtr = std::shared_ptr<const Failure>;

struct Request {
  enum class Kind { kSend, kRecv };
  enum class State { kPending, kDone, kFailed };

  Kind kind;
  int peer;
  std::uint64_t tag;
  std::uint32_t generation;
  std::byte* data;  // read only for kSend
  std::size_t bytes;
  Lane lane = Lane::kStep;  // of kSend
  std::shared_ptr<Link> link;

  std::atomic<State> state{State::kPending};
  FailurePtr failure;  // written before `state` becomes kFailed, read after

  // "recv from rank 3, tag 0x12, 4096 bytes"
  std::string describe() const;
};
using RequestPtr = std::shared_ptr<Request>;

// Wakes waiters of one endpoint (a futex). A waiter takes `ticket`, checks its transfers, then sleeps on the ticket:
// whatever completes in between makes the sleep return at once.
class Signal {
 public:
  std::uint32_t ticket() const { return count_.load(); }
  void notify();
  // Returns when notified since `ticket`, at the deadline, or spuriously.
  void sleep(std::uint32_t ticket, Deadline deadline);

 private:
  std::atomic<std::uint32_t> count_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

// What links have to say that concerns all others: the newest abort that a peer told of, and whether a peer was ever
// lost. Links post it under their own locks; the endpoint looks here whenever it moves bytes. An old abort is harmless
// and stays.
class PendingAbort {
 public:
  struct Abort {
    std::uint32_t generation;
    std::optional<int> suspect;
  };
  void post(Abort abort) {
    const std::uint64_t packed = pack(abort);
    std::uint64_t held = packed_.load();
    while (held >> 32 < packed >> 32 && !packed_.compare_exchange_weak(held, packed)) {
    }
  }
  std::optional<Abort> newest() const {
    const std::uint64_t held = packed_.load();
    if (held == 0) return std::nullopt;
    return Abort{static_cast<std::uint32_t>(held >> 32) - 1, suspect_of(held & 0xffffffff)};
  }
  void post_loss() { any_lost_.store(true, std::memory_order_release); }
  bool any_lost() const { return any_lost_.load(std::memory_order_acquire); }

  // On the wire and in a word: 0 for nobody, else the rank + 1.
  static std::uint64_t code_of(std::optional<int> suspect) {
    return suspect ? static_cast<std::uint32_t>(*suspect) + std::uint64_t{1} : 0;
  }
  static std::optional<int> suspect_of(std::uint64_t code) {
    return code == 0 ? std::nullopt : std::optional<int>(static_cast<int>(code - 1));
  }

 private:
  static std::uint64_t pack(Abort abort) {
    return (std::uint64_t{abort.generation} + 1) << 32 | code_of(abort.suspect);
  }
  std::atomic<std::uint64_t> packed_{0};  // 0: none
  std::atomic<bool> any_lost_{false};
};

}  // namespace elaswave::comm
