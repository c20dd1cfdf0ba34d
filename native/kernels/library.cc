// The torch library `elaswave`: schemas, shape kernels and the derivative of keyed_dropout.
//
// Activations come into programs after differentiation and need no derivative.
//
// keyed_dropout is linear in x with a mask that depends on the keys only, so its derivative is itself on the gradient:
// tracers see one operator in either direction and nothing but the keys is kept for the backward pass.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

namespace elaswave::kernels {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

at::Tensor call_keyed_dropout(const at::Tensor& x, const at::Tensor& keys, double p, std::int64_t op, std::int64_t axis,
                              const c10::SymInt& period) {
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("elaswave::keyed_dropout", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double, std::int64_t, std::int64_t, c10::SymInt)>();
  return handle.call(x, keys, p, op, axis, period);
}

// A plain graph node instead of torch::autograd::Function, which torch.func transforms refuse.
struct KeyedDropoutBackward : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined() || !task_should_compute_output(0)) return {at::Tensor()};
    return {call_keyed_dropout(gradients[0], keys.unpack(), p, op, axis, period)};
  }
  void release_variables() override { keys.reset_data(); }
  std::string name() const override { return "KeyedDropoutBackward"; }

  SavedVariable keys;
  double p = 0.0;
  std::int64_t op = 0;
  std::int64_t axis = 0;
  c10::SymInt period = 1;
};

at::Tensor keyed_dropout_autograd(const at::Tensor& x, const at::Tensor& keys, double p, std::int64_t op,
                                  std::int64_t axis, c10::SymInt period) {
  c10::intrusive_ptr<KeyedDropoutBackward> node;
  if (torch::autograd::compute_requires_grad(x)) {
    node = c10::make_intrusive<KeyedDropoutBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    node->keys = SavedVariable(keys, /*is_output=*/false);
    node->p = p;
    node->op = op;
    node->axis = axis;
    node->period = period;
  }
  at::Tensor output = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_keyed_dropout(x, keys, p, op, axis, period);
  }();
  if (node) torch::autograd::set_history(output, node);
  return output;
}

at::Tensor keyed_dropout_meta(const at::Tensor& x, const at::Tensor& /*keys*/, double /*p*/, std::int64_t /*op*/,
                              std::int64_t /*axis*/, c10::SymInt /*period*/) {
  return at::empty_like(x, x.options(), at::MemoryFormat::Contiguous);
}

at::Tensor keyed_draw_meta(const at::Tensor& /*keys*/, c10::SymIntArrayRef size, std::int64_t /*op*/,
                           std::int64_t /*axis*/, c10::SymInt /*period*/, at::ScalarType dtype, at::Device /*device*/) {
  return at::empty_symint(size, at::TensorOptions(dtype).device(at::kMeta));
}

at::Tensor gelu_tanh_meta(const at::Tensor& x) { return at::empty_like(x); }

at::Tensor gelu_tanh_backward_meta(const at::Tensor& /*grad*/, const at::Tensor& x) { return at::empty_like(x); }

}  // namespace

TORCH_LIBRARY(elaswave, library) {
  library.def("sample_keys(int seed, int first, int count, int unit) -> Tensor");
  library.def("keyed_dropout(Tensor x, Tensor keys, float p, int op, int axis, SymInt period) -> Tensor");
  library.def(
      "keyed_uniform(Tensor keys, SymInt[] size, int op, int axis, SymInt period, *, ScalarType dtype, Device device) "
      "-> Tensor");
  library.def(
      "keyed_normal(Tensor keys, SymInt[] size, int op, int axis, SymInt period, *, ScalarType dtype, Device device) "
      "-> Tensor");
  library.def("gelu_tanh(Tensor x) -> Tensor");
  library.def("gelu_tanh_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(elaswave, Meta, library) {
  library.impl("keyed_dropout", keyed_dropout_meta);
  library.impl("keyed_uniform", keyed_draw_meta);
  library.impl("keyed_normal", keyed_draw_meta);
  library.impl("gelu_tanh", gelu_tanh_meta);
  library.impl("gelu_tanh_backward", gelu_tanh_backward_meta);
}

TORCH_LIBRARY_IMPL(elaswave, Autograd, library) {
  library.impl("keyed_dropout", keyed_dropout_autograd);
  // Draws have no derivative; their keys are integers.
  library.impl("keyed_uniform", torch::CppFunction::makeFallthrough());
  library.impl("keyed_normal", torch::CppFunction::makeFallthrough());
}

}  // namespace elaswave::kernels
