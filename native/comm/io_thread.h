// The thread that moves the bytes of one endpoint: sleeps in epoll, gives every link its turn, and is woken for links
// that callers could not serve at once. Private to comm/.
//
// Any thread may call `add` and `wake`. The lock of watched links is taken before a link's own, that of woken ones
// alone or after it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/link.h"
#include "comm/socket.h"

namespace elaswave::comm {

class IoThread {
 public:
  using LinkPtr = std::shared_ptr<Link>;

  // What it calls, on its own thread.
  struct Hooks {
    std::function<bool()> accept;                    // dialers wait. True: some still do, look again soon
    std::function<void()> after_turn;                // all links that were ready have had a turn
    std::function<void()> on_lost;                   // a link is over and was let go of
    std::function<void(const std::string&)> on_end;  // it cannot go on (no memory): nobody may wait for it
  };

  // Throws CommError. Links are looked at every `period` besides, for peers that have fallen silent.
  IoThread(std::chrono::milliseconds period, Hooks hooks);
  ~IoThread() { stop(); }
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;

  // From then on `accept` is called for dialers at `listener`. Throws CommError.
  void start(const Fd& listener);
  void stop();

  // Serves one more link, until it is lost. Throws CommError.
  void add(const LinkPtr& link);
  // Has it look at a link, or around.
  void wake(const LinkPtr& link);
  void wake();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  int sleep_ms() const;
  void take_events();
  void give_turns();
  void look_for_silence();
  void let_go(const LinkPtr& link);
  LinkPtr watched(std::uint64_t number);

  const std::chrono::milliseconds period_;
  const Hooks hooks_;
  Fd epoll_;
  Fd wake_;  // eventfd
  std::atomic<bool> stop_{false};

  std::mutex watched_mutex_;
  std::unordered_map<std::uint64_t, LinkPtr> watched_;  // by the number that epoll reports
  std::unordered_map<const Link*, std::uint64_t> numbers_;
  std::uint64_t next_number_;

  std::mutex woken_links_mutex_;
  std::vector<LinkPtr> woken_links_;
  std::atomic<bool> woken_{false};

  // The thread's own.
  std::set<LinkPtr> ready_;
  bool dialers_wait_ = false;
  Clock::time_point looked_at_ = Clock::now();

  std::thread thread_;
};

}  // namespace elaswave::comm
