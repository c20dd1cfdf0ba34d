// Threads of an endpoint. Private to comm/.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
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

  std::size_t running() const;
  // Runs `body`, which must not throw. `socket` is a second handle on what the body blocks on, for `stop` to cut short;
  // it may be empty. False when no thread is to be had, or after `stop`.
  bool start(Fd socket, std::function<void()> body);
  // Cuts all sockets and joins all threads. Idempotent.
  void stop();

 private:
  struct Thread {
    std::thread thread;
    Fd socket;
    bool done = false;
  };
  std::list<Thread> take(bool all);

  const std::function<void()> on_end_;
  mutable std::mutex mutex_;
  std::list<Thread> threads_;
  bool stopped_ = false;
};

}  // namespace elaswave::comm
