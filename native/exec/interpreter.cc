// The step program's interpreter: the order of instructions, the vote, and what is left after a failure. What FORWARD
// and BACKWARD do is in units.cc.
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <span>

#include "engine_impl.h"
#include "plain_dispatch.h"

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

void Engine::Impl::begin(std::int64_t step_index, const Inputs& inputs, double deadline_s) {
  if (!ready_) throw ExecError("engine: set_schedule comes after the declarations and before steps");
  check_inputs(inputs);
  drop_pending();
  step_index_ = step_index;
  inputs_ = &inputs;
  courier.set_deadline(deadline_s);
  voted_ = committed_ = false;
  votes.clear();
  loss_ = count_ = 0.0;
  consumed_ = Consumed();
  result_ = StepResult();
  device_.begin();
}

StepResult Engine::Impl::step(std::int64_t step_index, const Inputs& inputs,
                              const std::vector<std::vector<double>>& hyper, const StepOptions& options) {
  const auto started = Clock::now();
  const PlainDispatch plain;
  begin(step_index, inputs, options.deadline_s);
  options_ = options;
  hyper_.clear();
  for (const std::vector<double>& group : hyper) {
    std::vector<at::Tensor> tensors(1);  // grad_scale, known after the vote
    for (const double value : group) tensors.push_back(at::scalar_tensor(value, at::kFloat));
    hyper_.push_back(std::move(tensors));
  }
  run(train_, &result_);
  fault_if_due(std::nullopt);
  boxes.end_step();
  buckets.end_step();
  drop_transients();
  result_.seconds = seconds_since(started);
  result_.emulated = device_.times();
  last_committed = result_;
  return result_;
}

EvalResult Engine::Impl::evaluate(std::int64_t step_index, const Inputs& inputs, double deadline_s) {
  const auto started = Clock::now();
  const PlainDispatch plain;
  begin(step_index, inputs, deadline_s);
  run(eval_, nullptr);
  EvalResult result;
  try {
    cast(Vote{loss_, count_, 0.0, 0, {}, {}, {}, {}}.pack(), 1);
    for (const auto& [rank, words] : votes) {
      const Vote part = Vote::unpack(words, 0);
      result.loss += part.loss;
      result.count += part.count;
    }
    votes.clear();
  } catch (...) {
    recover(eval_, eval_.steps.size());
    throw;
  }
  drop_transients();
  result.seconds = seconds_since(started);
  return result;
}

void Engine::Impl::run(const StepList& list, StepResult* result) {
  std::size_t at = 0;
  try {
    courier.reap();  // what the last step left to be sent
    if (result != nullptr) boxes.begin_step();
    for (; at < list.steps.size(); ++at) {
      const Step& step = list.steps[at];
      place_.store(static_cast<std::uint64_t>(step.code) << 32 | at, std::memory_order_relaxed);
      if (result != nullptr) fault_if_due(step.code);
      if (!committed_) {
        courier.check_members();
        courier.check_deadline(name_of(step.code));
      }
      const auto begin = Clock::now();
      const double waited = courier.wait_seconds();
      if (step.code == OpCode::kForward) {
        forward(step, result != nullptr);
      } else {
        execute(step);
      }
      for (const ActivationRef& ref : list.releases[at]) values.release(ref.value, ref.micro_batch, ref.grad);
      if (result == nullptr) continue;
      Timing& timing = result->timings[static_cast<std::size_t>(step.code)];
      ++timing.count;
      timing.seconds += seconds_since(begin);
      timing.wait_seconds += courier.wait_seconds() - waited;
    }
    place_.store(kNoPlace, std::memory_order_relaxed);
  } catch (...) {
    recover(list, at);
    throw;
  }
}

// Phases follow each other in the order of opcodes, so an empty one is reached with the next.
void Engine::Impl::fault_if_due(std::optional<OpCode> next) const {
  if (!options_.fault_at || (next && *next < *options_.fault_at)) return;
  if (options_.fault_pipe >= 0) {
    (void)!::write(options_.fault_pipe, options_.fault_words.data(), options_.fault_words.size());
  }
  ::raise(options_.fault_signal);
}

