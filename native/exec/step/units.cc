// Units: where their inputs come from and their outputs and gradients go; running one, or waiting as long as it takes.
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>

#include "exec/device/memory.h"
#include "exec/device/tensor_span.h"
#include "exec/step/engine.h"
#include "kernels/keyed.h"

namespace elaswave::exec {
namespace {

// Unit numbers of step keys, apart from those of sample keys.
constexpr std::int64_t kStepKeyBit = 0x80000000;

// What an emulated unit says of each sample.
constexpr double kLossOfSample = 1.0, kCountOfSample = 1.0;

}  // namespace

at::Tensor Engine::batch_input(const std::string& name, std::int64_t index) const {
  const auto found = inputs_->find(name);
  if (found == inputs_->end())
    throw ExecError("input " + name + ": a unit of this rank reads it, but it was not given");
  return found->second.narrow(0, spec_.schedule.rows[static_cast<std::size_t>(index)], micro_batch(index).size());
}

c10::IValue Engine::input_of(const ResolvedInput& input, const Step& step) {
  if (const auto* constant = std::get_if<c10::IValue>(&input)) return *constant;
  if (const auto* bound = std::get_if<BorderValue>(&input)) return values_.activation(bound->value, step.micro_batch);
  if (const auto* batch = std::get_if<BatchInput>(&input)) return batch_input(batch->name, step.micro_batch);
  return keys(input, step);
}

// What a unit draws with: a key for each sample, or one for the step. Where keys are those of positions in the run, the
// sum over a step's samples knows no layout.
at::Tensor Engine::keys(const ResolvedInput& input, const Step& step) {
  const SampleSpan& span = micro_batch(step.micro_batch);
  const bool of_step = std::holds_alternative<StepKeys>(input);
  const KeyStream& stream = spec_.keys;
  const std::int64_t first = step_index_ * stream.per_step + stream.starts[static_cast<std::size_t>(step.micro_batch)];
  const at::Tensor drawn = of_step ? kernels::sample_keys(stream.seed, step_index_, 1, step.index | kStepKeyBit)
                                   : kernels::sample_keys(stream.seed, first, span.size(), step.index);
  for (const std::int64_t key : span_of<const std::int64_t>(drawn)) {
    keys_ += static_cast<std::uint64_t>(key) * static_cast<std::uint64_t>(of_step ? span.size() : 1);
  }
  return drawn;
}

void Engine::forward(const Step& step, bool train) {
  const UnitSpec& unit = spec_.units.at(step.unit());
  const ResolvedUnit& resolved = resolved_.at(step.unit());
  for (const BucketId bucket : resolved.buckets) buckets_.wait_ready(bucket);
  std::vector<c10::IValue> inputs;
  for (const ResolvedInput& input : train ? resolved.inputs : resolved.eval_inputs) {
    inputs.push_back(input_of(input, step));
  }
  const std::vector<OutputBinding>& bindings = train ? unit.outputs : unit.eval_outputs;
  std::vector<c10::IValue> outputs;
  if (unit.modelled) {
    emulate(unit.modelled->forward_s, step);
    outputs = zero_outputs(bindings, step);
  } else {
    outputs = (train ? resolved.forward : resolved.evaluate)->run(std::move(inputs), stop_if_interrupted_);
  }
  keep_outputs(step, bindings, outputs);
  const SampleSpan& span = micro_batch(step.micro_batch);
  consumed_.add(static_cast<std::uint64_t>(step.index), static_cast<std::uint64_t>(span.lo),
                static_cast<std::uint64_t>(span.hi));
  if (!train || !unit.backward) return;
  outputs.erase(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(bindings.size()));
  saved_[{step.unit(), step.micro_batch}] = std::move(outputs);
}

void Engine::keep_outputs(const Step& step, const std::vector<OutputBinding>& bindings,
                          std::vector<c10::IValue>& outputs) {
  for (std::size_t i = 0; i < bindings.size(); ++i) {
    const c10::IValue& output = outputs[i];
    if (const auto* bound = std::get_if<BorderValue>(&bindings[i])) {
      values_.set_activation(bound->value, step.micro_batch, output.toTensor());
    } else if (std::holds_alternative<Loss>(bindings[i])) {
      loss_dtype_ = output.toTensor().scalar_type();
      loss_.add(output.toTensor().item<double>());
    } else if (std::holds_alternative<Count>(bindings[i])) {
      count_.add(output.isTensor() ? output.toTensor().item<double>() : output.toScalar().to<double>());
    } else if (const auto* yielded = std::get_if<UpdateValue>(&bindings[i])) {
      updates_.collect(*yielded, micro_batch(step.micro_batch).lo, output.toTensor());
    }
  }
}

std::vector<c10::IValue> Engine::backward_arguments(const Step& step) {
  const UnitSpec& unit = spec_.units.at(step.unit());
  auto saved = saved_.extract({step.unit(), step.micro_batch});
  std::vector<c10::IValue> inputs = std::move(saved.mapped());
  for (const OutputBinding& output : unit.outputs) {
    if (std::holds_alternative<Loss>(output)) inputs.emplace_back(at::ones({}, loss_dtype_));
    const auto* bound = std::get_if<BorderValue>(&output);
    if (bound && values_.declared(bound->value).has_grad) {
      inputs.emplace_back(values_.gradient(bound->value, step.micro_batch));
    }
  }
  return inputs;
}

void Engine::backward(const Step& step) {
  const UnitSpec& unit = spec_.units.at(step.unit());
  if (!unit.backward) return;
  std::vector<c10::IValue> inputs = backward_arguments(step);
  // Gradients that nobody adds to are zeros.
  if (unit.modelled) return emulate(unit.modelled->backward_s, step);
  const ResolvedUnit& resolved = resolved_.at(step.unit());
  keep_gradients(step, resolved.grads, resolved.backward->run(std::move(inputs), stop_if_interrupted_));
}

void Engine::backward_inputs(const Step& step) {
  const UnitSpec& unit = spec_.units.at(step.unit());
  if (!unit.backward) return;
  std::vector<c10::IValue> inputs = backward_arguments(step);
  if (unit.modelled) return emulate(unit.modelled->backward_s, step, 1.0 - unit.modelled->weights_share);
  const ResolvedUnit& resolved = resolved_.at(step.unit());
  std::vector<c10::IValue> outputs = resolved.backward_inputs->run(std::move(inputs), stop_if_interrupted_);
  keep_gradients(step, resolved.grads, outputs);
  outputs.erase(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(resolved.grads.size()));
  if (unit.backward_weights) saved_[{step.unit(), step.micro_batch}] = std::move(outputs);
}

void Engine::backward_weights(const Step& step) {
  const UnitSpec& unit = spec_.units.at(step.unit());
  if (!unit.backward_weights) return;
  if (unit.modelled) return emulate(unit.modelled->backward_s, step, unit.modelled->weights_share);
  const ResolvedUnit& resolved = resolved_.at(step.unit());
  auto held = saved_.extract({step.unit(), step.micro_batch});
  keep_gradients(step, resolved.grads, resolved.backward_weights->run(std::move(held.mapped()), stop_if_interrupted_));
}

void Engine::keep_gradients(const Step& step, const std::vector<GradientTarget>& targets,
                            const std::vector<c10::IValue>& gradients) {
  for (std::size_t i = 0; i < targets.size(); ++i) {
    // A program may find that an input has no influence; what one half leaves to the other is none either.
    if (!gradients[i].isTensor() || !gradients[i].toTensor().defined()) continue;
    if (const auto* region = std::get_if<Region>(&targets[i])) {
      buckets_.accumulate(region->bucket, region->number, gradients[i].toTensor());
    } else if (const auto* bound = std::get_if<BorderValue>(&targets[i])) {
      values_.add_gradient(bound->value, step.micro_batch, gradients[i].toTensor());
    }
  }
}

void Engine::emulate(double seconds_per_sample, const Step& step, double share) {
  const auto samples = static_cast<double>(micro_batch(step.micro_batch).size());
  const Modelled& costs = *spec_.units.at(step.unit()).modelled;
  device_.run(options_.slowdown * share * (costs.fixed_s + seconds_per_sample * samples), transfers_.waits());
}

std::vector<c10::IValue> Engine::zero_outputs(const std::vector<OutputBinding>& bindings, const Step& step) {
  const auto samples = static_cast<double>(micro_batch(step.micro_batch).size());
  std::vector<c10::IValue> outputs;
  for (const OutputBinding& binding : bindings) {
    c10::IValue& output = outputs.emplace_back();
    if (const auto* bound = std::get_if<BorderValue>(&binding)) {
      output = values_.zeros(bound->value, step.micro_batch);
    } else if (std::holds_alternative<Loss>(binding)) {
      output = at::scalar_tensor(kLossOfSample * samples, at::kFloat);
    } else if (std::holds_alternative<Count>(binding)) {
      output = kCountOfSample * samples;
    } else if (const auto* yielded = std::get_if<UpdateValue>(&binding)) {
      const GranuleValue& value = updates_.spec(yielded->update).values[yielded->number];
      output = device_zeros(value.shape, value.dtype);
    }
  }
  return outputs;
}

}  // namespace elaswave::exec
