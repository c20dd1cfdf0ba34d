#include "gelu.h"

#include <bit>

#include "versions.h"

namespace elaswave::kernels {
namespace {

constexpr float kOuter = 2.0F * 0.7978845608028654F;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715F;

// Beyond, the sigmoid is one, or too small for fp32; within, no exponential overflows.
constexpr float kFar = 10.0F;

// Written so that compilers use vectors; branches would not.
inline __attribute__((always_inline)) float within(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

// e^x for |x| < 87.3, within 2 ulp: the polynomial of Cephes' expf, 2^n by way of the exponent's bits.
inline __attribute__((always_inline)) float exponential(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: a float so large has no fraction
  const float shifted = x * 1.44269504088896341F + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  return p * std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000U);
}

// e^(-2 u); the sigmoid of 2 u is one over one more.
inline __attribute__((always_inline)) float decay(float x) { return exponential(-kOuter * (x + kCubic * x * x * x)); }

}  // namespace

ELASWAVE_VERSIONS
void gelu_tanh(const float* x, float* y, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] / (1.0F + decay(within(x[i], kFar)));
}

ELASWAVE_VERSIONS
void gelu_tanh_backward(const float* dy, const float* x, float* dx, std::int64_t count) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const float v = within(x[i], kFar), e = decay(v), s = 1.0F / (1.0F + e);
    // e s^2 is the sigmoid's slope s (1 - s), without a difference of near numbers.
    dx[i] = dy[i] * (s + v * (e * s * s) * kOuter * (1.0F + 3.0F * kCubic * v * v));
  }
}

}  // namespace elaswave::kernels
