// The step program's interpreter: what each instruction does, the vote, and what is left after a failure.
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>

#include "engine_impl.h"
#include "kernels/keyed.h"
#include "plain_dispatch.h"

namespace elaswave::exec {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Unit numbers of step keys, apart from those of sample keys.
constexpr std::int64_t kStepKeyBit = 0x80000000;

std::int64_t resident_peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace

void Engine::Impl::begin(std::int64_t step_index, const Inputs& inputs, double deadline_s) {
  if (!ready_) throw ExecError("engine: set_schedule comes after the declarations and before steps");
  check_inputs(inputs);
  step_index_ = step_index;
  inputs_ = &inputs;
  courier.set_deadline(deadline_s);
  committed_ = false;
  loss_ = count_ = 0.0;
  result_ = StepResult();
}

StepResult Engine::Impl::step(std::int64_t step_index, const Inputs& inputs,
                              const std::vector<std::vector<double>>& hyper, std::optional<double> clip_norm,
                              double deadline_s) {
  const auto started = Clock::now();
  const PlainDispatch plain;
  begin(step_index, inputs, deadline_s);
  clip_norm_ = clip_norm;
  hyper_.clear();
  for (const std::vector<double>& group : hyper) {
    std::vector<at::Tensor> tensors(1);  // grad_scale, known after the vote
    for (const double value : group) tensors.push_back(at::scalar_tensor(value, at::kFloat));
    hyper_.push_back(std::move(tensors));
  }
  run(train_, &result_);
  buckets.end_step();
  drop_transients();
  result_.seconds = seconds_since(started);
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
    for (const std::vector<double>& part : all_gather({loss_, count_}, 1)) {
      result.loss += part[0];
      result.count += part[1];
    }
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
    for (; at < list.steps.size(); ++at) {
      const Step& step = list.steps[at];
      if (!committed_) courier.check_deadline(name_of(step.code));
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
  } catch (...) {
    recover(list, at);
    throw;
  }
}

void Engine::Impl::execute(const Step& step) {
  switch (step.code) {
    case OpCode::kRecv:
      return values.post_receive(step);
    case OpCode::kSend:
      courier.reap();
      return values.send(step);
    case OpCode::kBackward:
      return backward(step);
    case OpCode::kReduce:
      return buckets.reduce(step.index);
    case OpCode::kFold:
      return folds.exchange();
    case OpCode::kVote:
      return vote();
    case OpCode::kUpdate:
      return update(step.index);
    case OpCode::kGather:
      if (result_.updated) buckets.gather(step.index);
      return;
    case OpCode::kForward:
    case OpCode::kSnapshot:
      return;
  }
}

at::Tensor Engine::Impl::batch_input(const std::string& name, std::int64_t micro_batch) const {
  const auto found = inputs_->find(name);
  if (found == inputs_->end())
    throw ExecError("input " + name + ": a unit of this rank reads it, but it was not given");
  const SampleSpan& span = micro_batches_[static_cast<std::size_t>(micro_batch)];
  return found->second.narrow(0, span.lo - first_sample_, span.size());
}

c10::IValue Engine::Impl::input_of(const Resolved& input, const Step& step) {
  switch (input.binding.kind) {
    case Binding::Kind::kParam:
    case Binding::Kind::kTable:
      return input.constant;
    case Binding::Kind::kValue:
      return values.activation(input.binding.index, step.micro_batch);
    case Binding::Kind::kInput:
      return batch_input(input.binding.name, step.micro_batch);
    case Binding::Kind::kKeys: {
      const SampleSpan& span = micro_batches_[static_cast<std::size_t>(step.micro_batch)];
      return kernels::sample_keys(seed_, step_index_ * global_batch_ + span.lo, span.size(), step.index);
    }
    case Binding::Kind::kStepKeys:
      return kernels::sample_keys(seed_, step_index_, 1, step.index | kStepKeyBit);
    default:
      throw ExecError("unit " + std::to_string(step.index) + ": a binding that is no input");
  }
}

void Engine::Impl::forward(const Step& step, bool train) {
  const auto unit = static_cast<int>(step.index);
  const UnitSpec& spec = units_.at(unit);
  const ResolvedUnit& resolved = resolved_.at(unit);
  for (const int bucket : resolved.buckets) buckets.settle(bucket);
  std::vector<c10::IValue> inputs;
  for (const Resolved& input : train ? resolved.inputs : resolved.eval_inputs) {
    inputs.push_back(input_of(input, step));
  }
  const int program = train ? spec.forward : spec.eval;
  std::vector<c10::IValue> outputs = programs_[static_cast<std::size_t>(program)]->run(std::move(inputs));
  const std::vector<Binding>& bindings = train ? spec.outputs : spec.eval_outputs;
  keep_outputs(step, bindings, outputs);
  if (!train || spec.backward == -1) return;
  outputs.erase(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(bindings.size()));
  saved_[{step.index, step.micro_batch}] = std::move(outputs);
}

void Engine::Impl::keep_outputs(const Step& step, const std::vector<Binding>& bindings,
                                std::vector<c10::IValue>& outputs) {
  for (std::size_t i = 0; i < bindings.size(); ++i) {
    const Binding& binding = bindings[i];
    switch (binding.kind) {
      case Binding::Kind::kValue:
        values.set_activation(binding.index, step.micro_batch, outputs[i].toTensor());
        break;
      case Binding::Kind::kLoss:
        loss_dtype_ = outputs[i].toTensor().scalar_type();
        loss_ += outputs[i].toTensor().item<double>();
        break;
      case Binding::Kind::kCount:
        count_ += outputs[i].isTensor() ? outputs[i].toTensor().item<double>() : outputs[i].toScalar().to<double>();
        break;
      case Binding::Kind::kFold:
        folds.collect(binding, micro_batches_[static_cast<std::size_t>(step.micro_batch)].lo, outputs[i].toTensor());
        break;
      default:
        break;
    }
  }
}

void Engine::Impl::backward(const Step& step) {
  const auto unit = static_cast<int>(step.index);
  const UnitSpec& spec = units_.at(unit);
  if (spec.backward == -1) return;
  auto saved = saved_.extract({step.index, step.micro_batch});
  std::vector<c10::IValue> inputs = std::move(saved.mapped());
  for (const Binding& output : spec.outputs) {
    if (output.kind == Binding::Kind::kLoss) inputs.emplace_back(at::ones({}, loss_dtype_));
    if (output.kind == Binding::Kind::kValue && values.specs()[static_cast<std::size_t>(output.index)].has_grad) {
      inputs.emplace_back(values.gradient(output.index, step.micro_batch));
    }
  }
  const auto gradients = programs_[static_cast<std::size_t>(spec.backward)]->run(std::move(inputs));
  const ResolvedUnit& resolved = resolved_.at(unit);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Resolved& target = resolved.grads[i];
    // A program may find that an input has no influence.
    if (!gradients[i].isTensor() || !gradients[i].toTensor().defined()) continue;
    if (target.binding.kind == Binding::Kind::kParam) {
      buckets.accumulate(target.binding.index, target.region, gradients[i].toTensor());
    } else if (target.binding.kind == Binding::Kind::kValue) {
      values.add_gradient(target.binding.index, step.micro_batch, gradients[i].toTensor());
    }
  }
}

