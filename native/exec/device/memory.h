// Where new tensors lie: the one place that decides between the memory of the device, where units compute, and that of
// the host, where messages and the states of replicas are. Both are the CPU's. A device is added here, and in
// TensorTransfers, which then stages what it sends; operators are bound to a device by the tensors that they get.
// Private to exec/.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace elaswave::exec {

inline at::Tensor device_empty(at::IntArrayRef shape, at::ScalarType dtype) { return at::empty(shape, dtype); }
inline at::Tensor device_zeros(at::IntArrayRef shape, at::ScalarType dtype) { return at::zeros(shape, dtype); }
inline at::Tensor host_empty(at::IntArrayRef shape, at::ScalarType dtype) { return at::empty(shape, dtype); }

}  // namespace elaswave::exec
