// Sums that know no order: what comes out depends on what was added, and on nothing else. No torch in here.
//
//   an element of a gradient   a double, and what it has no room for as residuals, nearly always none:
//                                add_exactly(sums, gradient of a granule), merge_exactly(sums, sums of another rank)
//                                round_exactly(sums, residuals)  ->  the exact sum, rounded to double, then to float
//   a scalar of the step       ExactTotal, an integer: loss, count, squares of the gradient
//
// An addition in floating point loses a part that is itself a number (Knuth's two-sum finds it). A float is a multiple
// of 2^-149 below 2^128, so sums of up to 2^60 of them, and all such parts, are multiples of 2^-149 below 2^188:
// doubles for parts, ExactTotal for all of them together, have room. A sum with anything non-finite is NaN; a zero is
// +0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace elaswave::exec {

// A multiple of 2^-298 below 2^341 as an integer in two's complement, and how many non-finite values were added.
class ExactTotal {
 public:
  static constexpr std::size_t kDigits = 10;
  static constexpr std::size_t kWords = kDigits + 1;
  static constexpr int kUnit = -298;  // the square of the least float

  ExactTotal() = default;
  explicit ExactTotal(const std::array<std::uint64_t, kWords>& words);
  std::array<std::uint64_t, kWords> words() const;

  // What lies below 2^-298 is cut off; a value of 2^340 or more counts as infinite.
  void add(double value);
  void add(const ExactTotal& other);
  // The squares of all values, exactly.
  void add_squares(std::span<const float> values);
  // Rounded once, ties to even; NaN if anything that was added is not finite.
  double value() const;

  bool operator==(const ExactTotal&) const = default;

 private:
  // Adds, or takes away, number * 2^shift units.
  void add_shifted(std::uint64_t number, unsigned shift, bool negative);

  std::array<std::uint64_t, kDigits> digits_{};  // the least one first
  std::uint64_t infinite_ = 0;
};

// A part of the exact sum of an element, as it travels.
struct Residual {
  std::int64_t element = 0;
  double error = 0.0;
  bool operator==(const Residual&) const = default;
};
using Residuals = std::vector<Residual>;

// Adds values to the sums of the elements from `first` on. `Value` is float, or double for sums of another rank, whose
// residuals are appended to the own ones apart. Both spans are as long.
template <typename Value>
void add_exactly(std::span<double> sums, std::span<const Value> values, std::int64_t first, Residuals& residuals);

// The sums of the elements from `first` on, rounded. Residuals of other elements are passed over.
void round_exactly(std::span<const double> sums, std::int64_t first, const Residuals& residuals,
                   std::span<float> rounded);

}  // namespace elaswave::exec
