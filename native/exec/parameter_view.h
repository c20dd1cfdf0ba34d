// A parameter or mutable buffer as a view of the flat tensor of its bucket. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "declarations.h"

namespace elaswave::exec {

inline std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return numel;
}

inline at::Tensor parameter_view(const at::Tensor& flat, const Parameter& parameter) {
  const std::int64_t numel = numel_of(parameter.shape);
  if (!parameter.dtype) return flat.narrow(0, parameter.offset, numel).view(parameter.shape);
  const auto size = static_cast<std::int64_t>(c10::elementSize(*parameter.dtype));
  return flat.view(*parameter.dtype).narrow(0, parameter.offset * kWordBytes / size, numel).view(parameter.shape);
}

}  // namespace elaswave::exec
