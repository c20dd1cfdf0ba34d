// The `elaswave` operators as C++ functions, for callers inside this library; Python reaches them as
// torch.ops.elaswave.
//
// Keys are int64 [samples] on the CPU. A tensor with a sample axis has size samples * period there, sample index
// outermost; axis -1: no sample axis and one key. See layout.h for the numbering of elements and philox.h for words.
#pragma once

#include <ATen/core/Tensor.h>

namespace elaswave::kernels {

// int64 [count]: the keys of samples first .. first + count - 1 in `unit` (only the low 32 bits of `unit` count).
// Throws c10::Error if count is negative.
at::Tensor sample_keys(std::int64_t seed, std::int64_t first, std::int64_t count, std::int64_t unit);

}  // namespace elaswave::kernels
