// How an endpoint's links come to be: dialing lower ranks, greeting higher ones.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "comm/core.h"
#include "comm/errors.h"

namespace elaswave::comm {
namespace {

constexpr std::size_t kLinkers = 64;        // threads that make links at one time
constexpr double kHandshakeSeconds = 10.0;  // for one of them
constexpr double kRedialSeconds = 0.2;      // for one attempt, so that nobody waits longer for the end of a redial
constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kLongestPause = std::chrono::milliseconds(50);

}  // namespace

void EndpointCore::connect(const std::map<int, PeerAddress>& peers, Deadline deadline) {
  {
    const std::unique_lock lock(table_mutex_);
    for (const auto& [peer, address] : peers) addresses_[peer] = address;
  }
  for (const auto& [peer, address] : peers) {
    if (peer < options_.rank && !has_live_link(peer)) dial(peer, address, deadline);
  }
  std::vector<int> absent = missing(peers);
  while (!absent.empty()) {
    std::shared_lock lock(table_mutex_);
    // Short sleeps: a change between `missing` and here is seen at the next look.
    const auto look_again = Deadline::after(0.02).or_before(deadline);
    table_changed_.wait_until(lock, look_again.at());
    lock.unlock();
    absent = missing(peers);
    if (!absent.empty() && deadline.expired()) raise_missing(absent, peers);
  }
}

std::vector<int> EndpointCore::missing(const std::map<int, PeerAddress>& peers) const {
  std::vector<int> ranks;
  for (const auto& [peer, address] : peers) {
    if (peer != options_.rank && !has_live_link(peer)) ranks.push_back(peer);
  }
  return ranks;
}

void EndpointCore::raise_missing(const std::vector<int>& ranks, const std::map<int, PeerAddress>& peers) const {
  std::string text = self() + ": no link by the deadline with";
  const std::shared_lock lock(table_mutex_);
  for (const int rank : ranks) {
    const PeerAddress& address = peers.at(rank);
    text += (rank == ranks.front() ? " rank " : ", rank ") + std::to_string(rank) + " (" + address.host + ":" +
            std::to_string(address.port) + ")";
    const auto refusal = refusals_.find(rank);
    if (refusal != refusals_.end()) text += ": " + refusal->second;
  }
  throw DeadlineExceeded(text);
}

// Tries until the peer listens, for it may start later than we do.
void EndpointCore::dial(int peer, const PeerAddress& address, Deadline deadline) {
  const std::string place = address.host + ":" + std::to_string(address.port);
  const std::string what = self() + ": dialing rank " + std::to_string(peer) + " at " + place;
  std::string why = "it did not answer";
  auto pause = kFirstPause;
  while (!deadline.expired()) {
    Fd socket = dial_tcp(address.host, address.port, deadline, why);
    if (socket) {
      try {
        Dialed dialed = dial_link(identity_, peer, std::move(socket), deadline);
        if (dialed.channel) {
          add_link(peer, std::move(dialed.channel));
          return;
        }
        why = "it has not given up its former link to us yet";
      } catch (const DeadlineExceeded& error) {
        throw DeadlineExceeded(what + ": " + error.what());
      } catch (const CommError& error) {
        throw CommError(what + ": " + error.what());
      }
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.left()));
    pause = std::min(2 * pause, kLongestPause);
  }
  throw DeadlineExceeded(what + ": no link by the deadline: " + why);
}

void EndpointCore::mend(Deadline deadline) {
  std::map<int, PeerAddress> torn;
  {
    const std::unique_lock lock(table_mutex_);
    for (const auto& [peer, address] : addresses_) {
      const auto it = table_.find(peer);
      const FailurePtr lost = it == table_.end() ? nullptr : it->second->lost();
      if (peer < options_.rank && lost && !lost->orderly && mending_.insert(peer).second) torn[peer] = address;
    }
  }
  for (const auto& [peer, address] : torn) {
    if (start_linker(Fd(), [this, peer, address, deadline] { redial(peer, address, deadline); })) continue;
    const std::unique_lock lock(table_mutex_);
    mending_.erase(peer);
  }
}

