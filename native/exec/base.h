// A box's base: its slice of the fp32 master and of the optimizer's state. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "declarations.h"
#include "digest.h"

namespace elaswave::exec {

struct Base {
  at::Tensor master;              // fp32 [numel]; undefined: not here
  std::vector<at::Tensor> state;  // the same shape
  Digest digest;
  bool there() const { return master.defined(); }
};

Digest digest_of(const BoxSpec& box, const Base& base);
// Of `count` elements of one of its tensors (0: the master), element `at` of the box first. Pieces add up to the whole.
Digest digest_piece(const BoxSpec& box, std::size_t tensor, const float* data, std::int64_t at, std::int64_t count);

// Takes tensors of the box's shape, none of them shared with anybody, as the base: master, state... Throws ExecError.
void replace(const BoxSpec& box, Base& base, std::vector<at::Tensor> tensors);

}  // namespace elaswave::exec
