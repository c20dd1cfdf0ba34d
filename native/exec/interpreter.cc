// The step program's interpreter: the order of instructions, the vote, and what is left after a failure. What FORWARD
// and BACKWARD do is in units.cc.
#include <ATen/ops/scalar_tensor.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <span>

#include "below_autograd_guard.h"
#include "engine.h"
#include "memory.h"

namespace elaswave::exec {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

std::int64_t resident_peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace

void Engine::begin(std::int64_t step_index, const Tensors& inputs, double deadline_s) {
  check_inputs(inputs);
  drop();
  step_index_ = step_index;
  inputs_ = &inputs;
  transfers_.set_deadline(deadline_s);
  voted_ = committed_ = false;
  votes_.clear();
  loss_ = count_ = 0.0;
  consumed_ = Consumed();
  result_ = StepResult();
  device_.begin();
}

StepResult Engine::step(std::int64_t step_index, const Tensors& inputs, const Hypers& hyper,
                        const StepOptions& options) {
  const auto started = Clock::now();
  const BelowAutogradGuard guard;
  boxes_.check();
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
  boxes_.end_step();
  buckets_.end_step();
  drop_transients();
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
    all_gather_votes(Vote{loss_, count_, 0.0, 0, {}, {}, {}, {}}.pack(), 1);
    for (const auto& [rank, words] : votes_) {
      const Vote part = Vote::unpack(words, 0);
      result.loss += part.loss;
      result.count += part.count;
    }
    votes_.clear();
  } catch (...) {
    recover(spec_.schedule.evaluate, spec_.schedule.evaluate.steps.size());
    throw;
  }
  drop_transients();
  result.seconds = seconds_since(started);
  return result;
}

void Engine::run(const StepList& list, StepResult* result) {
  std::size_t at = 0;
  try {
    transfers_.reap();  // what the last step left to be sent
    if (result != nullptr) boxes_.begin_step();
    for (; at < list.steps.size(); ++at) {
      const Step& step = list.steps[at];
      place_.store(static_cast<std::uint64_t>(step.code) << 32 | at, std::memory_order_relaxed);
      if (result != nullptr) fault_if_due(step.code);
      if (!committed_) {
        transfers_.check_members();
        transfers_.check_deadline(name_of(step.code));
      }
      const auto begin = Clock::now();
      const double waited = transfers_.wait_seconds();
      execute(step, result != nullptr);
      for (const ActivationRef& ref : list.releases[at]) values_.release(ref.value, ref.micro_batch, ref.grad);
      if (result == nullptr) continue;
      Timing& timing = result->timings[static_cast<std::size_t>(step.code)];
      ++timing.count;
      timing.seconds += seconds_since(begin);
      timing.wait_seconds += transfers_.wait_seconds() - waited;
    }
    place_.store(kNoPlace, std::memory_order_relaxed);
  } catch (...) {
    recover(list, at);
    throw;
  }
}

// Phases follow each other in the order of opcodes, so an empty one is reached with the next.
void Engine::fault_if_due(std::optional<OpCode> next) const {
  const std::optional<Fault>& fault = options_.fault;
  if (!fault || (next && *next < fault->at)) return;
  if (fault->pipe) (void)!::write(*fault->pipe, fault->words.data(), fault->words.size());
  ::raise(fault->signal);
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
      backward(step);
      return boxes_.advance();
    case OpCode::kReduce:
      return boxes_.reduce(step.bucket());
    case OpCode::kFold:
      return updates_.exchange();
    case OpCode::kVote:
      return vote();
    case OpCode::kUpdate:
      return update_owned(step.bucket());
    case OpCode::kGather:
      if (result_.updated) boxes_.gather(step.bucket());
      return;
    case OpCode::kSnapshot:
      return update_held();
  }
}

// Every rank's words to every rank. What has come is in `votes_`, also when this throws.
void Engine::all_gather_votes(const std::vector<std::uint64_t>& words, std::size_t channel) {
  const auto size = static_cast<std::int64_t>(words.size());
  const std::uint64_t tag = tag_of(kVoteTag, channel);
  at::Tensor own = host_empty({size}, at::kLong);
  std::copy(words.begin(), words.end(), reinterpret_cast<std::uint64_t*>(own.mutable_data_ptr<std::int64_t>()));
  std::vector<std::pair<RankId, at::Tensor>> parts;
  std::vector<comm::Transfer> receives, posted;
  for (const RankId rank : spec_.world) {
    if (rank == transfers_.rank()) continue;
    parts.emplace_back(rank, host_empty({size}, at::kLong));
    receives.push_back(transfers_.receive(parts.back().second, rank, tag));
  }
  posted = receives;
  for (const RankId rank : spec_.world) {
    if (rank != transfers_.rank()) posted.push_back(transfers_.send(own, rank, tag));
  }
  votes_ = {{transfers_.rank(), words}};
  const auto keep = [&](std::size_t i) {
    const auto* data = reinterpret_cast<const std::uint64_t*>(parts[i].second.const_data_ptr<std::int64_t>());
    votes_[parts[i].first].assign(data, data + size);
  };
  try {
    transfers_.wait(posted);
  } catch (...) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (transfers_.arrived(receives[i])) keep(i);
    }
    throw;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) keep(i);
}

// From here on this rank has promised that it can do its part of the step, whatever happens to others.
void Engine::vote() {
  Vote mine{loss_,
            count_,
            static_cast<double>(resident_peak_bytes()),
            0,
            options_.content,
            boxes_.state_digest(),
            consumed_.spans(),
            {}};
  mine.squares = boxes_.finish();
  updates_.wait_ready();
  if (options_.stop_wanted) mine.flags |= Vote::kStop;
  voted_ = true;
  all_gather_votes(mine.pack(), 0);
  commit();
}

