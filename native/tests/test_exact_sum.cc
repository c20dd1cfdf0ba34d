// Exact sums against a reference that counts, bit by bit, how often each power of two was added.
#include "exec/exact/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"

using namespace elaswave::exec;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Counts of `bits` powers of two, the least of which is 2^lowest: all that floats, or their squares, add up to.
class Reference {
 public:
  explicit Reference(int lowest = -150, std::size_t bits = 320) : lowest_(lowest), counts_(bits) {}
  void add(double value) {
    finite_ = finite_ && std::isfinite(value);
    if (!std::isfinite(value)) return;
    int exponent = 0;
    auto rest = static_cast<std::uint64_t>(std::ldexp(std::frexp(std::abs(value), &exponent), 53));
    for (; rest != 0; rest &= rest - 1) {
      counts_[static_cast<std::size_t>(exponent - 53 + std::countr_zero(rest) - lowest_)] += value < 0.0 ? -1 : 1;
    }
  }
  double value() const {
    if (!finite_) return kNaN;
    std::vector<int> bits(counts_.size());
    for (const int sign : {1, -1}) {
      std::int64_t carry = 0;
      for (std::size_t i = 0; i < counts_.size(); ++i) {
        const std::int64_t sum = sign * counts_[i] + carry;
        bits[i] = static_cast<int>(sum & 1);
        carry = (sum - bits[i]) / 2;
      }
      if (carry == 0) return sign * rounded(bits);
    }
    return kNaN;
  }

 private:
  // To 53 bits, ties to even.
  double rounded(const std::vector<int>& bits) const {
    int top = static_cast<int>(bits.size()) - 1;
    while (top >= 0 && bits[static_cast<std::size_t>(top)] == 0) --top;
    double value = 0.0;
    for (int i = top; i >= 0 && i > top - 53; --i) {
      value += std::ldexp(bits[static_cast<std::size_t>(i)], i + lowest_);
    }
    const int half = top - 53;
    if (half < 0 || bits[static_cast<std::size_t>(half)] == 0) return value;
    const bool more = std::any_of(bits.begin(), bits.begin() + half, [](int bit) { return bit != 0; });
    const bool odd = bits[static_cast<std::size_t>(half + 1)] != 0;
    return more || odd ? value + std::ldexp(1.0, half + 1 + lowest_) : value;
  }

  int lowest_;
  std::vector<std::int64_t> counts_;
  bool finite_ = true;
};

std::uint32_t bits_of(float value) { return std::isnan(value) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(value); }

// Mantissas at random with exponents from -140 to 110; now and then a zero of either sign, or what was added before
// with the other sign, so that nearly all of a sum vanishes.
class Adversary {
 public:
  explicit Adversary(std::uint64_t seed) : random_(seed) {}
  float next(std::vector<float>& before) {
    const std::uint64_t kind = random_() % 16;
    float value = std::ldexp(1.0f + static_cast<float>(random_() % (1u << 23)) * 0x1p-23f,
                             static_cast<int>(random_() % 251) - 140);
    if (kind < 5 && !before.empty()) {
      value = -before[random_() % before.size()];
    } else if (kind == 5) {
      value = 0.0f;
    }
    if (kind % 2 == 0) value = -value;
    before.push_back(value);
    return value;
  }
  std::uint64_t number(std::uint64_t below) { return random_() % below; }

 private:
  std::mt19937_64 random_;
};

struct Sums {
  explicit Sums(std::size_t elements) : doubles(elements) {}
  std::vector<double> doubles;
  Residuals residuals;
  void add(const std::vector<float>& values) { add_exactly<float>(doubles, values, 0, residuals); }
  void merge(const Sums& other) {
    add_exactly<double>(doubles, other.doubles, 0, residuals);
    residuals.insert(residuals.end(), other.residuals.begin(), other.residuals.end());
  }
  std::vector<float> rounded() const {
    std::vector<float> values(doubles.size());
    round_exactly(doubles, 0, residuals, values);
    return values;
  }
};

}  // namespace

TEST(a_total_is_the_sum_rounded_once) {
  Adversary adversary(1);
  for (int round = 0; round < 2000; ++round) {
    ExactTotal total;
    Reference reference;
    std::vector<float> before;
    for (std::uint64_t left = 1 + adversary.number(30); left > 0; --left) {
      const double value = adversary.next(before);
      total.add(value);
      reference.add(value);
    }
    CHECK_EQUAL(total.value(), reference.value());
    CHECK(ExactTotal(total.words()) == total);
  }
}

TEST(totals_of_parts_add_up_in_any_order) {
  Adversary adversary(2);
  std::vector<float> values;
  for (int i = 0; i < 1000; ++i) adversary.next(values);
  ExactTotal whole, other;
  for (const float value : values) whole.add(value);
  std::vector<ExactTotal> parts(7);
  for (const float value : values) parts[adversary.number(parts.size())].add(value);
  for (const ExactTotal& part : parts) other.add(part);
  CHECK(other == whole);
}

