// Units: where their inputs come from and their outputs and gradients go; running one, or waiting as long as it takes.
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include "engine_impl.h"
#include "kernels/keyed.h"

namespace elaswave::exec {
namespace {

// Unit numbers of step keys, apart from those of sample keys.
constexpr std::int64_t kStepKeyBit = 0x80000000;

// What an emulated unit says of each sample.
constexpr double kLossOfSample = 1.0, kCountOfSample = 1.0;

}  // namespace

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
  const std::vector<Binding>& bindings = train ? spec.outputs : spec.eval_outputs;
  std::vector<c10::IValue> outputs;
  if (spec.modelled) {
    emulate(spec.modelled->forward_s, step);
    outputs = stand_ins(bindings, step);
  } else {
    const int program = train ? spec.forward : spec.eval;
    outputs = programs_[static_cast<std::size_t>(program)]->run(std::move(inputs));
  }
  keep_outputs(step, bindings, outputs);
  const SampleSpan& span = micro_batches_[static_cast<std::size_t>(step.micro_batch)];
  consumed_.add(static_cast<std::uint64_t>(unit), static_cast<std::uint64_t>(span.lo),
                static_cast<std::uint64_t>(span.hi));
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
  // Gradients that nobody adds to are zeros.
  if (spec.modelled) return emulate(spec.modelled->backward_s, step);
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

void Engine::Impl::emulate(double seconds_per_sample, const Step& step) {
  const auto samples = static_cast<double>(micro_batches_[static_cast<std::size_t>(step.micro_batch)].size());
  const Modelled& costs = *units_.at(static_cast<int>(step.index)).modelled;
  device_.run(costs.fixed_s + seconds_per_sample * samples, courier.waits());
}

std::vector<c10::IValue> Engine::Impl::stand_ins(const std::vector<Binding>& bindings, const Step& step) {
  const std::int64_t samples = micro_batches_[static_cast<std::size_t>(step.micro_batch)].size();
  std::vector<c10::IValue> outputs;
  for (const Binding& binding : bindings) {
    c10::IValue& output = outputs.emplace_back();
    switch (binding.kind) {
      case Binding::Kind::kValue:
        output = values.zeros(binding.index, step.micro_batch);
        break;
      case Binding::Kind::kLoss:
        output = at::scalar_tensor(kLossOfSample * static_cast<double>(samples), at::kFloat);
        break;
      case Binding::Kind::kCount:
        output = kCountOfSample * static_cast<double>(samples);
        break;
      case Binding::Kind::kFold: {
        const FoldValue& value = folds.spec(binding.index).values[static_cast<std::size_t>(binding.item)];
        output = at::zeros(value.shape, value.dtype);
        break;
      }
      default:
        break;
    }
  }
  return outputs;
}

}  // namespace elaswave::exec
