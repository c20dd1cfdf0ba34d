#include "comm/threads.h"

#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <iterator>
#include <system_error>
#include <utility>

namespace elaswave::comm {

std::thread start_thread(std::function<void()> body) {
  sigset_t all, former;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &former);  // a thread inherits the mask of the one that starts it
  try {
    std::thread thread(std::move(body));
    ::pthread_sigmask(SIG_SETMASK, &former, nullptr);
    return thread;
  } catch (const std::system_error&) {
    ::pthread_sigmask(SIG_SETMASK, &former, nullptr);
    throw;
  }
}

std::size_t LinkingThreads::running() const {
  return count([](const Thread&) { return true; });
}

std::size_t LinkingThreads::running(const std::string& origin) const {
  return count([&](const Thread& thread) { return thread.origin == origin; });
}

std::size_t LinkingThreads::count(const std::function<bool(const Thread&)>& chosen) const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(std::count_if(threads_.begin(), threads_.end(), [&](const Thread& thread) {
    return !thread.done && !thread.cut && chosen(thread);
  }));
}

bool LinkingThreads::cut_oldest(const std::string& origin, std::chrono::milliseconds least) {
  return cut_first([&](const Thread& thread) { return thread.origin == origin; }, least);
}

bool LinkingThreads::cut_oldest(std::chrono::milliseconds least) {
  return cut_first([](const Thread&) { return true; }, least);
}

bool LinkingThreads::cut_first(const std::function<bool(const Thread&)>& chosen, std::chrono::milliseconds least) {
  const std::lock_guard lock(mutex_);
  const auto oldest = std::find_if(threads_.begin(), threads_.end(), [&](const Thread& thread) {
    return !thread.done && !thread.cut && thread.socket && chosen(thread);
  });
  if (oldest == threads_.end() || std::chrono::steady_clock::now() - oldest->since < least) return false;
  ::shutdown(oldest->socket.get(), SHUT_RDWR);
  oldest->cut = true;
  return true;
}

bool LinkingThreads::start(Fd socket, std::function<void()> body, std::string origin) {
  for (Thread& over : take(false)) over.thread.join();
  const std::lock_guard lock(mutex_);
  if (stopped_) return false;
  Thread& entry = threads_.emplace_back();
  entry.socket = std::move(socket);
  entry.origin = std::move(origin);
  entry.since = std::chrono::steady_clock::now();
  try {
    entry.thread = start_thread([this, &entry, body = std::move(body)] {
      body();
      {
        const std::lock_guard done_lock(mutex_);
        entry.socket = Fd();
        entry.done = true;
      }
      on_end_();
    });
  } catch (const std::system_error&) {
    threads_.pop_back();
    return false;
  }
  return true;
}

void LinkingThreads::stop() {
  for (Thread& cut : take(true)) cut.thread.join();
}

// Those that are done, or all: then the sockets of those that are not are cut.
std::list<LinkingThreads::Thread> LinkingThreads::take(bool all) {
  std::list<Thread> taken;
  const std::lock_guard lock(mutex_);
  stopped_ = stopped_ || all;
  for (auto it = threads_.begin(); it != threads_.end();) {
    const auto next = std::next(it);
    if (!it->done && all && it->socket) ::shutdown(it->socket.get(), SHUT_RDWR);
    if (it->done || all) taken.splice(taken.end(), threads_, it);
    it = next;
  }
  return taken;
}

}  // namespace elaswave::comm
