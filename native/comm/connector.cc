#include "comm/connector.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

constexpr std::size_t kHandshakes = 64;     // at one time
constexpr std::size_t kOfOneAddress = 16;   // of these
constexpr int kAcceptedAtOnce = 64;         // before links have their turn
constexpr double kHandshakeSeconds = 10.0;  // for one of them
// A handshake that has begun so long ago goes for a newer one: it takes some messages to and fro, and no longer.
constexpr std::chrono::milliseconds kHalfOpen{200};
constexpr std::size_t kRedialers = 16;  // threads that mend links
constexpr double kRedialSeconds = 0.2;  // for one attempt, so that nobody waits longer for the end of a redial

const std::string kOwnAddress = "this machine";

// The pauses between attempts: they double up to a bound, and no two ranks keep step.
class Backoff {
 public:
  explicit Backoff(int rank) : random_(static_cast<std::uint_fast32_t>(rank) + 1) {}
  void pause(Deadline deadline) {
    const auto shortened = std::chrono::duration_cast<std::chrono::nanoseconds>(pause_ * share_(random_));
    std::this_thread::sleep_for(std::min(shortened, deadline.left()));
    pause_ = std::min(2 * pause_, kLongest);
  }

 private:
  using Milliseconds = std::chrono::duration<double, std::milli>;
  static constexpr Milliseconds kLongest{100};
  Milliseconds pause_{1};
  std::minstd_rand random_;
  std::uniform_real_distribution<double> share_{0.5, 1.0};
};

}  // namespace

Connector::Connector(Identity identity, const std::string& host, std::uint16_t port, LinkTable& table, Hooks hooks)
    : identity_(std::move(identity)),
      listener_(listen_tcp(host, port)),
      port_(port_of(listener_)),
      table_(table),
      hooks_(std::move(hooks)),
      handshakes_(hooks_.on_room),
      redialing_([] {}) {}

void Connector::stop() {
  stopped_.store(true);
  handshakes_.stop();
  redialing_.stop();
}

void Connector::forget(int peer) {
  const std::lock_guard lock(mutex_);
  addresses_.erase(peer);
}

// ---- dialing ----------------------------------------------------------------------------------------------------

void Connector::connect(const std::map<int, PeerAddress>& peers, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [peer, address] : peers) addresses_[peer] = address;
  }
  for (;;) {
    // The nearest first: ranks that start together then dial each another one, and not all the same.
    for (auto it = peers.rbegin(); it != peers.rend(); ++it) {
      if (it->first < identity_.rank && !table_.has_live(it->first)) dial(it->first, it->second, deadline);
    }
    const std::vector<int> absent = missing(peers);
    if (absent.empty()) return;
    if (deadline.expired()) raise_missing(absent, peers);
    // Short sleeps: a change between `missing` and here is seen at the next look.
    table_.wait_for_change(Deadline::after(0.02).or_before(deadline));
  }
}

std::vector<int> Connector::missing(const std::map<int, PeerAddress>& peers) const {
  std::vector<int> ranks;
  for (const auto& [peer, address] : peers) {
    if (peer != identity_.rank && !table_.has_live(peer)) ranks.push_back(peer);
  }
  return ranks;
}

void Connector::raise_missing(const std::vector<int>& ranks, const std::map<int, PeerAddress>& peers) const {
  std::string text = self() + ": no link by the deadline with";
  const std::lock_guard lock(mutex_);
  constexpr std::size_t kNamed = 16;
  for (const int rank : std::span(ranks).first(std::min(kNamed, ranks.size()))) {
    const PeerAddress& address = peers.at(rank);
    text += (rank == ranks.front() ? " rank " : ", rank ") + std::to_string(rank) + " (" + address.host + ":" +
            std::to_string(address.port) + ")";
    const auto refusal = refusals_.find(rank);
    if (refusal != refusals_.end()) text += ": " + refusal->second;
  }
  if (ranks.size() > kNamed) text += " and " + std::to_string(ranks.size() - kNamed) + " more";
  throw DeadlineExceeded(text);
}