// Every rank's small vector to every rank; the result is in the order of the world.
std::vector<std::vector<double>> Engine::Impl::all_gather(const std::vector<double>& mine, std::int64_t channel) {
  const auto size = static_cast<std::int64_t>(mine.size());
  const std::uint64_t tag = tag_of(kVoteTag, channel);
  at::Tensor own = at::scalar_tensor(0.0, at::kDouble).expand({size}).contiguous();
  std::copy(mine.begin(), mine.end(), own.mutable_data_ptr<double>());
  std::vector<at::Tensor> parts;
  std::vector<comm::Transfer> transfers;
  for (const int rank : world_) {
    parts.push_back(rank == courier.rank() ? own : own.clone());
    if (rank == courier.rank()) continue;
    transfers.push_back(courier.receive(parts.back(), rank, tag));
    transfers.push_back(courier.send(own, rank, tag));
  }
  courier.wait(transfers);
  std::vector<std::vector<double>> all;
  for (const at::Tensor& part : parts) {
    const double* data = part.const_data_ptr<double>();
    all.emplace_back(data, data + size);
  }
  return all;
}

void Engine::Impl::vote() {
  std::vector<double> mine = {loss_, count_, static_cast<double>(resident_peak_bytes())};
  const std::size_t sums = mine.size();
  const std::vector<double> squares = buckets.finish_reductions();
  mine.insert(mine.end(), squares.begin(), squares.end());
  const std::vector<std::vector<double>> all = all_gather(mine, 0);
  double square = 0.0, peak = 0.0;
  for (const std::vector<double>& part : all) {
    result_.loss += part[0];
    result_.count += part[1];
    peak = std::max(peak, part[2]);
  }
  // Bucket by bucket, then rank by rank: where stages are cut does not change the order, hence not the bits.
  for (std::size_t bucket = 0; bucket < squares.size(); ++bucket) {
    for (const std::vector<double>& part : all) square += part[sums + bucket];
  }
  result_.memory_bytes = static_cast<std::int64_t>(peak);
  folds.wait();
  decide(square);
  if (result_.updated) folds.apply(programs_, table);
  committed_ = true;
  result_.version = ++version;
  result_.step = step_index_;
  last_committed = result_;
}

