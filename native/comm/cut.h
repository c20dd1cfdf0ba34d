// A time in which nothing leaves an endpoint and nothing reaches it, as behind a firewall that drops what comes: no
// link breaks by it. For tests of what comes of that. Private to comm/.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "comm/channel.h"

namespace elaswave::comm {

// Any thread may call any method.
class Cut {
 public:
  void begin(std::chrono::nanoseconds lasts) { until_.store(now() + lasts.count()); }
  bool lasts() const {
    const std::int64_t until = until_.load();
    return until != kNever && now() < until;
  }
  // True once after each cut: what has waited may go on.
  bool has_ended() {
    std::int64_t until = until_.load();
    return until != kNever && now() >= until && until_.compare_exchange_strong(until, kNever);
  }

 private:
  static constexpr std::int64_t kNever = 0;
  static std::int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  std::atomic<std::int64_t> until_{kNever};
};

// Moves nothing while `cut` lasts, which outlives the channel. Whoever ends the cut wakes the link.
std::unique_ptr<Channel> make_cut_channel(std::unique_ptr<Channel> channel, const Cut& cut);

}  // namespace elaswave::comm