// One thread at a time dials a peer: of two links the ends could keep different ones.
class Connector::Turn {
 public:
  Turn(Connector& connector, int peer) : connector_(connector), peer_(peer) {
    const std::lock_guard lock(connector_.mutex_);
    has_it_ = connector_.dialed_.insert(peer_).second;
  }
  ~Turn() {
    if (!has_it_) return;
    const std::lock_guard lock(connector_.mutex_);
    connector_.dialed_.erase(peer_);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  explicit operator bool() const { return has_it_; }

 private:
  Connector& connector_;
  const int peer_;
  bool has_it_ = false;
};

// Tries until the peer listens and has room for us, for it may start later than we do, and so may all others.
void Connector::dial(int peer, const PeerAddress& address, Deadline deadline) {
  const std::string what = self() + ": dialing rank " + std::to_string(peer) + " at " + address.host + ":" +
                           std::to_string(address.port) + ": ";
  std::string why = "it did not answer";
  Backoff backoff(identity_.rank);
  try {
    while (!deadline.expired()) {
      if (const Turn turn(*this, peer); turn && try_dial(peer, address, deadline, why)) return;
      backoff.pause(deadline);
    }
  } catch (const LinkRefused& refused) {
    throw CommError(what + refused.what());
  }
  if (table_.has_live(peer)) return;
  throw DeadlineExceeded(what + "no link by the deadline: " + why);
}

// False, with the reason in `why`, where another attempt may do.
bool Connector::try_dial(int peer, const PeerAddress& address, Deadline deadline, std::string& why) {
  if (table_.has_live(peer)) return true;  // another thread was faster
  Fd socket = dial_tcp(address.host, address.port, deadline, why);
  if (!socket) return false;
  Dialed dialed;
  try {
    dialed = dial_link(identity_, fresh_nonce(), peer, std::move(socket), deadline);
  } catch (const LinkRefused&) {
    throw;
  } catch (const CommError& error) {
    why = error.what();
    return false;
  }
  if (!dialed.channel) {
    why = "it has not given up its former link to us yet";
    return false;
  }
  hooks_.add_link(peer, std::move(dialed.channel));
  return true;
}

// ---- dialing again ----------------------------------------------------------------------------------------------

void Connector::mend(Deadline deadline) {
  std::size_t started = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [peer, address] : addresses_) {
      if (peer >= identity_.rank || table_.has_live(peer)) continue;
      if (mending_.insert(peer).second) redials_.push_back({peer, address, deadline});
    }
    started = std::min(kRedialers - redialers_, redials_.size());
    redialers_ += started;
  }
  for (; started > 0; --started) {
    if (redialing_.start(Fd(), [this] { redial_all(); })) continue;
    const std::lock_guard lock(mutex_);
    redialers_ -= started;
    return;  // they wait for the next call
  }
}

void Connector::redial_all() {
  for (;;) {
    std::unique_lock lock(mutex_);
    if (redials_.empty()) {
      --redialers_;
      return;
    }
    const Redial task = std::move(redials_.front());
    redials_.pop_front();
    lock.unlock();
    redial(task);
    lock.lock();
    mending_.erase(task.peer);
  }
}

// A thread's own: nothing may pass. What went wrong shows as a link that is still broken.
void Connector::redial(const Redial& task) {
  Backoff backoff(identity_.rank);
  while (!task.deadline.expired() && !stopped_.load() && is_torn(task.peer)) {
    try {
      dial(task.peer, task.address, Deadline::after(kRedialSeconds).or_before(task.deadline));
      if (!is_wanted(task.peer)) hooks_.end_link(task.peer);  // it was forgotten while we dialed
    } catch (const std::exception&) {
      backoff.pause(task.deadline);
    }
  }
}

bool Connector::is_torn(int peer) const { return is_wanted(peer) && !table_.has_live(peer); }

bool Connector::is_wanted(int peer) const {
  const std::lock_guard lock(mutex_);
  return addresses_.contains(peer);
}

// ---- being dialed -----------------------------------------------------------------------------------------------

bool Connector::accept_dialers() {
  for (int accepted = 0; accepted < kAcceptedAtOnce; ++accepted) {
    if (handshakes_.running(kOwnAddress) >= kOfOneAddress) return true;
    if (handshakes_.running() >= kHandshakes && !handshakes_.cut_oldest(kHalfOpen)) return true;
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      if (is_of_another_user(socket)) continue;  // closed unread: it could keep a handshake's place for long
      const std::string address = is_of_own_address(socket) ? kOwnAddress : address_of_peer(socket);
      if (!has_room(address)) continue;  // closed: one of ours dials again
      if (!start_handshake(std::move(socket), address)) return true;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return false;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      return true;  // no descriptor or no memory is to be had now
    }
  }
  return true;
}

bool Connector::has_room(const std::string& address) {
  return handshakes_.running(address) < kOfOneAddress || handshakes_.cut_oldest(address, kHalfOpen);
}

// Each handshake has a thread of its own, so that a slow dialer holds nobody up. False when none is to be had: the
// dialer is cut off, and dials again.
bool Connector::start_handshake(Fd socket, const std::string& address) {
  const int handle = ::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0);
  const auto dialer = std::make_shared<Fd>(std::move(socket));  // a std::function is copied
  return handshakes_.start(Fd(handle), [this, dialer] { handshake(std::move(*dialer)); }, address);
}

void Connector::handshake(Fd socket) {
  try {
    const auto linked = [this](int rank) { return table_.has_live(rank); };
    const Deadline deadline = Deadline::after(kHandshakeSeconds);
    Acceptance acceptance = accept_link(identity_, fresh_nonce(), std::move(socket), linked, deadline);
    if (acceptance.channel) {
      hooks_.add_link(acceptance.peer, std::move(acceptance.channel));
      const std::lock_guard lock(mutex_);
      refusals_.erase(acceptance.peer);
    } else {
      note_refusal(acceptance);
    }
  } catch (const std::exception&) {
    // Not one of our dialers, or one that went away, or no memory for one more: a real one dials again, and its own
    // deadline names what is missing. The thread's entry, so nothing may pass.
  }
}

void Connector::note_refusal(const Acceptance& acceptance) {
  constexpr std::size_t kRemembered = 256;
  const std::lock_guard lock(mutex_);
  if (refusals_.size() >= kRemembered) return;
  if (acceptance.refusal == Refusal::kWrongToken) refusals_[acceptance.peer] = "it was refused for a wrong token";
  if (acceptance.refusal == Refusal::kWrongRank) refusals_[acceptance.peer] = "it was refused: it dialed another rank";
}

}  // namespace elaswave::comm
