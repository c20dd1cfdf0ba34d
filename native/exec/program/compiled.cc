#include "exec/program/compiled.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "kernels/versions.h"

namespace elaswave::exec {
namespace {

using Code = Elementwise::Code;
using Operation = Elementwise::Operation;

template <std::size_t kOperations, std::size_t kOutputs>
struct Known {
  std::size_t arrays;
  std::array<Operation, kOperations> operations;
  std::array<std::size_t, kOutputs> outputs;
};

// AdamW of elaswave_fx/optim/optimizer.py. Arrays: 0 parameter, 1 gradient, 2 and 3 the moments. Numbers: 4 scale of
// the gradient, 5 what decay keeps, 6 step size, 7 root of the second moment's correction; 10, 12, 14, 19 constants.
constexpr Known<13, 3> kAdamW = {4,
                                 {{
                                     {Code::kMul, 8, 1, 4, 0},     // gradient
                                     {Code::kSub, 9, 8, 2, 0},     //
                                     {Code::kFma, 11, 10, 9, 2},   // first moment
                                     {Code::kMul, 13, 3, 12, 0},   //
                                     {Code::kMul, 15, 14, 8, 0},   //
                                     {Code::kFma, 16, 15, 8, 13},  // second moment
                                     {Code::kSqrt, 17, 16, 0, 0},  //
                                     {Code::kDiv, 18, 17, 7, 0},   //
                                     {Code::kAdd, 20, 18, 19, 0},  // denominator
                                     {Code::kMul, 21, 0, 5, 0},    //
                                     {Code::kDiv, 22, 11, 20, 0},  //
                                     {Code::kMul, 23, 22, 6, 0},   //
                                     {Code::kSub, 24, 21, 23, 0},  // parameter
                                 }},
                                 {24, 11, 16}};

// The functions below leave nothing but arithmetic in the loop that they are inlined into, which compilers then do with
// vectors. What is written twice is computed once.
#define ELASWAVE_INLINE inline __attribute__((always_inline))

template <Code kCode>
ELASWAVE_INLINE float result_of(float a, float b, float c) {
  if constexpr (kCode == Code::kAdd) return a + b;
  if constexpr (kCode == Code::kSub) return a - b;
  if constexpr (kCode == Code::kMul) return a * b;
  if constexpr (kCode == Code::kDiv) return a / b;
  if constexpr (kCode == Code::kSqrt) return std::sqrt(a);
  if constexpr (kCode == Code::kFma) return std::fma(a, b, c);
}

template <const auto& kProgram>
constexpr std::size_t maker_of(std::size_t number) {
  std::size_t at = 0;
  while (at < kProgram.operations.size() && kProgram.operations[at].to != number) ++at;
  return at;
}

// What register `kNumber` holds for element i.
template <const auto& kProgram, std::size_t kNumber>
ELASWAVE_INLINE float value_of(const float* const* inputs, const float* numbers, std::int64_t i) {
  constexpr std::size_t kMaker = maker_of<kProgram>(kNumber);
  if constexpr (kMaker < kProgram.operations.size()) {
    constexpr Operation kMade = kProgram.operations[kMaker];
    const float a = value_of<kProgram, kMade.a>(inputs, numbers, i);
    float b = 0.0F, c = 0.0F;
    if constexpr (kMade.code != Code::kSqrt) b = value_of<kProgram, kMade.b>(inputs, numbers, i);
    if constexpr (kMade.code == Code::kFma) c = value_of<kProgram, kMade.c>(inputs, numbers, i);
    return result_of<kMade.code>(a, b, c);
  } else if constexpr (kNumber < kProgram.arrays) {
    return inputs[kNumber][i];
  } else {
    return numbers[kNumber - kProgram.arrays];
  }
}

template <const auto& kProgram, std::size_t... kOutput>
ELASWAVE_INLINE void run_all(const float* const* __restrict inputs, const float* __restrict numbers,
                             float* const* __restrict outputs, std::int64_t first, std::int64_t last,
                             std::index_sequence<kOutput...> /*all*/) {
#pragma GCC ivdep
  for (std::int64_t i = first; i < last; ++i) {
    const float results[] = {value_of<kProgram, kProgram.outputs[kOutput]>(inputs, numbers, i)...};
    ((outputs[kOutput][i] = results[kOutput]), ...);  // after all were computed: an output may be an input
  }
}

}  // namespace

// Not in an anonymous namespace: compilers refuse versions of local functions.
ELASWAVE_VERSIONS
void run_adamw(const float* const* inputs, const float* numbers, float* const* outputs, std::int64_t first,
               std::int64_t last) {
  run_all<kAdamW>(inputs, numbers, outputs, first, last, std::make_index_sequence<kAdamW.outputs.size()>());
}

Elementwise::Compiled compiled_form(std::size_t arrays, std::span<const Operation> operations,
                                    std::span<const std::size_t> outputs) {
  const bool is_adamw = arrays == kAdamW.arrays && std::ranges::equal(operations, kAdamW.operations) &&
                        std::ranges::equal(outputs, kAdamW.outputs);
  return is_adamw ? run_adamw : nullptr;
}

}  // namespace elaswave::exec
