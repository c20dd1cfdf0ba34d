#include "exec/program/unit_sequence.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones_like.h>

#include <chrono>

#include "exec/program/below_autograd_guard.h"

namespace elaswave::exec {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double run_forward(const UnitSequence::Unit& unit, ProgramValues& values, std::vector<ProgramValues>& saved) {
  ProgramValues inputs = unit.fixed;
  for (const auto& [position, place] : unit.reads) inputs.at(position) = values.at(place);
  const auto begin = Clock::now();
  ProgramValues outputs = unit.forward->run(std::move(inputs));
  const double seconds = seconds_since(begin);
  for (std::size_t i = 0; i < unit.writes.size(); ++i) values.at(unit.writes[i]) = outputs.at(i);
  saved.emplace_back(outputs.begin() + static_cast<std::ptrdiff_t>(unit.writes.size()), outputs.end());
  return seconds;
}

void add_gradients(const UnitSequence::Unit& unit, const ProgramValues& outputs, ProgramValues& gradients) {
  for (const auto& [position, place] : unit.gradients) {
    const c10::IValue& gradient = outputs.at(position);
    if (gradient.isNone()) continue;  // of the other half
    c10::IValue& sum = gradients.at(place);
    sum = sum.isNone() ? gradient : at::add(sum.toTensor(), gradient.toTensor());
  }
}

// What the second half of a unit starts from.
ProgramValues run_backward(const UnitSequence::Unit& unit, ProgramValues inputs, ProgramValues& gradients,
                           double& seconds) {
  for (const std::size_t place : unit.tangents) inputs.push_back(gradients.at(place));
  const auto begin = Clock::now();
  ProgramValues outputs = unit.backward->run(std::move(inputs));
  seconds = seconds_since(begin);
  add_gradients(unit, outputs, gradients);
  outputs.erase(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(unit.results));
  return outputs;
}

double run_weights(const UnitSequence::Unit& unit, ProgramValues held, ProgramValues& gradients) {
  const auto begin = Clock::now();
  const ProgramValues outputs = unit.weights->run(std::move(held));
  const double seconds = seconds_since(begin);
  add_gradients(unit, outputs, gradients);
  return seconds;
}

}  // namespace

UnitSequence::Result UnitSequence::step(ProgramValues values, std::size_t gradients, std::size_t loss,
                                        std::size_t loss_gradient) {
  const BelowAutogradGuard guard;
  const std::vector<double> zeros(units_.size());
  Result result{std::move(values), ProgramValues(gradients), {}, zeros, zeros};
  std::vector<ProgramValues> saved;
  for (const Unit& unit : units_) result.forward_s.push_back(run_forward(unit, result.values, saved));
  if (loss_gradient < gradients) result.gradients[loss_gradient] = at::ones_like(result.values.at(loss).toTensor());
  for (std::size_t i = units_.size(); i-- > 0; saved.pop_back()) {
    const Unit& unit = units_[i];
    if (!unit.backward) continue;
    ProgramValues held = run_backward(unit, std::move(saved.back()), result.gradients, result.backward_s[i]);
    if (!unit.weights) continue;
    result.weights_s[i] = run_weights(unit, std::move(held), result.gradients);
    result.backward_s[i] += result.weights_s[i];
  }
  return result;
}

}  // namespace elaswave::exec
