// Views that need neither a kernel nor the dispatcher: another shape of the same memory. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <span>
#include <vector>

#include "exec/program/program.h"

namespace elaswave::exec {

enum class View { kNone, kReshape, kTranspose, kSplit };

// A number of an instruction: that of a slot, or its own.
struct Size {
  int slot = -1;
  std::int64_t value = 0;
};

// Which of them an instruction is, and its numbers: the shape; the two axes; the length of a piece and the axis.
View view_of(const Instruction& instruction, std::vector<Size>& sizes);

// Appends the view, or a view per piece, to `results`. False, and nothing appended, where it is not as simple as that:
// a shape that the strides do not allow, or numbers that the operator has to refuse.
bool make_view(View view, const at::Tensor& base, std::span<const std::int64_t> sizes,
               std::vector<c10::IValue>& results);

}  // namespace elaswave::exec
