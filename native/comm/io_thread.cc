// The IO thread of an endpoint: sleeps in epoll, moves bytes on the links that can, lets dialers in.
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <exception>
#include <system_error>
#include <utility>

#include "comm/core.h"
#include "comm/errors.h"

namespace elaswave::comm {
namespace {

// Numbers that epoll reports for what is not a link.
constexpr std::uint64_t kWakeNumber = 0;
constexpr std::uint64_t kListenerNumber = 1;
// Bytes per turn and direction: several busy links take turns.
constexpr std::size_t kTurnBudget = std::size_t{1} << 20;

void watch(const Fd& epoll, int fd, std::uint32_t events, std::uint64_t number) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw CommError("a socket cannot be watched: " + describe_errno(errno));
  }
}

// Null where the system gives no shared memory: links are TCP then.
std::unique_ptr<Window> make_window() {
  try {
    return std::make_unique<Window>();
  } catch (const CommError&) {
    return nullptr;
  }
}

}  // namespace

EndpointCore::EndpointCore(EndpointOptions options)
    : options_(std::move(options)),
      window_(options_.allow_shm ? make_window() : nullptr),
      identity_{options_.rank, options_.token, sha256(options_.host_id), options_.ring_bytes, window_.get()},
      listener_(listen_tcp(options_.host, options_.port)),
      port_(port_of(listener_)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (options_.rank < 0) throw CommError("rank " + std::to_string(options_.rank) + " is negative");
  if (!epoll_ || !wake_) throw CommError("no epoll or eventfd: " + describe_errno(errno));
  watch(epoll_, wake_.get(), EPOLLIN, kWakeNumber);
  watch(epoll_, listener_.get(), EPOLLIN, kListenerNumber);
  // Signals are for the threads of the program: ours (and those it starts, which inherit this) take none.
  sigset_t all, former;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &former);
  try {
    io_thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &former, nullptr);
    throw CommError(self() + ": no IO thread: " + error.what());
  }
  ::pthread_sigmask(SIG_SETMASK, &former, nullptr);
}

EndpointCore::~EndpointCore() { close(); }

void EndpointCore::run() {
  try {
    std::set<LinkPtr> ready;
    while (!stop_.load()) {
      take_events(ready);
      drive(ready);
      apply_remote_abort();
    }
  } catch (const std::exception& error) {
    fail_all_links(error.what());
  }
}

// The IO thread cannot go on (no memory): nobody may wait for it.
void EndpointCore::fail_all_links(const std::string& why) {
  for (const auto& [rank, link] : links()) {
    link->close(std::make_shared<const Failure>(
        Failure{Failure::Kind::kComm, self() + ": the IO thread failed: " + why, rank, generation()}));
  }
}

// Sleeps unless there is work, and adds the links that something happened to.
void EndpointCore::take_events(std::set<LinkPtr>& ready) {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), ready.empty() ? -1 : 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 == kWakeNumber) {
      std::uint64_t value = 0;
      (void)!::read(wake_.get(), &value, sizeof value);
    } else if (event.data.u64 == kListenerNumber) {
      accept_dialers();
    } else {
      LinkPtr link;
      {
        const std::shared_lock lock(table_mutex_);
        const auto it = watched_.find(event.data.u64);
        if (it != watched_.end()) link = it->second;
      }
      if (!link) continue;
      link->on_event((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
      ready.insert(std::move(link));
    }
  }
  woken_.store(false);  // before the list is read: what is added from now on wakes us again
  const std::lock_guard lock(woken_links_mutex_);
  for (LinkPtr& link : woken_links_) ready.insert(std::move(link));
  woken_links_.clear();
}

// One turn for every ready link. A link leaves the set only when it has nothing to do and is armed to wake us.
void EndpointCore::drive(std::set<LinkPtr>& ready) {
  for (auto it = ready.begin(); it != ready.end();) {
    const Link::Progress progress = (*it)->progress(kTurnBudget);
    if (progress == Link::Progress::kMoved) {
      ++it;
    } else if (progress == Link::Progress::kLost) {
      detach(*it);
      it = ready.erase(it);
    } else if ((*it)->arm()) {
      it = ready.erase(it);
    } else {
      ++it;
    }
  }
}

void EndpointCore::wake_io_thread(const LinkPtr& link) {
  {
    const std::lock_guard lock(woken_links_mutex_);
    if (std::find(woken_links_.begin(), woken_links_.end(), link) == woken_links_.end()) woken_links_.push_back(link);
  }
  if (woken_.exchange(true)) return;
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

// Lets go of a lost link's socket. The link itself stays in the table and answers PeerLost until the rank comes back.
void EndpointCore::detach(const LinkPtr& link) {
  {
    const std::unique_lock lock(table_mutex_);
    const auto number = numbers_.find(link.get());
    if (number != numbers_.end()) {
      watched_.erase(number->second);
      numbers_.erase(number);
    }
  }
  table_changed_.notify_all();
  const std::unique_ptr<Channel> channel = link->take_channel();
  if (!channel) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, channel->fd(), nullptr);  // a forked child may hold the socket open
}

void EndpointCore::add_link(int peer, std::unique_ptr<Channel> channel) {
  LinkPtr link;
  {
    const std::unique_lock lock(table_mutex_);
    const LinkLimits limits{options_.pool_soft_bytes, options_.pool_hard_bytes, options_.pending_limit};
    link = std::make_shared<Link>(options_.rank, peer, std::move(channel), limits, generation_.load(), signal_,
                                  pending_abort_);
    if (aborted_) link->abort(aborted_);
    table_[peer] = link;
    const std::uint64_t number = next_number_++;
    watched_[number] = link;
    numbers_[link.get()] = number;
    refusals_.erase(peer);
    link->watch(epoll_.get(), number);
  }
  wake_io_thread(link);  // the IO thread's first look arms it
  table_changed_.notify_all();
}

}  // namespace elaswave::comm
