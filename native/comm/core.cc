#include "comm/core.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

// How long a waiter tries itself before it sleeps: ranks share cores, so not long.
constexpr auto kSpin = std::chrono::microseconds(15);
constexpr std::size_t kWaiterBudget = std::size_t{512} << 10;

}  // namespace

// ---- messages ---------------------------------------------------------------------------------------------------

Transfer EndpointCore::post(Request::Kind kind, int peer, std::uint64_t tag, std::byte* data, std::size_t bytes,
                            std::uint32_t generation) {
  const LinkPtr link = find(peer);
  if (!link) throw CommError(self() + " has no link to rank " + std::to_string(peer));
  auto request = std::make_shared<Request>();
  request->kind = kind;
  request->peer = peer;
  request->tag = tag;
  request->generation = generation;
  request->data = data;
  request->bytes = bytes;
  request->link = link;
  const bool needs_io = kind == Request::Kind::kSend ? link->post_send(request) : link->post_recv(request);
  if (needs_io) wake_io_thread(link);
  return Transfer(std::move(request));
}

// A waiter's hold on the links that it waits on: meanwhile it makes progress itself, and the IO threads of both ends
// sleep. Letting go hands the links back to the IO thread.
class EndpointCore::Driving {
 public:
  Driving(EndpointCore& core, std::span<Request* const> pending) : core_(core) {
    for (const Request* request : pending) {
      if (std::find(links_.begin(), links_.end(), request->link) == links_.end()) links_.push_back(request->link);
    }
    for (const LinkPtr& link : links_) link->enter();
  }
  ~Driving() {
    for (const LinkPtr& link : links_) {
      if (link->leave()) core_.wake_io_thread(link);
    }
  }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;

  bool progress() {
    bool moved = false;
    for (const LinkPtr& link : links_) moved = link->try_progress(kWaiterBudget) || moved;
    return moved;
  }

 private:
  EndpointCore& core_;
  std::vector<LinkPtr> links_;
};

void EndpointCore::give_up(std::span<const Transfer> transfers, const FailurePtr& failure, const LinkPtr& link) {
  cancel(transfers);
  wake_io_thread(link);  // if the link is over, its socket is to be let go
  failure->raise();
}

void EndpointCore::wait(std::span<const Transfer> transfers, Deadline deadline, std::span<const int> members) {
  std::vector<Request*> pending;
  pending.reserve(transfers.size());
  for (const Transfer& transfer : transfers) {
    if (transfer.valid()) pending.push_back(transfer.request().get());
  }
  std::vector<LinkPtr> watched;
  for (const int member : members) {
    if (const LinkPtr link = find(member)) watched.push_back(link);
  }
  std::optional<Driving> driving;
  bool spun = false;
  auto spin_until = Deadline::Clock::now() + kSpin;
  for (;;) {
    const std::uint32_t ticket = signal_.ticket();
    apply_remote_abort();
    for (const Request* request : pending) {
      if (request->state.load() == Request::State::kFailed) {
        give_up(transfers, request->failure, request->link);
      }
    }
    std::erase_if(pending, [](const Request* r) { return r->state.load() == Request::State::kDone; });
    if (pending.empty()) return;
    for (const LinkPtr& link : watched) {
      if (const FailurePtr lost = link->lost(); lost && !lost->orderly) give_up(transfers, lost, link);
    }
    const auto now = Deadline::Clock::now();
    if (now >= deadline.at()) {
      cancel(transfers);
      raise_deadline(pending);
    }
    if (spun) {
      signal_.sleep(ticket, deadline);
      continue;
    }
    if (!driving) driving.emplace(*this, pending);
    if (driving->progress()) {
      spin_until = now + kSpin;
    } else if (now < spin_until) {
      std::this_thread::yield();
    } else {
      driving.reset();  // what comes in from now on is the IO thread's; look once more, then sleep
      spun = true;
    }
  }
}

bool EndpointCore::test(const Transfer& transfer) {
  if (!transfer.valid()) return true;
  const RequestPtr& request = transfer.request();
  if (request->state.load() == Request::State::kPending) request->link->try_progress(kWaiterBudget);
  const auto state = request->state.load();
  if (state == Request::State::kFailed) request->failure->raise();
  return state == Request::State::kDone;
}

void EndpointCore::cancel(std::span<const Transfer> transfers) {
  FailurePtr reason;
  for (const Transfer& transfer : transfers) {
    if (!transfer.valid() || transfer.request()->state.load() != Request::State::kPending) continue;
    if (!reason) {
      reason = std::make_shared<const Failure>(
          Failure{Failure::Kind::kComm, self() + ": the transfer was cancelled", std::nullopt, generation()});
    }
    transfer.request()->link->cancel(transfer.request(), reason);
  }
}

void EndpointCore::raise_deadline(std::span<Request* const> pending) const {
  constexpr std::size_t kNamed = 8;
  std::string text = self() + ": a wait passed its deadline; still awaited: ";
  for (std::size_t i = 0; i < std::min(kNamed, pending.size()); ++i) {
    if (i > 0) text += "; ";
    text += pending[i]->describe();
  }
  if (pending.size() > kNamed) text += "; and " + std::to_string(pending.size() - kNamed) + " more";
  throw DeadlineExceeded(text);
}

