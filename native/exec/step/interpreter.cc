// The step program's interpreter: the order of instructions, the vote, and what is left after a failure. What FORWARD,
// BACKWARD and its halves do is in units.cc.
#include <ATen/ops/scalar_tensor.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <ctime>
#include <functional>
#include <span>
#include <thread>
#include <utility>

#include "exec/device/memory.h"
#include "exec/program/below_autograd_guard.h"
#include "exec/step/engine.h"

namespace elaswave::exec {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// What this thread has had of a processor. A rank that waits for one is not slow.
double processor_seconds() {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

bool runs_unit(OpCode code) {
  return code == OpCode::kForward || code == OpCode::kBackward || code == OpCode::kBackwardInputs ||
         code == OpCode::kBackwardWeights;
}

std::int64_t resident_peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

std::vector<Vote> unpacked(const Votes& votes) {
  std::vector<Vote> all;
  for (const auto& [rank, words] : votes) all.push_back(Vote::unpack(words));
  return all;
}

std::vector<RankId> voters_of(const Votes& votes) {
  std::vector<RankId> ranks;
  for (const auto& [rank, words] : votes) ranks.push_back(rank);
  return ranks;
}

// Whose votes the machine expects.
std::vector<RankId> peers_in(const commit::Actions& cast) {
  std::vector<RankId> peers;
  for (const commit::Action& action : cast) {
    if (action.kind == commit::Action::Kind::kExpectVote) peers.push_back(*action.peer);
  }
  return peers;
}

}  // namespace

void Engine::begin(std::int64_t step_index, const Tensors& inputs, double deadline_s) {
  check_inputs(inputs);
  drop();
  step_index_ = step_index;
  inputs_ = &inputs;
  transfers_.set_deadline(deadline_s);
  votes_.clear();
  loss_ = count_ = ExactTotal();
  keys_ = 0;
  consumed_ = Consumed();
  result_ = StepResult();
  device_.begin();
  busy_seconds_ = 0.0;
}

StepResult Engine::step(std::int64_t step_index, const Tensors& inputs, const Hypers& hyper,
                        const StepOptions& options) {
  const auto started = Clock::now();
  const BelowAutogradGuard guard;
  check_hyper(hyper);
  begin(step_index, inputs, options.deadline_s);
  options_ = options;
  hyper_.clear();
  for (const std::vector<double>& group : hyper) {
    std::vector<at::Tensor> tensors(1);  // grad_scale, known after the vote
    for (const double value : group) tensors.push_back(at::scalar_tensor(value, at::kFloat));
    hyper_.push_back(std::move(tensors));
  }
  run(spec_.schedule.train, &result_);
  fault_if_due(std::nullopt);
  machine_.end_step();
  end_step();
  result_.seconds = seconds_since(started);
  result_.emulated = device_.times();
  last_committed_ = result_;
  return result_;
}

EvalResult Engine::evaluate(std::int64_t step_index, const Tensors& inputs, double deadline_s) {
  const auto started = Clock::now();
  const BelowAutogradGuard guard;
  begin(step_index, inputs, deadline_s);
  run(spec_.schedule.evaluate, nullptr);
  EvalResult result;
  try {
    Vote mine;
    mine.loss = loss_;
    mine.count = count_;
    std::map<RankId, std::size_t> words_of;
    for (const RankId rank : spec_.world) words_of[rank] = Vote::words_with(0, 0);
    all_gather_votes(mine.pack(), words_of, 1);
    ExactTotal loss, count;
    for (const Vote& vote : unpacked(votes_)) {
      loss.add(vote.loss);
      count.add(vote.count);
    }
    result.loss = loss.value();
    result.count = count.value();
    votes_.clear();
  } catch (...) {
    leave_step();
  }
  drop_transients();
  result.seconds = seconds_since(started);
  return result;
}

void Engine::run(const StepList& list, StepResult* result) {
  std::size_t at = 0;
  std::optional<Clock::time_point> pipeline_begin;  // when what the first unit reads was there
  try {
    transfers_.reap();  // what the last step left to be sent
    if (result != nullptr) perform(machine_.begin_step());
    for (; at < list.steps.size(); ++at) {
      const Step& step = list.steps[at];
      place_.store(static_cast<std::uint64_t>(step.code) << 32 | at, std::memory_order_relaxed);
      if (result != nullptr) fault_if_due(step.code);
      if (!machine_.committed()) {
        transfers_.check_members();
        transfers_.check_deadline(name_of(step.code));
      }
      const auto begin = Clock::now();
      const double waited = transfers_.wait_seconds();
      const double computed = processor_seconds();
      execute(step, result != nullptr);
      for (const ActivationRef& ref : list.releases[at]) values_.release(ref.value, ref.micro_batch, ref.grad);
      if (result == nullptr) continue;
      if (runs_unit(step.code)) busy(processor_seconds() - computed);
      Timing& timing = result->timings[static_cast<std::size_t>(step.code)];
      ++timing.count;
      timing.seconds += seconds_since(begin);
      timing.wait_seconds += transfers_.wait_seconds() - waited;
      if (!runs_unit(step.code)) continue;
      if (!pipeline_begin) pipeline_begin = begin + duration_of(transfers_.wait_seconds() - waited);
      result->pipeline_seconds = seconds_since(*pipeline_begin);
      shards_.take_parts();
      replica_sync_.send_states();
    }
    place_.store(kNoPlace, std::memory_order_relaxed);
  } catch (...) {
    leave_step();
  }
}

// A unit has computed for so long; on a rank that is to be slow, the rest of what it takes is slept. What is emulated
// took its whole time already.
void Engine::busy(double seconds) {
  if (device_.times().kernels == 0 && options_.slowdown > 1.0) {
    std::this_thread::sleep_for(duration_of(seconds * (options_.slowdown - 1.0)));
    seconds *= options_.slowdown;
  }
  busy_seconds_ += seconds;
}

// Phases follow each other in the order of opcodes, so an empty one is reached with the next.
void Engine::fault_if_due(std::optional<OpCode> next) {
  std::optional<Fault>& fault = options_.fault;
  if (!fault || (next && *next < fault->at)) return;
  if (fault->pipe) (void)!::write(*fault->pipe, fault->words.data(), fault->words.size());
  const Fault due = *std::exchange(fault, std::nullopt);  // the process may live on: it is told to leave once
  if (due.cut_s > 0) {
    transfers_.cut(due.cut_s);
  } else {
    (void)::raise(due.signal);
  }
}

Progress Engine::progress() const {
  const std::uint64_t place = place_.load(std::memory_order_relaxed);
  if (place == kNoPlace) return {std::nullopt, transfers_.awaited()};
  return {Progress::Place{static_cast<OpCode>(place >> 32), place & 0xffffffff}, transfers_.awaited()};
}

void Engine::execute(const Step& step, bool train) {
  switch (step.code) {
    case OpCode::kRecv:
      return values_.post_receive(step);
    case OpCode::kSend:
      transfers_.reap();
      return values_.send(step);
    case OpCode::kForward:
      return forward(step, train);
    case OpCode::kBackward:
      return backward(step);
    case OpCode::kBackwardInputs:
      return backward_inputs(step);
    case OpCode::kBackwardWeights:
      return backward_weights(step);
    case OpCode::kReduce:
      shards_.reduce(step.bucket());
      // Who computes with the bucket sends states after its units: at their end they are in the way of what the vote
      // waits for.
      if (!machine_.reads(step.bucket())) replica_sync_.send_states();
      return;
    case OpCode::kVote:
      return vote();
    case OpCode::kUpdate:
      return perform(machine_.update_bucket(step.bucket()));
    case OpCode::kGather:
      return perform(machine_.gather(step.bucket()));
    case OpCode::kSnapshot:
      perform(machine_.update_replicas());
      return replica_sync_.take_states();
  }
}

// The own words to all peers, and theirs, which are as many as said. What has come is in `votes_`, also when this
// throws.
void Engine::all_gather_votes(const std::vector<std::uint64_t>& words, const std::map<RankId, std::size_t>& peers,
                              std::size_t channel) {
  const std::uint64_t tag = tag_of(kVoteTag, channel);
  const at::Tensor own = host_empty({static_cast<std::int64_t>(words.size())}, at::kLong);
  std::copy(words.begin(), words.end(), reinterpret_cast<std::uint64_t*>(own.mutable_data_ptr<std::int64_t>()));
  std::vector<std::pair<RankId, at::Tensor>> parts;
  std::vector<comm::Transfer> receives, all;
  for (const auto& [rank, size] : peers) {
    if (rank == transfers_.rank()) continue;
    parts.emplace_back(rank, host_empty({static_cast<std::int64_t>(size)}, at::kLong));
    receives.push_back(transfers_.receive(parts.back().second, rank, tag));
  }
  all = receives;
  for (const auto& [rank, part] : parts) all.push_back(transfers_.send(own, rank, tag));
  votes_ = {{transfers_.rank(), words}};
  const auto keep = [&](std::size_t i) {
    const auto& [rank, part] = parts[i];
    const auto* data = reinterpret_cast<const std::uint64_t*>(part.const_data_ptr<std::int64_t>());
    votes_[rank].assign(data, data + part.numel());
  };
  try {
    transfers_.wait(all);
  } catch (...) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (transfers_.arrived(receives[i])) keep(i);
    }
    throw;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) keep(i);
}

