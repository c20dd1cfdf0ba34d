#include "comm/sums.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/versions.h"

namespace elaswave::comm {

template <typename T>
void add_to(T* sum, const T* more, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += more[i];
}

// Not in an anonymous namespace: compilers refuse versions of local functions.
ELASWAVE_VERSIONS
void add_to(float* sum, const float* more, std::size_t count) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) sum[i] += more[i];
}

template <typename T>
void sum_in_order(std::span<const T* const> inputs, T* output, std::size_t count) {
  constexpr std::size_t kBlock = 1024;
  std::array<T, kBlock> block;
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t n = std::min(kBlock, count - at);
    std::copy_n(inputs[0] + at, n, block.data());
    for (const T* input : inputs.subspan(1)) {
      add_to(block.data(), input + at, n);
    }
    std::copy_n(block.data(), n, output + at);
  }
}

template void sum_in_order(std::span<const float* const>, float*, std::size_t);
template void sum_in_order(std::span<const double* const>, double*, std::size_t);
template void sum_in_order(std::span<const std::int64_t* const>, std::int64_t*, std::size_t);

}  // namespace elaswave::comm
