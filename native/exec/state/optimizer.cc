#include "exec/state/optimizer.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

namespace elaswave::exec {
namespace {

// Elements that are digested while they lie in the first cache.
constexpr std::int64_t kHot = 1024;

// Where the next value of a tensor goes: in its place, unless somebody else holds it or a view of it.
at::Tensor place_after(const at::Tensor& tensor) {
  const bool own = tensor.use_count() == 1 && tensor.storage().use_count() == 1;
  return own ? tensor : at::empty_like(tensor);
}

}  // namespace

Optimizer::Optimizer(UnitProgram& program)
    : program_(program), pieces_(Elementwise::of(program.spec(), program.num_outputs() + 1)) {}

void Optimizer::update(const BoxSpec& box, ShardState& state, const at::Tensor& gradient,
                       const std::vector<at::Tensor>& numbers) {
  if (pieces_) {
    update_in_pieces(box, state, gradient, numbers);
  } else {
    update_by_operators(box, state, gradient, numbers);
  }
}

void Optimizer::update_in_pieces(const BoxSpec& box, ShardState& state, const at::Tensor& gradient,
                                 const std::vector<at::Tensor>& numbers) {
  std::vector<at::Tensor> next = {place_after(state.master)};
  for (const at::Tensor& each : state.optimizer) next.push_back(place_after(each));
  std::vector<const float*> inputs = {state.master.const_data_ptr<float>(), gradient.const_data_ptr<float>()};
  for (const at::Tensor& each : state.optimizer) inputs.push_back(each.const_data_ptr<float>());
  std::vector<float*> outputs;
  for (const at::Tensor& each : next) outputs.push_back(each.mutable_data_ptr<float>());
  std::vector<float> values;
  for (const at::Tensor& number : numbers) values.push_back(*number.const_data_ptr<float>());
  pieces_->set_numbers(values);
  state.digest = Digest();
  for (std::int64_t at = 0; at < box.numel(); at += kHot) {
    const std::int64_t count = std::min(kHot, box.numel() - at);
    pieces_->run(inputs, outputs, at, at + count);
    for (std::size_t i = 0; i < outputs.size(); ++i) state.digest += digest_piece(box, i, outputs[i], at, count);
  }
  state.master = next[0];
  std::copy(next.begin() + 1, next.end(), state.optimizer.begin());
}

void Optimizer::update_by_operators(const BoxSpec& box, ShardState& state, const at::Tensor& gradient,
                                    const std::vector<at::Tensor>& numbers) {
  std::vector<c10::IValue> inputs = {state.master, gradient};
  inputs.insert(inputs.end(), state.optimizer.begin(), state.optimizer.end());
  inputs.insert(inputs.end(), numbers.begin(), numbers.end());
  std::vector<at::Tensor> next;
  for (const c10::IValue& output : program_.run(std::move(inputs))) {
    at::Tensor tensor = output.toTensor().contiguous();
    // What is kept must not lie in memory that is written again in the next step, nor in what peers are being sent.
    if (tensor.is_alias_of(gradient) || tensor.is_alias_of(state.master)) tensor = tensor.clone();
    next.push_back(std::move(tensor));
  }
  state = make_state(box, std::move(next));
}

}  // namespace elaswave::exec
