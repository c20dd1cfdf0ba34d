// A parameter or mutable buffer as a view of the flat tensor of its bucket. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <vector>

#include "exec/spec/declarations.h"

namespace elaswave::exec {

inline std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return numel;
}

inline at::Tensor parameter_view(const at::Tensor& flat, const Parameter& parameter) {
  const c10::DimVector strides = c10::contiguous_strides(parameter.shape);
  const auto view = [&](const at::Tensor& whole, std::int64_t offset) {
    return whole.as_strided(parameter.shape, strides, whole.storage_offset() + offset);
  };
  if (!parameter.dtype) return view(flat, parameter.offset);
  const auto size = static_cast<std::int64_t>(c10::elementSize(*parameter.dtype));
  return view(flat.view(*parameter.dtype), parameter.offset * kWordBytes / size);
}

}  // namespace elaswave::exec
