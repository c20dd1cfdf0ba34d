// The optimizer: from a base and a gradient to the next base. Private to exec/; same thread as the engine.
//
//   program(master, gradient, state..., numbers...) -> master', state'...
//
// One pass over memory, the digest included, if the program is elementwise as elementwise.h knows it; else operator by
// operator.
#pragma once

#include <optional>
#include <vector>

#include "base.h"
#include "elementwise.h"
#include "unit_program.h"

namespace elaswave::exec {

class Optimizer {
 public:
  explicit Optimizer(UnitProgram& program);

  // `numbers`: 0-dim fp32. Tensors of the base that somebody else still reads are replaced, others written in place.
  // Throws ExecError, and the base is as it was, if an operator fails.
  void update(const BoxSpec& box, Base& base, const at::Tensor& gradient, const std::vector<at::Tensor>& numbers);

 private:
  void update_in_pieces(const BoxSpec& box, Base& base, const at::Tensor& gradient,
                        const std::vector<at::Tensor>& numbers);
  void update_by_operators(const BoxSpec& box, Base& base, const at::Tensor& gradient,
                           const std::vector<at::Tensor>& numbers);

  UnitProgram& program_;
  std::optional<Elementwise> pieces_;
};

}  // namespace elaswave::exec
