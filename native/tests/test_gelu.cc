// GELU: its values and its slope against the formula in double precision; far from zero; the same bits at every place.
#include "kernels/gelu.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "check.h"

using namespace elaswave::kernels;

namespace {

const double kRoot = std::sqrt(2.0 / std::numbers::pi);

double sigmoid(double x) {
  const double u = kRoot * (x + 0.044715 * x * x * x);
  return 1.0 / (1.0 + std::exp(-2.0 * u));
}

double slope(double x) {
  const double s = sigmoid(x);
  return s + x * s * (1.0 - s) * 2.0 * kRoot * (1.0 + 3.0 * 0.044715 * x * x);
}

std::vector<float> forward(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  gelu_tanh(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  return y;
}

std::vector<float> backward(const std::vector<float>& dy, const std::vector<float>& x) {
  std::vector<float> dx(x.size());
  gelu_tanh_backward(dy.data(), x.data(), dx.data(), static_cast<std::int64_t>(x.size()));
  return dx;
}

std::vector<float> line() {
  std::vector<float> x;
  for (int i = -9001; i <= 9001; ++i) x.push_back(static_cast<float>(i) * 1e-3F);
  return x;
}

bool near(double got, double wanted, double relative, double absolute) {
  return std::abs(got - wanted) <= relative * std::abs(wanted) + absolute;
}

}  // namespace

TEST(values_and_slopes) {
  const std::vector<float> x = line(), dy(x.size(), 3.0F);
  const std::vector<float> y = forward(x), dx = backward(dy, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    CHECK_EQUAL(near(y[i], x[i] * sigmoid(x[i]), 1e-5, 1e-37), true);
    CHECK_EQUAL(near(dx[i], 3.0 * slope(x[i]), 2e-6, 1e-6), true);
  }
}

TEST(far_from_zero) {
  const std::vector<float> x = {12.0F, 1e15F, 3e38F, -12.0F, -1e15F, -3e38F, std::nanf("")};
  const std::vector<float> y = forward(x), dx = backward(std::vector<float>(x.size(), 1.0F), x);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK_EQUAL(y[i], x[i]);
    CHECK_EQUAL(dx[i], 1.0F);
    CHECK_EQUAL(near(y[i + 3], 0.0, 0.0, 10.0), true);
    CHECK_EQUAL(near(dx[i + 3], 0.0, 0.0, 1e-30), true);
  }
  CHECK_EQUAL(std::isnan(y[6]) && std::isnan(dx[6]), true);
}

TEST(an_elements_place_does_not_change_its_bits) {
  const std::vector<float> x = line(), whole = forward(x), slopes = backward(x, x);
  for (const std::size_t first : {1, 3, 17, 1000}) {
    const std::vector<float> rest(x.begin() + static_cast<std::ptrdiff_t>(first), x.end());
    const std::vector<float> y = forward(rest), dx = backward(rest, rest);
    for (std::size_t i = 0; i < rest.size(); ++i) {
      CHECK_EQUAL(std::bit_cast<std::uint32_t>(y[i]), std::bit_cast<std::uint32_t>(whole[first + i]));
      CHECK_EQUAL(std::bit_cast<std::uint32_t>(dx[i]), std::bit_cast<std::uint32_t>(slopes[first + i]));
    }
  }
}

int main(int argc, char** argv) { return elaswave::tests::run(argc, argv); }