bool EndpointCore::is_torn(int peer) const {
  const std::shared_lock lock(table_mutex_);
  const auto it = table_.find(peer);
  return addresses_.contains(peer) && it != table_.end() && it->second->lost();
}

bool EndpointCore::is_wanted(int peer) const {
  const std::shared_lock lock(table_mutex_);
  return addresses_.contains(peer);
}

// A thread's entry: nothing may pass. What went wrong shows as a link that is still broken.
void EndpointCore::redial(int peer, const PeerAddress& address, Deadline deadline) {
  while (!deadline.expired() && !stop_.load() && is_torn(peer)) {
    try {
      dial(peer, address, Deadline::after(kRedialSeconds).or_before(deadline));
      if (!is_wanted(peer)) disconnect(peer);  // it was while we dialed
    } catch (const std::exception&) {
      std::this_thread::sleep_for(kLongestPause);
    }
  }
  const std::unique_lock lock(table_mutex_);
  mending_.erase(peer);
}

void EndpointCore::accept_dialers() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) return;
    start_handshake(std::move(socket));
  }
}

// Each conversation has a thread of its own, so that a silent stranger holds nobody up.
void EndpointCore::start_handshake(Fd socket) {
  const int handle = ::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0);
  const auto dialer = std::make_shared<Fd>(std::move(socket));  // a std::function is copied
  start_linker(Fd(handle), [this, dialer] { handshake(std::move(*dialer)); });
}

// False when too many run or no thread is to be had: whoever wants a link tries again.
bool EndpointCore::start_linker(Fd socket, std::function<void()> body) {
  reap_linkers(false);
  const std::lock_guard lock(linkers_mutex_);
  if (linkers_.size() >= kLinkers || stop_.load()) return false;
  Linker& linker = linkers_.emplace_back();
  linker.socket = std::move(socket);
  try {
    linker.thread = std::thread([this, &linker, body = std::move(body)] {
      body();
      const std::lock_guard done_lock(linkers_mutex_);
      linker.socket = Fd();
      linker.done = true;
    });
  } catch (const std::system_error&) {
    linkers_.pop_back();
    return false;
  }
  return true;
}

void EndpointCore::handshake(Fd socket) {
  try {
    const auto linked = [this](int rank) { return has_live_link(rank); };
    Acceptance acceptance = accept_link(identity_, std::move(socket), linked, Deadline::after(kHandshakeSeconds));
    if (acceptance.channel) {
      add_link(acceptance.peer, std::move(acceptance.channel));
    } else {
      note_refusal(acceptance);
    }
  } catch (const std::exception&) {
    // Not one of our dialers, or one that went away, or no memory for one more: a real one dials again, and its own
    // deadline names what is missing. The thread's entry, so nothing may pass.
  }
}

void EndpointCore::note_refusal(const Acceptance& acceptance) {
  constexpr std::size_t kRemembered = 256;
  const std::unique_lock lock(table_mutex_);
  if (refusals_.size() >= kRemembered) return;
  if (acceptance.refusal == Refusal::kWrongToken) refusals_[acceptance.peer] = "it was refused for a wrong token";
  if (acceptance.refusal == Refusal::kWrongRank) refusals_[acceptance.peer] = "it was refused: it dialed another rank";
}

void EndpointCore::reap_linkers(bool all) {
  std::list<Linker> over;
  {
    const std::lock_guard lock(linkers_mutex_);
    for (auto it = linkers_.begin(); it != linkers_.end();) {
      const auto next = std::next(it);
      if (!it->done && all) ::shutdown(it->socket.get(), SHUT_RDWR);
      if (it->done || all) over.splice(over.end(), linkers_, it);
      it = next;
    }
  }
  for (Linker& linker : over) linker.thread.join();
}

}  // namespace elaswave::comm
