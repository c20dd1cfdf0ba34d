#include "liveness/liveness.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <future>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace elaswave::liveness {
namespace {

// How long a wait goes on before it looks whether anybody still wants to know.
constexpr std::chrono::milliseconds kPoll{250};

struct Slot {
  pthread_mutex_t mutex;
  sem_t held;  // posted once the mutex is held
};

void check(int error, const char* what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), std::string("liveness: ") + what);
}

timespec in_a_while() {
  timespec now;
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const auto after = std::chrono::nanoseconds(now.tv_nsec) + kPoll;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(after);
  return {now.tv_sec + seconds.count(), (after - seconds).count()};
}

// A thread of its own for `body`, which no signal interrupts: signals are for the threads that expect them.
template <typename Body>
std::thread quiet_thread(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  check(::pthread_sigmask(SIG_SETMASK, &all, &before), "signals of a thread");
  try {
    std::thread thread(std::move(body));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

void make(Slot& slot) {
  pthread_mutexattr_t attributes;
  check(::pthread_mutexattr_init(&attributes), "a mutex");
  check(::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED), "a shared mutex");
  check(::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST), "a robust mutex");
  check(::pthread_mutex_init(&slot.mutex, &attributes), "a mutex");
  ::pthread_mutexattr_destroy(&attributes);
  if (::sem_init(&slot.held, 1, 0) != 0) check(errno, "a semaphore");
}

// Takes the mutex for the calling thread. One that nobody watched is taken over from a process that has ended.
int take(Slot& slot) {
  const int result = ::pthread_mutex_trylock(&slot.mutex);
  return result == EOWNERDEAD ? ::pthread_mutex_consistent(&slot.mutex) : result;
}

}  // namespace

struct Table::Impl {
  explicit Impl(std::size_t slots) : slots(slots), owner(::getpid()) {
    int ends[2];
    if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) check(errno, "a pipe");
    read_end = ends[0];
    write_end = ends[1];
    void* memory = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) check(errno, "shared memory");
    table = static_cast<Slot*>(memory);
    for (std::size_t i = 0; i < slots; ++i) make(*new (&table[i]) Slot);
  }
  ~Impl() {
    stop.store(true, std::memory_order_relaxed);
    for (std::thread& waiter : waiters) waiter.join();
    ::munmap(table, bytes());
    ::close(read_end);
    ::close(write_end);
  }

  std::size_t bytes() const { return std::max<std::size_t>(1, slots) * sizeof(Slot); }
  Slot& at(std::size_t slot) const {
    if (slot < slots) return table[slot];
    throw std::out_of_range("liveness: slot " + std::to_string(slot) + " of " + std::to_string(slots));
  }

  // Runs in a waiter's thread.
  void wait(std::uint32_t number) {
    Slot& slot = table[number];
    timespec until = in_a_while();
    while (::sem_clockwait(&slot.held, CLOCK_MONOTONIC, &until) != 0) {
      if (stop.load(std::memory_order_relaxed)) return;
      until = in_a_while();
    }
    int result = ETIMEDOUT;
    while (result == ETIMEDOUT && !stop.load(std::memory_order_relaxed)) {
      until = in_a_while();
      result = ::pthread_mutex_clocklock(&slot.mutex, CLOCK_MONOTONIC, &until);
    }
    if (result != EOWNERDEAD) return;
    // Kept until this thread ends, which hands it on to whoever holds the slot next.
    ::pthread_mutex_consistent(&slot.mutex);
    // A pipe takes 16,000 of these without a reader; a table has one per process of a host.
    while (::write(write_end, &number, sizeof number) < 0 && errno == EINTR) continue;
  }

  const std::size_t slots;
  const pid_t owner;
  Slot* table = nullptr;
  int read_end = -1;
  int write_end = -1;
  std::atomic<bool> stop{false};
  std::vector<std::thread> waiters;
};

Table::Table(std::size_t slots) : impl_(std::make_unique<Impl>(slots)) {}

Table::~Table() {
  // Threads do not come along with a fork: in a child there is nobody to join, and the end of the process frees the
  // rest.
  if (impl_->owner != ::getpid()) static_cast<void>(impl_.release());
}

void Table::hold(std::size_t slot) {
  Slot& mine = impl_->at(slot);
  std::promise<int> taken;
  std::future<int> result = taken.get_future();
  quiet_thread([&mine, taken = std::move(taken)]() mutable {
    const int error = take(mine);
    if (error == 0) ::sem_post(&mine.held);
    taken.set_value(error);
    while (error == 0) ::pause();  // until the process ends, and this thread with it
  }).detach();
  check(result.get(), "the mutex of a slot");
}

void Table::watch(std::size_t slot) {
  impl_->at(slot);
  impl_->waiters.push_back(quiet_thread([impl = impl_.get(), slot] { impl->wait(static_cast<std::uint32_t>(slot)); }));
}

int Table::fd() const { return impl_->read_end; }

std::vector<std::size_t> Table::ended() {
  std::vector<std::size_t> found;
  std::uint32_t number = 0;
  while (::read(impl_->read_end, &number, sizeof number) == sizeof number) found.push_back(number);
  return found;
}

}  // namespace elaswave::liveness
