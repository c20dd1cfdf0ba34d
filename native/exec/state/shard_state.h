// A box's state: its slice of the fp32 master and of the optimizer's state. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exec/exact/digest.h"
#include "exec/spec/declarations.h"

namespace elaswave::exec {

struct ShardState {
  at::Tensor master;                  // fp32 [numel]; undefined: not here
  std::vector<at::Tensor> optimizer;  // its state, the same shape
  Digest digest;                      // of the bytes that were last written
  bool here() const { return master.defined(); }
};

Digest digest_of(const BoxSpec& box, const ShardState& state);
// Of `count` elements of one of its tensors (0: the master), element `at` of the box first. Pieces add up to the whole.
Digest digest_piece(const BoxSpec& box, std::size_t tensor, const float* data, std::int64_t at, std::int64_t count);

// The state made of tensors of the box's shape, none of them shared with anybody: master, state... Throws ExecError.
ShardState make_state(const BoxSpec& box, std::vector<at::Tensor> tensors);

}  // namespace elaswave::exec
