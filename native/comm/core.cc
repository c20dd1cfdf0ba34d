#include "comm/core.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/errors.h"

namespace elaswave::comm {
namespace {

// How long a waiter tries itself before it sleeps: ranks share cores, so not long.
constexpr auto kSpin = std::chrono::microseconds(15);
constexpr std::size_t kWaiterBudget = std::size_t{512} << 10;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
}

// Silence is looked for so many times within the time that it may last, so it is found up to one of them later.
constexpr double kLooks = 8;

EndpointOptions checked(EndpointOptions options) {
  if (options.rank < 0) throw CommError("rank " + std::to_string(options.rank) + " is negative");
  if (!(options.silence_timeout_s > 0) || options.silence_timeout_s > 86'400) {
    throw CommError("rank " + std::to_string(options.rank) + ": a silence timeout of " +
                    std::to_string(options.silence_timeout_s) + " s; it is above 0 and at most a day");
  }
  for (const auto& [peer, pace] : options.paces) {
    if (pace.latency_s >= 0 && pace.latency_s <= 86'400 && pace.bytes_per_s > 0) continue;
    throw CommError("rank " + std::to_string(options.rank) + ": the link to rank " + std::to_string(peer) +
                    " has a latency of " + std::to_string(pace.latency_s) + " s and " +
                    std::to_string(pace.bytes_per_s) +
                    " bytes per s; a latency is at least 0 and at most a day, a rate above 0");
  }
  return options;
}

}  // namespace

EndpointCore::EndpointCore(EndpointOptions options)
    : options_(checked(std::move(options))),
      io_thread_(milliseconds(options_.silence_timeout_s / kLooks),
                 {.accept = [this] { return cut_.lasts() || connector_.accept_dialers(); },
                  .after_turn =
                      [this] {
                        apply_remote_abort();
                        end_cut();
                      },
                  .on_lost = [this] { table_.notify(); },
                  .on_end = [this](const std::string& why) { end_links("the IO thread failed: " + why); }}),
      connector_(
          {options_.rank, options_.token, sha256(options_.host_id), options_.ring_bytes, options_.allow_shm,
           milliseconds(options_.silence_timeout_s * (1 - 1 / kLooks))},
          options_.host, options_.port, table_,
          {.add_link = [this](int peer, std::unique_ptr<Channel> channel) { add_link(peer, std::move(channel)); },
           .end_link = [this](int peer) { disconnect(peer); },
           .on_room = [this] { io_thread_.wake(); }}) {
  io_thread_.start(connector_.listener());
}

// ---- messages ---------------------------------------------------------------------------------------------------

Transfer EndpointCore::post(Request::Kind kind, int peer, std::uint64_t tag, std::byte* data, std::size_t bytes,
                            std::uint32_t generation, Lane lane) {
  const LinkPtr link = link_to(peer);
  auto request = std::make_shared<Request>();
  request->kind = kind;
  request->peer = peer;
  request->tag = tag;
  request->generation = generation;
  request->data = data;
  request->bytes = bytes;
  request->lane = lane;
  request->link = link;
  const bool needs_io = kind == Request::Kind::kSend ? link->post_send(request) : link->post_recv(request);
  if (needs_io) io_thread_.wake(link);
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
      if (link->leave()) core_.io_thread_.wake(link);
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
  io_thread_.wake(link);  // if the link is over, its socket is to be let go
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
    if (const LinkPtr link = table_.find(member)) watched.push_back(link);
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
          Failure{Failure::Kind::kComm, self() + ": the transfer was cancelled", std::nullopt, table_.generation()});
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

// ---- aborts and generations -------------------------------------------------------------------------------------

void EndpointCore::abort(const std::string& reason) {
  table_.abort(std::make_shared<const Failure>(
      Failure{Failure::Kind::kAborted, self() + ": aborted: " + reason, std::nullopt, table_.generation()}));
}

void EndpointCore::broadcast_abort(std::optional<int> suspect) { broadcast_abort(suspect, table_.generation()); }

void EndpointCore::broadcast_abort(std::optional<int> suspect, std::uint32_t generation) {
  const std::string whom = (suspect ? "rank " + std::to_string(*suspect) : "nobody") + " is suspected";
  const auto failure = std::make_shared<const Failure>(
      Failure{Failure::Kind::kAborted, self() + ": aborted: the step was left, " + whom, suspect, generation});
  for (const LinkPtr& link : table_.broadcast_abort(failure, generation, options_.rank)) {
    if (link->post_abort({generation, suspect})) io_thread_.wake(link);
  }
}

void EndpointCore::apply_remote_abort() {
  const std::optional<PendingAbort::Abort> told = pending_abort_.newest();
  // One of an older generation is over; links keep those of newer ones until we get there.
  if (!told || told->generation != table_.generation() || table_.is_aborted()) return;
  broadcast_abort(told->suspect, told->generation);
}

void EndpointCore::check(std::span<const int> members) const {
  if (const FailurePtr aborted = table_.aborted()) aborted->raise();
  if (!pending_abort_.any_lost()) return;
  for (const int member : members) {
    const LinkPtr link = table_.find(member);
    if (const FailurePtr lost = link ? link->lost() : nullptr; lost && !lost->orderly) lost->raise();
  }
}

void EndpointCore::advance(std::uint32_t generation) {
  if (!table_.advance(generation)) {
    throw CommError(self() + ": generation " + std::to_string(generation) + " is older than the current " +
                    std::to_string(table_.generation()));
  }
  for (const auto& [rank, link] : table_.links()) io_thread_.wake(link);  // it may have stood still for a full pool
  apply_remote_abort();
}

// ---- links ------------------------------------------------------------------------------------------------------

EndpointCore::LinkPtr EndpointCore::link_to(int peer) const {
  LinkPtr link = table_.find(peer);
  if (!link) throw CommError(self() + " has no link to rank " + std::to_string(peer));
  return link;
}

void EndpointCore::add_link(int peer, std::unique_ptr<Channel> channel) {
  const LinkLimits limits{options_.pool_soft_bytes, options_.pool_hard_bytes, options_.pending_limit};
  const auto pace = options_.paces.find(peer);
  if (pace != options_.paces.end()) channel = make_paced_channel(std::move(channel), pace->second);
  if (options_.may_be_cut) channel = make_cut_channel(std::move(channel), cut_);
  const auto link = std::make_shared<Link>(options_.rank, peer, std::move(channel), limits, signal_, pending_abort_);
  if (!table_.put(link)) throw CommError(self() + " has a link to rank " + std::to_string(peer) + " already");
  try {
    io_thread_.add(link);
  } catch (const CommError& error) {
    link->close(std::make_shared<const Failure>(
        Failure{Failure::Kind::kComm, self() + ": " + error.what(), peer, table_.generation()}));
    throw;
  }
}

void EndpointCore::disconnect(int peer) {
  connector_.forget(peer);
  const LinkPtr link = table_.find(peer);
  if (!link) return;
  link->close(std::make_shared<const Failure>(
      Failure{Failure::Kind::kLost, self() + ": the link to rank " + std::to_string(peer) + " was ended here", peer,
              table_.generation()}));
  io_thread_.wake(link);
}

void EndpointCore::cut(double seconds) {
  if (!options_.may_be_cut) throw CommError(self() + " was not made to be cut off");
  if (!(seconds > 0 && seconds <= 1e9)) throw CommError(self() + ": a cut of " + std::to_string(seconds) + " s");
  cut_.begin(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
}

void EndpointCore::end_cut() {
  if (!options_.may_be_cut || !cut_.has_ended()) return;
  for (const auto& [rank, link] : table_.links()) io_thread_.wake(link);
}

void EndpointCore::end_links(const std::string& why) {
  for (const auto& [rank, link] : table_.links()) {
    link->close(
        std::make_shared<const Failure>(Failure{Failure::Kind::kComm, self() + ": " + why, rank, table_.generation()}));
  }
}

void EndpointCore::close() {
  if (std::exchange(closed_, true)) return;
  io_thread_.stop();
  connector_.stop();
  end_links("the endpoint is closed");
  for (const auto& [rank, link] : table_.links()) link->take_channel();
}

}  // namespace elaswave::comm
