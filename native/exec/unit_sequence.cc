#include "unit_sequence.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones_like.h>

#include <chrono>

#include "below_autograd_guard.h"

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

double run_backward(const UnitSequence::Unit& unit, ProgramValues inputs, ProgramValues& gradients) {
  for (const std::size_t place : unit.tangents) inputs.push_back(gradients.at(place));
  const auto begin = Clock::now();
  const ProgramValues outputs = unit.backward->run(std::move(inputs));
  const double seconds = seconds_since(begin);
  for (const auto& [position, place] : unit.gradients) {
    c10::IValue& sum = gradients.at(place);
    sum = sum.isNone() ? outputs.at(position) : at::add(sum.toTensor(), outputs.at(position).toTensor());
  }
  return seconds;
}

}  // namespace

UnitSequence::Result UnitSequence::step(ProgramValues values, std::size_t gradients, std::size_t loss,
                                        std::size_t loss_gradient) {
  const BelowAutogradGuard guard;
  Result result{std::move(values), ProgramValues(gradients), {}, std::vector<double>(units_.size())};
  std::vector<ProgramValues> saved;
  for (const Unit& unit : units_) result.forward_s.push_back(run_forward(unit, result.values, saved));
  if (loss_gradient < gradients) result.gradients[loss_gradient] = at::ones_like(result.values.at(loss).toTensor());
  for (std::size_t i = units_.size(); i-- > 0; saved.pop_back()) {
    if (units_[i].backward) {
      result.backward_s[i] = run_backward(units_[i], std::move(saved.back()), result.gradients);
    }
  }
  return result;
}

}  // namespace elaswave::exec
