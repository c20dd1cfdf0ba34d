#include "exec/exact/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>

#include "kernels/versions.h"

namespace elaswave::exec {
namespace {

constexpr unsigned kWordBits = 64;
constexpr unsigned kExponents = 256;                          // of a float; the last one means that it is not finite
constexpr std::size_t kSquaresPerBin = std::size_t{1} << 16;  // of 48 bits, which a word holds
constexpr std::size_t kTables = 4;  // neighbours often have equal exponents, and would wait for each other
constexpr std::size_t kBlock = 256;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The part of a + b that `sum`, its rounded value, lacks.
double lost_part(double a, double b, double sum) {
  const double b_there = sum - a;
  const double a_there = sum - b_there;
  return (a - a_there) + (b - b_there);
}

// Adds values to sums, which are kept in `before`. Returns 0 if nothing was lost: then each sum less either summand is
// the other one, and the difference with the larger summand is exact.
template <typename Value>
[[gnu::always_inline]] inline std::uint64_t add_values(double* sum, const Value* value, double* before,
                                                       std::size_t count) {
  std::uint64_t any = 0;
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    const double a = sum[i], b = static_cast<double>(value[i]);
    const double total = a + b;
    before[i] = a;
    sum[i] = total;
    any |= static_cast<std::uint64_t>(total - a != b) | static_cast<std::uint64_t>(total - b != a);
  }
  return any;
}

}  // namespace

// Not in an anonymous namespace: compilers refuse versions of local functions.
ELASWAVE_VERSIONS
std::uint64_t add_block(double* sum, const float* value, double* before, std::size_t count) {
  return add_values(sum, value, before, count);
}

ELASWAVE_VERSIONS
std::uint64_t add_block(double* sum, const double* value, double* before, std::size_t count) {
  return add_values(sum, value, before, count);
}

ExactTotal::ExactTotal(const std::array<std::uint64_t, kWords>& words) : infinite_(words[kDigits]) {
  std::copy_n(words.begin(), kDigits, digits_.begin());
}

std::array<std::uint64_t, ExactTotal::kWords> ExactTotal::words() const {
  std::array<std::uint64_t, kWords> words{};
  std::copy(digits_.begin(), digits_.end(), words.begin());
  words[kDigits] = infinite_;
  return words;
}

void ExactTotal::add_shifted(std::uint64_t number, unsigned shift, bool negative) {
  const unsigned word = shift / kWordBits, bits = shift % kWordBits;
  const std::array<std::uint64_t, 2> pieces = {number << bits, bits == 0 ? 0 : number >> (kWordBits - bits)};
  std::uint64_t carry = 0;
  for (std::size_t i = word; i < kDigits && (i < word + 2 || carry != 0); ++i) {
    const std::uint64_t piece = i < word + 2 ? pieces[i - word] : 0;
    const std::uint64_t before = digits_[i];
    if (negative) {
      digits_[i] = before - piece - carry;
      carry = before < piece || (carry != 0 && before == piece) ? 1 : 0;
    } else {
      digits_[i] = before + piece + carry;
      carry = digits_[i] < before || (carry != 0 && digits_[i] == before) ? 1 : 0;
    }
  }
}

void ExactTotal::add(double value) {
  if (value == 0.0) return;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);  // in [0.5, 1)
  constexpr int kMantissa = std::numeric_limits<double>::digits;
  if (!std::isfinite(value) || exponent > static_cast<int>(kWordBits * kDigits) + kUnit - 2) {
    ++infinite_;
    return;
  }
  auto number = static_cast<std::uint64_t>(std::ldexp(std::abs(mantissa), kMantissa));
  int shift = exponent - kMantissa - kUnit;
  if (shift < 0) {
    number = shift > -kMantissa ? number >> -shift : 0;
    shift = 0;
  }
  add_shifted(number, static_cast<unsigned>(shift), value < 0.0);
}

void ExactTotal::add(const ExactTotal& other) {
  for (std::size_t i = 0; i < kDigits; ++i) {
    add_shifted(other.digits_[i], static_cast<unsigned>(i) * kWordBits, false);
  }
  infinite_ += other.infinite_;
}

