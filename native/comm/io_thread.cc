#include "comm/io_thread.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "comm/errors.h"
#include "comm/threads.h"

namespace elaswave::comm {
namespace {

// Numbers that epoll reports for what is not a link.
constexpr std::uint64_t kWakeNumber = 0;
constexpr std::uint64_t kListenerNumber = 1;
constexpr std::uint64_t kFirstLinkNumber = 2;
// Bytes per turn and direction: several busy links take turns.
constexpr std::size_t kTurnBudget = std::size_t{1} << 20;
// How soon dialers are looked for again that could not be let in: no thread or no descriptor was to be had.
constexpr int kAcceptAgainMs = 20;

void watch(const Fd& epoll, const Fd& fd, std::uint32_t events, std::uint64_t number) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0) {
    throw CommError("a socket cannot be watched: " + describe_errno(errno));
  }
}

}  // namespace

IoThread::IoThread(std::chrono::milliseconds period, Hooks hooks)
    : period_(period),
      hooks_(std::move(hooks)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      next_number_(kFirstLinkNumber) {
  if (!epoll_ || !wake_) throw CommError("no epoll or eventfd: " + describe_errno(errno));
  watch(epoll_, wake_, EPOLLIN, kWakeNumber);
}

void IoThread::start(const Fd& listener) {
  // Reported once for new dialers, who may then have to wait without keeping this thread awake.
  watch(epoll_, listener, EPOLLIN | EPOLLET, kListenerNumber);
  try {
    thread_ = start_thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw CommError(std::string("no IO thread: ") + error.what());
  }
}

void IoThread::stop() {
  stop_.store(true);
  wake();
  if (thread_.joinable()) thread_.join();
}

void IoThread::add(const LinkPtr& link) {
  {
    const std::lock_guard lock(watched_mutex_);
    const std::uint64_t number = next_number_++;
    link->watch(epoll_.get(), number);
    watched_[number] = link;  // what is reported by now is looked up behind this lock
    numbers_[link.get()] = number;
  }
  wake(link);  // the first look arms it
}

void IoThread::wake(const LinkPtr& link) {
  {
    const std::lock_guard lock(woken_links_mutex_);
    if (std::find(woken_links_.begin(), woken_links_.end(), link) == woken_links_.end()) woken_links_.push_back(link);
  }
  if (!woken_.exchange(true)) wake();
}

void IoThread::wake() {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void IoThread::run() {
  try {
    while (!stop_.load()) {
      take_events();
      if (dialers_wait_) dialers_wait_ = hooks_.accept();
      give_turns();
      look_for_silence();
      hooks_.after_turn();
    }
  } catch (const std::exception& error) {
    hooks_.on_end(error.what());
  }
}

int IoThread::sleep_ms() const {
  if (!ready_.empty()) return 0;
  return dialers_wait_ ? kAcceptAgainMs : static_cast<int>(period_.count());
}

// Sleeps unless there is work, and adds the links that something happened to.
void IoThread::take_events() {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), sleep_ms());
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 == kWakeNumber) {
      std::uint64_t value = 0;
      (void)!::read(wake_.get(), &value, sizeof value);
    } else if (event.data.u64 == kListenerNumber) {
      dialers_wait_ = true;
    } else if (LinkPtr link = watched(event.data.u64)) {
      link->on_event((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
      ready_.insert(std::move(link));
    }
  }
  woken_.store(false);  // before the list is read: what is added from now on wakes us again
  const std::lock_guard lock(woken_links_mutex_);
  for (LinkPtr& link : woken_links_) ready_.insert(std::move(link));
  woken_links_.clear();
}

IoThread::LinkPtr IoThread::watched(std::uint64_t number) {
  const std::lock_guard lock(watched_mutex_);
  const auto it = watched_.find(number);
  return it == watched_.end() ? nullptr : it->second;
}

// One turn for every ready link. A link leaves the set only when it has nothing to do and is armed to wake us.
void IoThread::give_turns() {
  for (auto it = ready_.begin(); it != ready_.end();) {
    const Link::Progress progress = (*it)->progress(kTurnBudget);
    if (progress == Link::Progress::kMoved) {
      ++it;
    } else if (progress == Link::Progress::kLost) {
      let_go(*it);
      it = ready_.erase(it);
    } else if ((*it)->arm()) {
      it = ready_.erase(it);
    } else {
      ++it;
    }
  }
}

void IoThread::look_for_silence() {
  const Clock::time_point now = Clock::now();
  if (now - looked_at_ < period_) return;
  // Who was away himself, a stopped process or machine, has not seen whether anybody answered meanwhile.
  const bool was_away = now - looked_at_ > 3 * period_;
  looked_at_ = now;
  std::vector<LinkPtr> links;
  {
    const std::lock_guard lock(watched_mutex_);
    for (const auto& [number, link] : watched_) links.push_back(link);
  }
  for (const LinkPtr& link : links) {
    if (link->check_silence(now, was_away)) ready_.insert(link);
  }
}

// Lets go of a lost link's socket. The link itself stays in the table and answers PeerLost until the rank comes back.
void IoThread::let_go(const LinkPtr& link) {
  {
    const std::lock_guard lock(watched_mutex_);
    const auto number = numbers_.find(link.get());
    if (number != numbers_.end()) {
      watched_.erase(number->second);
      numbers_.erase(number);
    }
  }
  hooks_.on_lost();
  const std::unique_ptr<Channel> channel = link->take_channel();
  if (!channel) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, channel->fd(), nullptr);  // a forked child may hold the socket open
}

}  // namespace elaswave::comm