// Waits for all sums and records. Returns the sum of squares of the gradient of the boxes that this rank owns.
ExactTotal Engine::wait_ready() {
  shards_.wait_parts([this] { replica_sync_.hear_answers(); });
  const ExactTotal squares = shards_.squares();
  replica_sync_.wait_records();
  shards_.wait_sends();
  replica_sync_.wait_sends();
  return squares;
}

// From here on this rank has promised that it can do its part of the step, whatever happens to others.
void Engine::vote() {
  const double count = count_.value();
  if (count < 0.0) throw ExecError("the model returned a negative count of targets, " + std::to_string(count));
  Vote mine;
  mine.memory_bytes = static_cast<double>(resident_peak_bytes());
  mine.busy_seconds = device_.times().kernels == 0 ? busy_seconds_ : device_.times().modelled_s;
  mine.content = options_.content;
  mine.cross_check = options_.cross_check;
  mine.keys = keys_;
  mine.buckets = shards_.owned_digests();
  mine.consumed = consumed_.spans();
  const std::size_t planned = spec_.vote_spans.at(spec_.rank);
  if (mine.consumed.size() != planned) {
    throw ExecError("vote: " + std::to_string(mine.consumed.size()) + " separate spans were consumed; the plan has " +
                    std::to_string(planned));
  }
  mine.loss = loss_;
  mine.count = count_;
  mine.squares = wait_ready();
  if (options_.stop_wanted) mine.flags |= Vote::kStop;
  const commit::Actions cast = machine_.cast_vote();
  check_replicas(cast);
  const std::vector<RankId> peers = peers_in(cast);
  std::map<RankId, std::size_t> words_of;
  for (const RankId peer : peers) {
    words_of[peer] = Vote::words_with(spec_.vote_spans.at(peer), shards_.owned_buckets(peer));
  }
  all_gather_votes(mine.pack(), words_of, 0);
  for (const RankId peer : peers) machine_.vote_arrived(peer);
  commit(unpacked(votes_));
}

