// Threads of an endpoint. Private to comm/.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include "comm/socket.h"

namespace elaswave::comm {

// Signals are for the threads of the program: a thread that starts here takes none. Throws std::system_error when no
// thread is to be had.
std::thread start_thread(std::function<void()> body);

// Threads that make one link each, and end. Any thread may call any method.
class LinkingThreads {
 public:
  // `on_end` is called by every thread as the last thing it does, once it counts as running no more.
  explicit LinkingThreads(std::function<void()> on_end) : on_end_(std::move(on_end)) {}
  ~LinkingThreads() { stop(); }
  LinkingThreads(const LinkingThreads&) = delete;
  LinkingThreads& operator=(const LinkingThreads&) = delete;

  // Those that run and were not cut; of one origin, or of all.
  std::size_t running(const std::string& origin) const;
  std::size_t running() const;
  // Runs `body`, which must not throw. `socket` is a second handle on what the body blocks on, for `stop` to cut short;
  // it may be empty. `origin`: who it is for. False when no thread is to be had, or after `stop`.
  bool start(Fd socket, std::function<void()> body, std::string origin = {});
  // Cuts the socket of the one that has run longest, of one origin or of all, if that is for `least` at least. False,
  // and nothing done, if none has.
  bool cut_oldest(const std::string& origin, std::chrono::milliseconds least);
  bool cut_oldest(std::chrono::milliseconds least);
  // Cuts all sockets and joins all threads. Idempotent.
  void stop();

 private:
  struct Thread {
    std::thread thread;
    Fd socket;
    std::string origin;
    std::chrono::steady_clock::time_point since;
    bool cut = false;
    bool done = false;
  };
  std::list<Thread> take(bool all);
  bool cut_first(const std::function<bool(const Thread&)>& chosen, std::chrono::milliseconds least);
  std::size_t count(const std::function<bool(const Thread&)>& chosen) const;

  const std::function<void()> on_end_;
  mutable std::mutex mutex_;
  std::list<Thread> threads_;  // the oldest first
  bool stopped_ = false;
};

}  // namespace elaswave::comm