void EndpointCore::abort(const std::string& reason) {
  abort_links(std::make_shared<const Failure>(
                  Failure{Failure::Kind::kAborted, self() + ": aborted: " + reason, std::nullopt, generation()}),
              std::nullopt);
}

void EndpointCore::broadcast_abort(std::optional<int> suspect) {
  const std::string whom = (suspect ? "rank " + std::to_string(*suspect) : "nobody") + " is suspected";
  const std::uint32_t epoch = generation();
  abort_links(std::make_shared<const Failure>(
                  Failure{Failure::Kind::kAborted, self() + ": aborted: the step was left, " + whom, suspect, epoch}),
              PendingAbort::Abort{epoch, suspect});
}

bool EndpointCore::abort_links(const FailurePtr& failure, std::optional<PendingAbort::Abort> abort) {
  const std::unique_lock lock(table_mutex_);
  // Told once per generation, however many peers tell us.
  const bool tell = abort && (!broadcast_generation_ || *broadcast_generation_ < abort->generation);
  if (tell) broadcast_generation_ = abort->generation;
  if (aborted_ && !tell) return false;
  if (!aborted_) aborted_ = failure;
  is_aborted_.store(true);
  for (const auto& [rank, link] : table_) link->abort(aborted_);
  if (!tell) return true;
  for (const LinkPtr& link : to_be_told()) {
    if (link->post_abort(*abort)) wake_io_thread(link);
  }
  return true;
}

// The peers 1, 2, 4, ... places further in the ring of those that are left: each tells its own, so all n hear of it
// after log n hops at most, by n log n frames where everybody telling everybody would take n * n.
std::vector<EndpointCore::LinkPtr> EndpointCore::to_be_told() const {
  std::vector<LinkPtr> ring, chosen;
  for (auto it = table_.upper_bound(options_.rank); it != table_.end(); ++it) ring.push_back(it->second);
  for (auto it = table_.begin(); it != table_.end() && it->first < options_.rank; ++it) ring.push_back(it->second);
  std::erase_if(ring, [](const LinkPtr& link) { return link->lost() != nullptr; });
  for (std::size_t distance = 1; distance <= ring.size(); distance *= 2) chosen.push_back(ring[distance - 1]);
  return chosen;
}

void EndpointCore::apply_remote_abort() {
  const std::optional<PendingAbort::Abort> told = pending_abort_.newest();
  // One of an older generation is over; one of a newer waits until we get there.
  if (!told || told->generation != generation() || is_aborted_.load()) return;
  broadcast_abort(told->suspect);
}

void EndpointCore::check(std::span<const int> members) const {
  if (is_aborted_.load()) {
    const std::shared_lock lock(table_mutex_);
    if (aborted_) aborted_->raise();
  }
  if (!pending_abort_.any_lost()) return;
  for (const int member : members) {
    const LinkPtr link = find(member);
    if (const FailurePtr lost = link ? link->lost() : nullptr; lost && !lost->orderly) lost->raise();
  }
}

void EndpointCore::advance(std::uint32_t generation) {
  {
    const std::unique_lock lock(table_mutex_);
    if (generation < generation_.load()) {
      throw CommError(self() + ": generation " + std::to_string(generation) + " is older than the current " +
                      std::to_string(generation_.load()));
    }
    generation_.store(generation);
    aborted_ = nullptr;
    is_aborted_.store(false);
    for (const auto& [rank, link] : table_) {
      link->advance(generation);
      wake_io_thread(link);  // it may have stood still for a full pool
    }
  }
  apply_remote_abort();
}

// ---- table ------------------------------------------------------------------------------------------------------

std::shared_ptr<Link> EndpointCore::find(int peer) const {
  const std::shared_lock lock(table_mutex_);
  const auto it = table_.find(peer);
  return it == table_.end() ? nullptr : it->second;
}

std::map<int, std::shared_ptr<Link>> EndpointCore::links() const {
  const std::shared_lock lock(table_mutex_);
  return table_;
}

bool EndpointCore::has_live_link(int peer) const {
  const LinkPtr link = find(peer);
  return link && !link->lost();
}

void EndpointCore::disconnect(int peer) {
  const LinkPtr link = find(peer);
  if (!link) throw CommError(self() + " has no link to rank " + std::to_string(peer));
  {
    const std::unique_lock lock(table_mutex_);
    addresses_.erase(peer);
  }
  link->close(std::make_shared<const Failure>(
      Failure{Failure::Kind::kLost, self() + ": the link to rank " + std::to_string(peer) + " was ended here", peer,
              generation()}));
  wake_io_thread(link);
}

void EndpointCore::close() {
  if (std::exchange(closed_, true)) return;
  stop_.store(true);
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  io_thread_.join();
  reap_linkers(true);
  listener_ = Fd();
  for (const auto& [rank, link] : links()) {
    link->close(std::make_shared<const Failure>(
        Failure{Failure::Kind::kComm, self() + ": the endpoint is closed", rank, generation()}));
    link->take_channel();
  }
}

}  // namespace elaswave::comm