// Throws ReplicaDiffers if the machine would not vote with what this rank has found.
void Engine::check_replicas(const commit::Actions& cast) const {
  std::string differing;
  for (const commit::Action& action : cast) {
    if (action.kind != commit::Action::Kind::kLeaveStep) continue;
    differing += (differing.empty() ? "" : ", ") + shards_.place(*action.box);
  }
  if (differing.empty()) return;
  throw ReplicaDiffers("rank " + std::to_string(spec_.rank.value()) + ": replicas of " + differing +
                       " differ from their owners'");
}

// Throws InputsDiffer, on all ranks alike, if one has read other samples than the rank that fed them. `votes`: those of
// `votes_`, in their order.
void Engine::check_contents(const std::vector<Vote>& votes) const {
  std::map<RankId, Content> fed;
  for (std::size_t i = 0; const auto& [rank, words] : votes_) fed[rank] = votes[i++].content;
  for (std::size_t i = 0; const auto& [rank, words] : votes_) {
    const std::optional<CrossCheck>& check = votes[i++].cross_check;
    const auto other = check ? fed.find(check->rank) : fed.end();
    if (other == fed.end() || other->second == check->content) continue;
    throw InputsDiffer("step " + std::to_string(step_index_) + ": rank " + std::to_string(rank.value()) +
                       " reads other samples than rank " + std::to_string(check->rank.value()) + " fed");
  }
}