// A float is m * 2^(e - 150) with m below 2^24 and e its exponent field, or 1 if that is 0.
void ExactTotal::add_squares(std::span<const float> values) {
  while (!values.empty()) {
    const std::size_t count = std::min(values.size(), kTables * kSquaresPerBin);
    std::array<std::array<std::uint64_t, kExponents>, kTables> bins{};
    for (std::size_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(values[i]);
      const std::uint32_t field = (bits >> 23) & 0xff;
      const std::uint64_t number = (bits & 0x7fffff) | (field != 0 ? 0x800000u : 0u);
      bins[i % kTables][field] += number * number;
    }
    for (std::size_t table = 0; table < kTables; ++table) {
      for (unsigned field = 0; field + 1 < kExponents; ++field) {
        if (bins[table][field] != 0) add_shifted(bins[table][field], 2 * (std::max(field, 1u) - 1), false);
      }
      if (bins[table][kExponents - 1] != 0) ++infinite_;  // an infinity has the implicit bit, so it is not 0
    }
    values = values.subspan(count);
  }
}

double ExactTotal::value() const {
  if (infinite_ != 0) return kNaN;
  const bool negative = digits_.back() >> (kWordBits - 1) != 0;
  ExactTotal magnitude;
  if (negative) {
    for (std::size_t i = 0; i < kDigits; ++i) {
      magnitude.add_shifted(digits_[i], static_cast<unsigned>(i) * kWordBits, true);
    }
  } else {
    magnitude = *this;
  }
  const auto& digits = magnitude.digits_;
  std::size_t top = kDigits;
  while (top > 0 && digits[top - 1] == 0) --top;
  if (top == 0) return 0.0;
  // The highest 64 bits, the last of which stands for all that are lower as well: the conversion rounds to even.
  const unsigned unused = static_cast<unsigned>(std::countl_zero(digits[top - 1]));
  std::uint64_t head = digits[top - 1] << unused;
  bool rest = false;
  if (top > 1) {
    if (unused != 0) {
      head |= digits[top - 2] >> (kWordBits - unused);
      rest = digits[top - 2] << unused != 0;
    } else {
      rest = digits[top - 2] != 0;
    }
    rest = rest || std::any_of(digits.begin(), digits.begin() + static_cast<std::ptrdiff_t>(top - 2),
                               [](std::uint64_t digit) { return digit != 0; });
  }
  const int exponent = static_cast<int>(kWordBits * (top - 1)) - static_cast<int>(unused) + kUnit;
  const double value = std::ldexp(static_cast<double>(head | (rest ? 1 : 0)), exponent);
  return negative ? -value : value;
}

// Blocks in which nothing is lost, nearly all of them, are one pass that the compiler vectorizes.
template <typename Value>
void add_exactly(std::span<double> sums, std::span<const Value> values, std::int64_t first, Residuals& residuals) {
  std::array<double, kBlock> before;
  for (std::size_t at = 0; at < sums.size(); at += kBlock) {
    const std::size_t count = std::min(kBlock, sums.size() - at);
    double* const sum = sums.data() + at;
    const Value* const value = values.data() + at;
    if (add_block(sum, value, before.data(), count) == 0) continue;
    for (std::size_t i = 0; i < count; ++i) {
      const double lost = lost_part(before[i], static_cast<double>(value[i]), sum[i]);
      if (!std::isfinite(sum[i])) {
        sum[i] = kNaN;
      } else if (lost != 0.0) {
        residuals.push_back({first + static_cast<std::int64_t>(at + i), lost});
      }
    }
  }
}

template void add_exactly(std::span<double>, std::span<const float>, std::int64_t, Residuals&);
template void add_exactly(std::span<double>, std::span<const double>, std::int64_t, Residuals&);

void round_exactly(std::span<const double> sums, std::int64_t first, const Residuals& residuals,
                   std::span<float> rounded) {
  for (std::size_t i = 0; i < sums.size(); ++i) {
    rounded[i] = static_cast<float>(std::isfinite(sums[i]) ? sums[i] + 0.0 : kNaN);
  }
  std::map<std::size_t, ExactTotal> totals;
  for (const Residual& residual : residuals) {
    const std::int64_t element = residual.element - first;
    if (element < 0 || element >= static_cast<std::int64_t>(sums.size())) continue;
    totals[static_cast<std::size_t>(element)].add(residual.error);
  }
  for (auto& [element, total] : totals) {
    total.add(sums[element]);
    rounded[element] = static_cast<float>(total.value());
  }
}

}  // namespace elaswave::exec