void Engine::commit() {
  sum_votes();
  if (result_.updated) updates_.apply(programs_, tables_);
  committed_ = true;
  result_.version = ++version_;
  result_.step = step_index_;
  result_.votes = votes_;
  last_committed_ = result_;
}

void Engine::sum_votes() {
  const std::size_t count = boxes_.size();
  std::vector<Vote> all;
  for (const auto& [rank, words] : votes_) all.push_back(Vote::unpack(words, count));
  double square = 0.0, peak = 0.0;
  for (const Vote& vote : all) {
    result_.loss += vote.loss;
    result_.count += vote.count;
    result_.stop = result_.stop || (vote.flags & Vote::kStop) != 0;
    peak = std::max(peak, vote.memory_bytes);
  }
  // Box by box: who owns them and where stages are cut does not change the order, hence not the bits.
  for (std::size_t box = 0; box < count; ++box) {
    for (const Vote& vote : all) square += vote.squares[box];
  }
  result_.memory_bytes = static_cast<std::int64_t>(peak);
  compute_clip(square);
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

void Engine::update(const BoxSpec& box, Base& base, const at::Tensor& gradient, const Hyper& hyper) {
  const BucketSpec& spec = buckets_.spec(box.bucket);
  UnitProgram& program = programs_.linked(spec.optimizer);
  const std::size_t group = spec.hyper_group;
  const std::vector<at::Tensor> numbers = group < hyper.size() ? hyper[group] : std::vector<at::Tensor>();
  const std::size_t wanted = static_cast<std::size_t>(program.num_inputs()) - 2 - base.state.size();
  if (numbers.size() != wanted) {
    throw ExecError("bucket " + spec.name + ": hyper group " + std::to_string(group) + " gives " +
                    std::to_string(numbers.size()) + " values (grad_scale included), program " + program.name() +
                    " reads " + std::to_string(wanted));
  }
  optimizers_.try_emplace(spec.optimizer, program).first->second.update(box, base, gradient, numbers);
}

void Engine::update_owned(BucketId bucket) {
  if (!result_.updated) return;
  boxes_.update_owned(bucket, std::bind_front(&Engine::update, this), hyper_);
}

void Engine::update_held() {
  if (!result_.updated) return;
  boxes_.update_held(std::bind_front(&Engine::update, this), hyper_, [this](BoxId box) { return state_tensors(box); });
}

void Engine::sync(double deadline_s) {
  transfers_.set_deadline(deadline_s);
  try {
    buckets_.wait_all_ready();
    transfers_.wait_all_sends();
  } catch (...) {
    recover(spec_.schedule.train, spec_.schedule.train.steps.size());
    throw;
  }
}

void Engine::refresh(const std::vector<std::vector<RankId>>& wanted, double deadline_s) {
  if (wanted.size() != buckets_.size()) {
    throw ExecError("refresh: " + std::to_string(wanted.size()) + " lists of ranks for " +
                    std::to_string(buckets_.size()) + " buckets_");
  }
  boxes_.check();
  const BelowAutogradGuard guard;
  transfers_.set_deadline(deadline_s);
  try {
    boxes_.refresh(wanted);
    buckets_.wait_all_ready();
  } catch (...) {
    recover(spec_.schedule.train, spec_.schedule.train.steps.size());
    throw;
  }
}

StepResult Engine::finish(const Votes& all) {
  if (!pending_) throw ExecError("finish: no step was left after this rank had voted");
  for (const RankId rank : spec_.world) {
    if (!all.contains(rank))
      throw ExecError("finish: the vote of rank " + std::to_string(rank.value()) + " is missing");
  }
  const BelowAutogradGuard guard;
  votes_ = all;
  commit();
  pending_ = false;
  finish_committed(spec_.schedule.train, 0);
  boxes_.end_step();
  buckets_.end_step();
  drop_transients();
  return *last_committed_;
}

void Engine::drop() noexcept {
  if (!pending_) return;
  pending_ = false;
  boxes_.end_step();
  buckets_.end_step();
  drop_transients();
}

// What is left of a committed step from instruction `at` on: updates need no other rank, working copies do.
void Engine::finish_committed(const StepList& list, std::size_t at) noexcept {
  if (!result_.updated) return;
  for (std::size_t i = at; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    try {
      if (step.code == OpCode::kUpdate) update_owned(step.bucket());
      if (step.code == OpCode::kSnapshot) update_held();
    } catch (const std::exception&) {
      // The update program itself fails: the first failure is already on its way to the caller.
    }
    if (step.code == OpCode::kGather && !boxes_.makes_all(step.bucket())) buckets_.mark_stale(step.bucket());
  }
}

// See engine.h.
void Engine::recover(const StepList& list, std::size_t at) noexcept {
  place_.store(kNoPlace, std::memory_order_relaxed);
  try {
    throw;
  } catch (const comm::PeerLost& lost) {
    transfers_.broadcast_abort(RankId(lost.rank()));
  } catch (const comm::Aborted&) {
    // Whoever was first has told everybody.
  } catch (...) {
    transfers_.broadcast_abort(std::nullopt);
  }
  transfers_.drop();
  buckets_.abandon_gathers();
  boxes_.abandon_transfers();
  values_.clear();
  saved_.clear();
  if (committed_) {
    finish_committed(list, at);
  } else if (voted_) {
    pending_ = true;
    return;
  }
  boxes_.end_step();
  buckets_.end_step();
  drop_transients();
}

void Engine::drop_transients() noexcept {
  values_.clear();
  updates_.clear();
  saved_.clear();
  inputs_ = nullptr;
  voted_ = committed_ = false;
}

}  // namespace elaswave::exec
