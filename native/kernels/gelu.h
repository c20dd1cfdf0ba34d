// GELU by its tanh formula, forward and backward. No torch in here.
//
//   y = x / 2 (1 + tanh u) = x sigmoid(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// (Hendrycks and Gimpel, arXiv 1606.08415.) The second form takes one exponential, and loses no digits below zero.
#pragma once

#include <cstdint>

namespace elaswave::kernels {

void gelu_tanh(const float* x, float* y, std::int64_t count);

// dx = dy * d gelu / dx.
void gelu_tanh_backward(const float* dy, const float* x, float* dx, std::int64_t count);

}  // namespace elaswave::kernels
