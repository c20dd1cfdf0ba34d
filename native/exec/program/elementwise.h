// A program of elementwise fp32 operators as one pass over memory: a piece of every array goes through all instructions
// while it lies in the first cache; some programs are compiled (compiled.h). No torch in here.
//
//   aten::mul(slot 0, slot 2) -> slot 3            for each piece of 128 elements:
//   aten::lerp(slot 1, slot 3, 0.1) -> slot 4        r3 = r0 * r2;  t = r3 - r1;  r4 = fma(0.1, t, r1)
//
// What becomes of an element does not depend on where it lies, nor on the machine: IEEE operations alone, in an order
// that is written down here, the one in which torch's kernels for AVX2 take them (its square root rounds worse).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "exec/program/program.h"

namespace elaswave::exec {

// One thread at a time may run it.
class Elementwise {
 public:
  // Inputs are `arrays` arrays, then numbers; outputs are arrays. Nothing if the program has an operator, or a use of
  // one, that is not known here.
  static std::optional<Elementwise> of(const ProgramSpec& spec, std::size_t arrays);

  void set_numbers(std::span<const float> numbers);
  // Elements [first, last) of the outputs from those of the inputs. An output may be an input.
  void run(std::span<const float* const> inputs, std::span<float* const> outputs, std::int64_t first,
           std::int64_t last);

  enum class Code { kAdd, kSub, kMul, kDiv, kSqrt, kFma };
  // registers[to] = code(registers[a], registers[b], registers[c])
  struct Operation {
    Code code;
    std::size_t to, a, b, c;
    bool operator==(const Operation&) const = default;
  };

  // A program in machine code: elements [first, last) of the outputs from those of the inputs and the numbers that are
  // in the other registers.
  using Compiled = void (*)(const float* const* inputs, const float* numbers, float* const* outputs, std::int64_t first,
                            std::int64_t last);
  bool compiled() const { return compiled_ != nullptr; }

 private:
  class Builder;
  // Short: memory is read ahead while a piece is computed.
  static constexpr std::int64_t kPiece = 128;
  struct alignas(64) Register {
    float lanes[kPiece];
  };

  std::size_t arrays_ = 0;     // the first registers are pieces of the inputs themselves
  std::vector<Register> own_;  // then numbers, constants and results
  std::vector<Operation> operations_;
  std::vector<std::size_t> outputs_;
  Compiled compiled_ = nullptr;
  std::vector<float> numbers_;  // what the own registers hold, for it
};

}  // namespace elaswave::exec