Progress Engine::Impl::progress() const {
  const std::uint64_t place = place_.load(std::memory_order_relaxed);
  if (place == kNoPlace) return {"", -1, courier.awaited()};
  return {name_of(static_cast<OpCode>(place >> 32)), static_cast<std::int64_t>(place & 0xffffffff), courier.awaited()};
}

void Engine::Impl::execute(const Step& step) {
  switch (step.code) {
    case OpCode::kRecv:
      return values.post_receive(step);
    case OpCode::kSend:
      courier.reap();
      return values.send(step);
    case OpCode::kBackward:
      backward(step);
      return boxes.advance();
    case OpCode::kReduce:
      return boxes.reduce(step.index);
    case OpCode::kFold:
      return folds.exchange();
    case OpCode::kVote:
      return vote();
    case OpCode::kUpdate:
      return update_owned(step.index);
    case OpCode::kGather:
      if (result_.updated) boxes.gather(step.index);
      return;
    case OpCode::kSnapshot:
      return update_held();
    case OpCode::kForward:
      return;
  }
}

// Every rank's words to every rank. What has come is in `votes`, also when this throws.
void Engine::Impl::cast(const std::vector<std::uint64_t>& words, std::int64_t channel) {
  const auto size = static_cast<std::int64_t>(words.size());
  const std::uint64_t tag = tag_of(kVoteTag, channel);
  at::Tensor own = at::empty({size}, at::kLong);
  std::copy(words.begin(), words.end(), reinterpret_cast<std::uint64_t*>(own.mutable_data_ptr<std::int64_t>()));
  std::vector<std::pair<int, at::Tensor>> parts;
  std::vector<comm::Transfer> receives, transfers;
  for (const int rank : world_) {
    if (rank == courier.rank()) continue;
    parts.emplace_back(rank, at::empty({size}, at::kLong));
    receives.push_back(courier.receive(parts.back().second, rank, tag));
  }
  transfers = receives;
  for (const int rank : world_) {
    if (rank != courier.rank()) transfers.push_back(courier.send(own, rank, tag));
  }
  votes = {{courier.rank(), words}};
  const auto keep = [&](std::size_t i) {
    const auto* data = reinterpret_cast<const std::uint64_t*>(parts[i].second.const_data_ptr<std::int64_t>());
    votes[parts[i].first].assign(data, data + size);
  };
  try {
    courier.wait(transfers);
  } catch (...) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (courier.arrived(receives[i])) keep(i);
    }
    throw;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) keep(i);
}

// From here on this rank has promised that it can do its part of the step, whatever happens to others.
void Engine::Impl::vote() {
  Vote mine{loss_,     count_, static_cast<double>(resident_peak_bytes()), 0, options_.content, boxes.state_digest(),
            consumed_, {}};
  mine.squares = boxes.finish();
  folds.wait();
  if (options_.stop_wanted) mine.flags |= Vote::kStop;
  voted_ = true;
  cast(mine.pack(), 0);
  commit();
}

void Engine::Impl::commit() {
  tally();
  if (result_.updated) folds.apply(programs_, table);
  committed_ = true;
  result_.version = ++version;
  result_.step = step_index_;
  result_.votes = votes;
  last_committed = result_;
}

void Engine::Impl::tally() {
  const auto count = static_cast<std::size_t>(boxes.size());
  std::vector<Vote> all;
  for (const auto& [rank, words] : votes) all.push_back(Vote::unpack(words, count));
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
  decide(square);
}

