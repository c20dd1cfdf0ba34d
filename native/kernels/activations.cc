// CPU kernels of the `elaswave` activations, fp32. Schemas and shapes are in library.cc.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "gelu.h"

namespace elaswave::kernels {
namespace {

// `x` itself if its elements fill its memory in any order of dimensions, else a copy of which that holds.
at::Tensor dense(const char* op, const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "elaswave::", op, ": ", x.scalar_type(), " is not float32");
  return x.is_non_overlapping_and_dense() ? x : at::empty_like(x).copy_(x);
}

at::Tensor gelu_tanh_cpu(const at::Tensor& x) {
  const at::Tensor input = dense("gelu_tanh", x);
  at::Tensor output = at::empty_like(input);
  gelu_tanh(input.const_data_ptr<float>(), output.mutable_data_ptr<float>(), input.numel());
  return output;
}

at::Tensor gelu_tanh_backward_cpu(const at::Tensor& grad, const at::Tensor& x) {
  TORCH_CHECK(grad.sizes() == x.sizes(), "elaswave::gelu_tanh_backward: a gradient of ", grad.sizes(), " for an x of ",
              x.sizes());
  const at::Tensor input = dense("gelu_tanh_backward", x);
  at::Tensor of = dense("gelu_tanh_backward", grad);
  if (of.strides() != input.strides()) of = at::empty_like(input).copy_(of);
  at::Tensor output = at::empty_like(input);
  gelu_tanh_backward(of.const_data_ptr<float>(), input.const_data_ptr<float>(), output.mutable_data_ptr<float>(),
                     input.numel());
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(elaswave, CPU, library) {
  library.impl("gelu_tanh", gelu_tanh_cpu);
  library.impl("gelu_tanh_backward", gelu_tanh_backward_cpu);
}

}  // namespace elaswave::kernels
