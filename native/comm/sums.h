// Sums of arrays in a fixed order. Private to comm/.
#pragma once

#include <cstddef>
#include <span>

namespace elaswave::comm {

// output[i] = inputs[0][i] + inputs[1][i] + ..., in that order, for float, double and std::int64_t. `output` may be one
// of the inputs.
template <typename T>
void sum_in_order(std::span<const T* const> inputs, T* output, std::size_t count);

}  // namespace elaswave::comm