// As torch.nn.utils.clip_grad_norm_ on the mean gradient.
void Engine::Impl::decide(double square) {
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

void Engine::Impl::update(const BoxSpec& box, Base& base, const at::Tensor& gradient, const Hyper& hyper) {
  const BucketSpec& spec = buckets.spec(box.bucket);
  UnitProgram& program = *programs_[static_cast<std::size_t>(spec.optimizer)];
  const auto group = static_cast<std::size_t>(spec.hyper_group);
  const std::vector<at::Tensor> numbers = group < hyper.size() ? hyper[group] : std::vector<at::Tensor>();
  const std::size_t wanted = static_cast<std::size_t>(program.num_inputs()) - 2 - base.state.size();
  if (numbers.size() != wanted) {
    throw ExecError("bucket " + spec.name + ": hyper group " + std::to_string(group) + " gives " +
                    std::to_string(numbers.size()) + " values (grad_scale included), program " + program.name() +
                    " reads " + std::to_string(wanted));
  }
  optimizers_.try_emplace(spec.optimizer, program).first->second.update(box, base, gradient, numbers);
}

void Engine::Impl::update_owned(std::int64_t bucket) {
  if (!result_.updated) return;
  boxes.update_owned(bucket, std::bind_front(&Impl::update, this), hyper_);
}

void Engine::Impl::update_held() {
  if (!result_.updated) return;
  boxes.update_held(std::bind_front(&Impl::update, this), hyper_, [this](int box) { return state_tensors(box); });
}

void Engine::Impl::sync(double deadline_s) {
  courier.set_deadline(deadline_s);
  try {
    buckets.settle_all();
    courier.wait_all_sends();
  } catch (...) {
    recover(train_, train_.steps.size());
    throw;
  }
}

void Engine::Impl::refresh_work(const std::vector<std::vector<int>>& wanted, double deadline_s) {
  if (wanted.size() != static_cast<std::size_t>(buckets.size())) {
    throw ExecError("refresh_work: " + std::to_string(wanted.size()) + " lists of ranks for " +
                    std::to_string(buckets.size()) + " buckets");
  }
  const PlainDispatch plain;
  courier.set_deadline(deadline_s);
  try {
    boxes.refresh(wanted);
    buckets.settle_all();
  } catch (...) {
    recover(train_, train_.steps.size());
    throw;
  }
}

StepResult Engine::Impl::commit_pending(const Votes& all) {
  if (!pending) throw ExecError("commit_pending: no step was left after this rank had voted");
  for (const int rank : world_) {
    if (!all.contains(rank))
      throw ExecError("commit_pending: the vote of rank " + std::to_string(rank) + " is missing");
  }
  const PlainDispatch plain;
  votes = all;
  commit();
  pending = false;
  finish_committed(train_, 0);
  boxes.end_step();
  buckets.end_step();
  drop_transients();
  return *last_committed;
}

void Engine::Impl::drop_pending() noexcept {
  if (!pending) return;
  pending = false;
  boxes.end_step();
  buckets.end_step();
  drop_transients();
}

// What is left of a committed step from instruction `at` on: updates need no other rank, working copies do.
void Engine::Impl::finish_committed(const StepList& list, std::size_t at) noexcept {
  if (!result_.updated) return;
  for (std::size_t i = at; i < list.steps.size(); ++i) {
    const Step& step = list.steps[i];
    try {
      if (step.code == OpCode::kUpdate) update_owned(step.index);
      if (step.code == OpCode::kSnapshot) update_held();
    } catch (const std::exception&) {
      // The update program itself fails: the first failure is already on its way to the caller.
    }
    if (step.code == OpCode::kGather && !boxes.makes_all(step.index)) buckets.mark_stale(step.index);
  }
}

// See engine.h.
void Engine::Impl::recover(const StepList& list, std::size_t at) noexcept {
  place_.store(kNoPlace, std::memory_order_relaxed);
  try {
    throw;
  } catch (const comm::PeerLost& lost) {
    courier.flood(lost.rank());
  } catch (const comm::Aborted&) {
    // Whoever was first has told everybody.
  } catch (...) {
    courier.flood(-1);
  }
  courier.drop();
  buckets.abandon_gathers();
  boxes.abandon_transfers();
  values.clear();
  saved_.clear();
  if (committed_) {
    finish_committed(list, at);
  } else if (voted_) {
    pending = true;
    return;
  }
  boxes.end_step();
  buckets.end_step();
  drop_transients();
}

void Engine::Impl::drop_transients() noexcept {
  values.clear();
  folds.clear();
  saved_.clear();
  inputs_ = nullptr;
  voted_ = committed_ = false;
}

}  // namespace elaswave::exec
