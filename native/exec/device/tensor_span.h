// The elements of a contiguous tensor, for code that knows no torch. Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <type_traits>

namespace elaswave::exec {

// `Value`: the tensor's type, const to read.
template <typename Value>
std::span<Value> span_of(const at::Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  if constexpr (std::is_const_v<Value>) {
    return {tensor.const_data_ptr<std::remove_const_t<Value>>(), count};
  } else {
    return {tensor.mutable_data_ptr<Value>(), count};
  }
}

}  // namespace elaswave::exec