// Refused by the machine unless the votes of all are here. Returns the updates of a step that had been left.
commit::Actions Engine::commit(const std::vector<Vote>& votes) {
  check_contents(votes);
  sum_votes(votes);
  const commit::Actions updates = machine_.commit(result_.updated);
  shards_.set_hyper(hyper_);
  result_.version = machine_.version();
  result_.step = step_index_;
  result_.votes = votes_;
  last_committed_ = result_;
  return updates;
}

void Engine::sum_votes(const std::vector<Vote>& votes) {
  ExactTotal loss, count, squares;
  double peak = 0.0;
  for (const Vote& vote : votes) {
    loss.add(vote.loss);
    count.add(vote.count);
    squares.add(vote.squares);
    result_.stop = result_.stop || (vote.flags & Vote::kStop) != 0;
    peak = std::max(peak, vote.memory_bytes);
  }
  result_.loss = loss.value();
  result_.count = count.value();
  result_.memory_bytes = static_cast<std::int64_t>(peak);
  compute_clip(squares.value());
}

// As torch.nn.utils.clip_grad_norm_ on the mean gradient.
void Engine::compute_clip(double square) {
  const bool norm_finite = std::isfinite(square);
  result_.finite = norm_finite && std::isfinite(result_.loss);
  result_.updated = norm_finite && result_.count > 0.0;
  if (result_.count > 0.0) {
    result_.grad_norm = std::sqrt(square) / result_.count;
    const double clip = options_.clip_norm ? std::min(1.0, *options_.clip_norm / (result_.grad_norm + 1e-6)) : 1.0;
    result_.scale = clip / result_.count;
  }
  for (std::vector<at::Tensor>& group : hyper_) group[0] = at::scalar_tensor(result_.scale, at::kFloat);
}

// Before anything is done: what a step is told must fit the optimizers of the boxes that this rank keeps.
void Engine::check_hyper(const Hypers& hyper) const {
  for (const BoxId box : all_ids<BoxId>(shards_.size())) {
    if (!machine_.owns(box) && !machine_.holds(box)) continue;
    const BucketSpec& bucket = buckets_.spec(shards_.spec(box).bucket());
    if (!bucket.optimizer) continue;
    const ProgramSpec& program = programs_.spec(*bucket.optimizer);
    const std::size_t group = bucket.hyper_group;
    const std::size_t given = group < hyper.size() ? hyper[group].size() + 1 : 0;
    const std::size_t wanted = static_cast<std::size_t>(program.num_inputs) - 2 - state_tensors(shards_.spec(box));
    if (given == wanted) continue;
    throw ExecError("bucket " + bucket.name + ": hyper group " + std::to_string(group) + " gives " +
                    std::to_string(given) + " values (grad_scale included), program " + program.name + " reads " +
                    std::to_string(wanted));
  }
}