TEST(a_total_rounds_to_even_and_sees_what_lies_far_below) {
  const auto sum = [](std::initializer_list<double> values) {
    ExactTotal total;
    for (const double value : values) total.add(value);
    return total.value();
  };
  CHECK_EQUAL(sum({1.0, 0x1p-53}), 1.0);
  CHECK_EQUAL(sum({1.0, 0x1p-52, 0x1p-53}), 1.0 + 0x1p-51);
  CHECK_EQUAL(sum({1.0, 0x1p-53, 0x1p-149}), 1.0 + 0x1p-52);
  CHECK_EQUAL(sum({-1.0, -0x1p-53, -0x1p-149}), -1.0 - 0x1p-52);
  CHECK_EQUAL(sum({1e10, -1e10, 0x1p-149}), 0x1p-149);
  CHECK_EQUAL(std::signbit(sum({-0.0, -0.0})), false);
  CHECK_EQUAL(sum({0x1p-298, 0x1p-299}), 0x1p-298);
  CHECK(std::isnan(sum({1.0, kInfinity})) && std::isnan(sum({kNaN})) && std::isnan(sum({0x1p340})));
  CHECK_EQUAL(sum({0x1p339, -0x1p339, 3.0}), 3.0);
}

TEST(squares_are_exact) {
  Adversary adversary(3);
  std::vector<float> values;
  for (std::size_t i = 0; i < 300000; ++i) adversary.next(values);
  values.push_back(std::numeric_limits<float>::denorm_min());
  values.push_back(std::numeric_limits<float>::max());
  ExactTotal total, parts;
  total.add_squares(values);
  const std::span<const float> all(values);
  parts.add_squares(all.subspan(70000));
  parts.add_squares(all.first(70000));
  CHECK(total == parts);
  Reference reference(-300, 700);
  for (const float value : values) reference.add(static_cast<double>(value) * static_cast<double>(value));
  CHECK_EQUAL(total.value(), reference.value());
  values[5] = std::numeric_limits<float>::infinity();
  total.add_squares(values);
  CHECK(std::isnan(total.value()));
}

// A million elements, of 2 to 12 granules each, which come to 1 to 4 ranks in any order, whose sums are merged in any.
TEST(elements_are_exact_over_any_partition) {
  constexpr std::size_t kElements = 8192;
  for (std::uint64_t seed = 0; seed < 128; ++seed) {
    Adversary adversary(100 + seed);
    std::vector<std::vector<float>> granules(2 + adversary.number(11), std::vector<float>(kElements));
    std::vector<Reference> references(kElements);
    for (std::size_t element = 0; element < kElements; ++element) {
      std::vector<float> before;
      for (std::vector<float>& granule : granules) references[element].add(granule[element] = adversary.next(before));
    }
    std::vector<float> expected(kElements);
    for (std::size_t i = 0; i < kElements; ++i) expected[i] = static_cast<float>(references[i].value() + 0.0);
    for (int partition = 0; partition < 2; ++partition) {
      std::vector<Sums> ranks(1 + adversary.number(4), Sums(kElements));
      std::vector<std::size_t> order(granules.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[adversary.number(i)]);
      for (const std::size_t granule : order) ranks[adversary.number(ranks.size())].add(granules[granule]);
      Sums total(kElements);
      for (const Sums& rank : ranks) total.merge(rank);
      const std::vector<float> rounded = total.rounded();
      for (std::size_t i = 0; i < kElements; ++i) CHECK_EQUAL(bits_of(rounded[i]), bits_of(expected[i]));
      CHECK(granules.size() < 4 || !total.residuals.empty());
    }
  }
}

TEST(what_is_not_finite_is_nan_and_a_zero_has_no_sign) {
  Sums sums(5);
  sums.add({1.0f, std::numeric_limits<float>::infinity(), -0.0f, std::numeric_limits<float>::quiet_NaN(), 1e30f});
  sums.add({1.0f, -std::numeric_limits<float>::infinity(), -0.0f, 1.0f, 1e-30f});
  const std::vector<float> rounded = sums.rounded();
  CHECK_EQUAL(rounded[0], 2.0f);
  CHECK(std::isnan(rounded[1]) && std::isnan(rounded[3]));
  CHECK_EQUAL(std::bit_cast<std::uint32_t>(rounded[2]), 0u);
  CHECK_EQUAL(sums.residuals.size(), std::size_t{1});
  CHECK(sums.residuals.front() == (Residual{4, 1e-30f}));
  sums.add({1.0f, 1.0f, 0.0f, 1.0f, std::numeric_limits<float>::infinity()});
  CHECK(std::isnan(sums.rounded()[4]));
}

TEST(elements_are_numbered_from_the_first_on) {
  std::vector<double> sums = {1e30, 1.0};
  Residuals residuals;
  const std::vector<float> values = {1e-30f, 2.0f};
  add_exactly<float>(sums, values, 100, residuals);
  CHECK_EQUAL(residuals.size(), std::size_t{1});
  CHECK_EQUAL(residuals.front().element, 100);
  residuals.push_back({102, 1e38});  // of another box
  sums = {-1e-30f, 3.0};
  std::vector<float> rounded(2);
  round_exactly(sums, 100, residuals, rounded);
  CHECK_EQUAL(rounded[0], 0.0f);
  CHECK_EQUAL(rounded[1], 3.0f);
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }
