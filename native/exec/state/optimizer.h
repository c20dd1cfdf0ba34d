// The optimizer: from a state and a gradient to the next state. Private to exec/; same thread as the engine.
//
//   program(master, gradient, state..., numbers...) -> master', state'...
//
// One pass over memory, the digest included, if the program is elementwise as elementwise.h knows it; else operator by
// operator.
#pragma once

#include <optional>
#include <vector>

#include "exec/program/elementwise.h"
#include "exec/program/unit_program.h"
#include "exec/state/shard_state.h"

namespace elaswave::exec {

class Optimizer {
 public:
  explicit Optimizer(UnitProgram& program);

  // `numbers`: 0-dim fp32. Tensors of the state that somebody else still reads are replaced, others written in place.
  // Throws ExecError, and the state is as it was, if an operator fails.
  void update(const BoxSpec& box, ShardState& state, const at::Tensor& gradient,
              const std::vector<at::Tensor>& numbers);

 private:
  void update_in_pieces(const BoxSpec& box, ShardState& state, const at::Tensor& gradient,
                        const std::vector<at::Tensor>& numbers);
  void update_by_operators(const BoxSpec& box, ShardState& state, const at::Tensor& gradient,
                           const std::vector<at::Tensor>& numbers);

  UnitProgram& program_;
  std::optional<Elementwise> pieces_;
};

}  // namespace elaswave::exec