void Engine::update(const BoxSpec& box, ShardState& state, const at::Tensor& gradient, const Hyper& hyper) {
  const BucketSpec& bucket = buckets_.spec(box.bucket());
  if (!bucket.optimizer) return updates_.apply(programs_, box, state, gradient);
  Optimizer& optimizer = optimizers_.try_emplace(*bucket.optimizer, programs_.linked(*bucket.optimizer)).first->second;
  optimizer.update(box, state, gradient, hyper[bucket.hyper_group]);
}

void Engine::sync(double deadline_s) {
  transfers_.set_deadline(deadline_s);
  try {
    buckets_.wait_all_ready();
    transfers_.wait_all_sends();
  } catch (...) {
    leave_step();
  }
}

void Engine::refresh(const std::vector<std::vector<RankId>>& wanted, double deadline_s) {
  if (wanted.size() != buckets_.size()) {
    throw ExecError("refresh: " + std::to_string(wanted.size()) + " lists of ranks for " +
                    std::to_string(buckets_.size()) + " buckets");
  }
  const BelowAutogradGuard guard;
  transfers_.set_deadline(deadline_s);
  try {
    for (const BucketId bucket : all_ids<BucketId>(buckets_.size())) {
      perform(machine_.refresh(bucket, wanted[bucket.index()]));
    }
    buckets_.wait_all_ready();
  } catch (...) {
    leave_step();
  }
}

StepResult Engine::finish(const Votes& all) {
  const BelowAutogradGuard guard;
  const std::vector<Vote> votes = unpacked(all);
  machine_.finish(voters_of(all));
  votes_ = all;
  const commit::Actions updates = commit(votes);
  const std::exception_ptr failure = finish_updates(updates);
  machine_.end_step();
  end_step();
  if (failure) std::rethrow_exception(failure);
  return *last_committed_;
}

void Engine::drop() {
  const bool pending = machine_.pending();
  machine_.drop();
  if (pending) end_step();
}

// An update that fails costs its box, and the others are done. Returns the first failure.
std::exception_ptr Engine::finish_updates(commit::Actions updates) {
  std::exception_ptr failure;
  for (;;) {
    try {
      perform(updates);
      return failure;
    } catch (const ExecError&) {
      if (!failure) failure = std::current_exception();
      updates = machine_.leave();  // what is still to be done
    }
  }
}

// Called where an exception is handled, which goes on; see engine.h.
void Engine::leave_step() {
  const std::exception_ptr failure = recover();
  if (failure) std::rethrow_exception(failure);
  throw;
}

// Returns the failure of an update after an exception that tells of none.
std::exception_ptr Engine::recover() noexcept {
  place_.store(kNoPlace, std::memory_order_relaxed);
  bool tells = false;
  try {
    throw;
  } catch (const comm::PeerLost& lost) {
    transfers_.broadcast_abort(RankId(lost.rank()));
  } catch (const comm::Aborted&) {
    // Whoever was first has told everybody.
  } catch (const InputsDiffer&) {
    tells = true;  // All ranks find the same, once they have the votes that are under way to them.
  } catch (const ExecError&) {
    tells = true;
    transfers_.broadcast_abort(std::nullopt);
  } catch (...) {
    transfers_.broadcast_abort(std::nullopt);
  }
  transfers_.drop();
  buckets_.abandon_gathers();
  replica_sync_.abandon_transfers();
  shards_.abandon_transfers();
  values_.clear();
  saved_.clear();
  const std::exception_ptr failure = finish_updates(machine_.leave());
  if (!machine_.pending()) {
    if (machine_.committed()) machine_.end_step();
    end_step();
  }
  return tells ? nullptr : failure;
}

// Of the tensors of a step.
void Engine::end_step() {
  shards_.end_step();
  replica_sync_.end_step();
  buckets_.end_step();
  drop_transients();
}

void Engine::drop_transients() noexcept {
  values_.clear();
  updates_.clear();
  saved_.clear();
  inputs_ = nullptr;
}

}  // namespace elaswave::exec
