// CPU kernels of the `elaswave` operators. Schemas, shapes and the derivative are in library.cc.
#include "keyed.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include "layout.h"
#include "philox.h"
#include "versions.h"

namespace elaswave::kernels {

// Elements whose word is below the threshold become zero, the others are scaled.
ELASWAVE_VERSIONS
void drop(const float* in, const std::uint32_t* words, float* out, std::int64_t count, std::uint32_t threshold,
          float scale) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) out[i] = (words[i] >> 8) >= threshold ? in[i] * scale : 0.0F;
}

template <typename T, typename Compute>
void drop(const T* in, const std::uint32_t* words, T* out, std::int64_t count, std::uint32_t threshold, Compute scale) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Compute kept = static_cast<Compute>(in[i]) * scale;
    out[i] = static_cast<T>((words[i] >> 8) >= threshold ? kept : Compute{0});
  }
}

namespace {

constexpr std::int64_t kGrain = 16384;  // elements per task of the thread pool

SampleLayout layout_of(const char* op, at::IntArrayRef sizes, const at::Tensor& keys, std::int64_t axis,
                       std::int64_t period) {
  TORCH_CHECK(keys.scalar_type() == at::kLong && keys.dim() == 1 && keys.is_contiguous(), "elaswave::", op,
              ": keys must be contiguous int64 of one dimension, not ", keys.scalar_type(), " of ", keys.dim());
  SampleLayout layout;
  if (axis == -1) {
    TORCH_CHECK(keys.numel() == 1, "elaswave::", op, ": without a sample axis there is one key, not ", keys.numel());
    for (const std::int64_t size : sizes) layout.run *= size;
    return layout;
  }
  const auto dims = static_cast<std::int64_t>(sizes.size());
  TORCH_CHECK(axis >= 0 && axis < dims, "elaswave::", op, ": axis ", axis, " of a tensor with ", dims, " dimensions");
  TORCH_CHECK(period >= 1 && sizes[axis] == keys.numel() * period, "elaswave::", op, ": dimension ", axis, " has size ",
              sizes[axis], ", but ", keys.numel(), " keys x period ", period, " were given");
  layout.samples = keys.numel();
  layout.run = period;
  for (std::int64_t d = 0; d < axis; ++d) layout.outer *= sizes[d];
  for (std::int64_t d = axis + 1; d < dims; ++d) layout.run *= sizes[d];
  return layout;
}

// Runs body(offset, words, skip, count) over all elements, rows spread over the thread pool.
template <typename Body>
void for_all_elements(const SampleLayout& layout, const at::Tensor& keys, std::int64_t op, const Body& body) {
  if (layout.run == 0 || layout.rows() == 0) return;
  const std::int64_t* key_data = keys.const_data_ptr<std::int64_t>();
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / layout.run);
  at::parallel_for(0, layout.rows(), grain, [&](std::int64_t first, std::int64_t last) {
    for_each_word(layout, key_data, static_cast<std::uint32_t>(op), first, last, body);
  });
}

// Calls body(T()) with the C++ type of a floating-point dtype.
template <typename Body>
void with_floating_type(const char* op, at::ScalarType dtype, const Body& body) {
  switch (dtype) {
    case at::kFloat:
      return body(float{});
    case at::kDouble:
      return body(double{});
    case at::kBFloat16:
      return body(c10::BFloat16{});
    case at::kHalf:
      return body(c10::Half{});
    default:
      TORCH_CHECK(false, "elaswave::", op, ": ", dtype, " is not float32, float64, bfloat16 or float16");
  }
}

at::Tensor keyed_dropout_cpu(const at::Tensor& x, const at::Tensor& keys, double p, std::int64_t op, std::int64_t axis,
                             std::int64_t period) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, "elaswave::keyed_dropout: p = ", p, " is not in [0, 1]");
  const SampleLayout layout = layout_of("keyed_dropout", x.sizes(), keys, axis, period);
  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input);
  const std::uint32_t threshold = keep_threshold(p);
  const double exact_scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
  with_floating_type("keyed_dropout", x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto scale = static_cast<Compute>(exact_scale);
    const T* in = input.const_data_ptr<T>();
    T* out = output.mutable_data_ptr<T>();
    for_all_elements(layout, keys, op,
                     [=](std::int64_t offset, const std::uint32_t* words, std::int64_t skip, std::int64_t count) {
                       drop(in + offset, words + skip, out + offset, count, threshold, scale);
                     });
  });
  return output;
}

// The word's uniform number in T. Types with fewer than 24 bits take its leading bits, so that 1 is never reached.
template <typename T>
T uniform_as(std::uint32_t word) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) return T(static_cast<float>(word >> 24) * 0x1.0p-8F);
  if constexpr (std::is_same_v<T, c10::Half>) return T(static_cast<float>(word >> 21) * 0x1.0p-11F);
  return static_cast<T>(uniform_from(word));
}

at::Tensor keyed_uniform_cpu(const at::Tensor& keys, at::IntArrayRef size, std::int64_t op, std::int64_t axis,
                             std::int64_t period, at::ScalarType dtype, at::Device device) {
  const SampleLayout layout = layout_of("keyed_uniform", size, keys, axis, period);
  at::Tensor output = at::empty(size, at::TensorOptions(dtype).device(device));
  with_floating_type("keyed_uniform", dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = output.mutable_data_ptr<T>();
    for_all_elements(layout, keys, op,
                     [=](std::int64_t offset, const std::uint32_t* words, std::int64_t skip, std::int64_t count) {
                       for (std::int64_t i = 0; i < count; ++i) out[offset + i] = uniform_as<T>(words[skip + i]);
                     });
  });
  return output;
}

at::Tensor keyed_normal_cpu(const at::Tensor& keys, at::IntArrayRef size, std::int64_t op, std::int64_t axis,
                            std::int64_t period, at::ScalarType dtype, at::Device device) {
  const SampleLayout layout = layout_of("keyed_normal", size, keys, axis, period);
  at::Tensor output = at::empty(size, at::TensorOptions(dtype).device(device));
  with_floating_type("keyed_normal", dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = output.mutable_data_ptr<T>();
    for_all_elements(layout, keys, op,
                     [=](std::int64_t offset, const std::uint32_t* words, std::int64_t skip, std::int64_t count) {
                       for (std::int64_t word = skip; word < skip + count;) {
                         const std::array<double, 2> pair = normal_from(words[word & ~1LL], words[word | 1]);
                         do {
                           out[offset + word - skip] = static_cast<T>(pair[static_cast<std::size_t>(word & 1)]);
                           ++word;
                         } while ((word & 1) == 1 && word < skip + count);
                       }
                     });
  });
  return output;
}

}  // namespace

at::Tensor sample_keys(std::int64_t seed, std::int64_t first, std::int64_t count, std::int64_t unit) {
  TORCH_CHECK(count >= 0, "elaswave::sample_keys: count = ", count, " is negative");
  at::Tensor keys = at::empty({count}, at::kLong);
  auto* out = keys.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<std::int64_t>(sample_key(
        static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(first + i), static_cast<std::uint32_t>(unit)));
  }
  return keys;
}

TORCH_LIBRARY_IMPL(elaswave, CPU, library) {
  library.impl("keyed_dropout", keyed_dropout_cpu);
  library.impl("keyed_uniform", keyed_uniform_cpu);
  library.impl("keyed_normal", keyed_normal_cpu);
}

// It has no tensor among its arguments, hence no device to choose a kernel by.
TORCH_LIBRARY_IMPL(elaswave, CompositeExplicitAutograd, library) { library.impl("sample_keys", sample_keys); }

}  // namespace elaswave::kernels