// As torch.nn.utils.clip_grad_norm_ on the mean gradient.
void Engine::Impl::decide(double square) {
  const bool norm_finite = std::isfinite(square);
  result_.finite = norm_finite && std::isfinite(result_.loss);
  result_.updated = norm_finite && result_.count > 0.0;
  if (result_.count > 0.0) {
    result_.grad_norm = std::sqrt(square) / result_.count;
    const double clip = clip_norm_ ? std::min(1.0, *clip_norm_ / (result_.grad_norm + 1e-6)) : 1.0;
    result_.scale = clip / result_.count;
  }
  for (std::vector<at::Tensor>& group : hyper_) group[0] = at::scalar_tensor(result_.scale, at::kFloat);
}

void Engine::Impl::update(std::int64_t bucket) {
  if (!result_.updated || !buckets.owns(bucket)) return;
  const BucketSpec& spec = buckets.spec(bucket);
  UnitProgram& optimizer = *programs_[static_cast<std::size_t>(spec.optimizer)];
  const auto group = static_cast<std::size_t>(spec.hyper_group);
  const std::size_t before = 2 + spec.state.size();
  const std::span<const at::Tensor> hyper =
      group < hyper_.size() ? std::span<const at::Tensor>(hyper_[group]) : std::span<const at::Tensor>();
  if (before + hyper.size() != static_cast<std::size_t>(optimizer.num_inputs())) {
    throw ExecError("bucket " + spec.name + ": hyper group " + std::to_string(group) + " gives " +
                    std::to_string(hyper.size()) + " values (grad_scale included), program " + optimizer.name() +
                    " reads " + std::to_string(static_cast<std::size_t>(optimizer.num_inputs()) - before));
  }
  buckets.update(bucket, optimizer, hyper);
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

void Engine::Impl::refresh_work(double deadline_s) {
  const PlainDispatch plain;
  courier.set_deadline(deadline_s);
  try {
    for (int bucket = 0; bucket < buckets.size(); ++bucket) buckets.refresh(bucket);
    buckets.settle_all();
    courier.wait_all_sends();
  } catch (...) {
    recover(train_, train_.steps.size());
    throw;
  }
}

// See engine.h: before the commit nothing has changed; after it the rest of the updates needs no other rank.
void Engine::Impl::recover(const StepList& list, std::size_t at) noexcept {
  courier.drop();
  buckets.abandon_gathers();
  if (committed_ && result_.updated) {
    for (std::size_t i = at; i < list.steps.size(); ++i) {
      const Step& step = list.steps[i];
      try {
        if (step.code == OpCode::kUpdate) update(step.index);
      } catch (const std::exception&) {
        // The update program itself fails: the first failure is already on its way to the caller.
      }
      if (step.code == OpCode::kGather) buckets.mark_stale(step.index);
    }
  }
  buckets.end_step();
  drop_transients();
}

void Engine::Impl::drop_transients() noexcept {
  values.clear();
  folds.clear();
  saved_.clear();
  inputs_ = nullptr;
  committed_ = false;
}

}  // namespace elaswave::exec
