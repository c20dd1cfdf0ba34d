#include "exec/program/views.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

namespace elaswave::exec {
namespace {

using Shape = c10::SmallVector<std::int64_t, 6>;

// Backends outside of torch have tensors of classes of their own.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.device().is_privateuseone();
}

at::Tensor alias(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                   base.dtype());
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(impl));
}

bool reshape(const at::Tensor& base, std::span<const std::int64_t> wanted, std::vector<c10::IValue>& results) {
  if (!base.is_contiguous()) return false;
  std::int64_t elements = 1;
  for (const std::int64_t size : wanted) {
    if (size < 0) return false;  // one that is to be worked out
    elements *= size;
  }
  if (elements != base.numel()) return false;
  Shape strides(wanted.size());
  std::int64_t stride = 1;
  for (std::size_t axis = wanted.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= std::max<std::int64_t>(wanted[axis], 1);
  }
  results.emplace_back(alias(base, {wanted.data(), wanted.size()}, strides, base.storage_offset()));
  return true;
}

// False unless the axis exists.
bool wrap(std::int64_t& axis, std::int64_t dims) {
  if (axis < 0) axis += dims;
  return axis >= 0 && axis < dims;
}

bool transpose(const at::Tensor& base, std::int64_t a, std::int64_t b, std::vector<c10::IValue>& results) {
  if (!wrap(a, base.dim()) || !wrap(b, base.dim())) return false;
  Shape sizes(base.sizes().begin(), base.sizes().end()), strides(base.strides().begin(), base.strides().end());
  std::swap(sizes[static_cast<std::size_t>(a)], sizes[static_cast<std::size_t>(b)]);
  std::swap(strides[static_cast<std::size_t>(a)], strides[static_cast<std::size_t>(b)]);
  results.emplace_back(alias(base, sizes, strides, base.storage_offset()));
  return true;
}

bool split(const at::Tensor& base, std::int64_t piece, std::int64_t axis, std::vector<c10::IValue>& results) {
  if (!wrap(axis, base.dim()) || piece <= 0 || base.size(axis) == 0) return false;
  Shape sizes(base.sizes().begin(), base.sizes().end());
  const std::int64_t length = base.size(axis), stride = base.stride(axis);
  for (std::int64_t at = 0; at < length; at += piece) {
    sizes[static_cast<std::size_t>(axis)] = std::min(piece, length - at);
    results.emplace_back(alias(base, sizes, base.strides(), base.storage_offset() + at * stride));
  }
  return true;
}

bool append(const Arg& arg, std::vector<Size>& sizes) {
  if (arg.kind != Arg::Kind::kSlot && arg.kind != Arg::Kind::kInt) return false;
  const bool slot = arg.kind == Arg::Kind::kSlot;
  sizes.push_back({slot ? static_cast<int>(arg.integer) : -1, arg.integer});
  return true;
}

bool append_all(std::span<const Arg> args, std::vector<Size>& sizes) {
  return std::all_of(args.begin(), args.end(), [&](const Arg& arg) { return append(arg, sizes); });
}

}  // namespace

View view_of(const Instruction& instruction, std::vector<Size>& sizes) {
  const std::vector<Arg>& args = instruction.args;
  if (args.empty() || args[0].kind != Arg::Kind::kSlot) return View::kNone;
  const auto rest = std::span(args).subspan(1);
  if (instruction.op == "aten::reshape" && rest.size() == 1 && rest[0].kind == Arg::Kind::kList) {
    return append_all(rest[0].items, sizes) ? View::kReshape : View::kNone;
  }
  if (instruction.op == "aten::transpose" && instruction.overload == "int") {
    return append_all(rest, sizes) ? View::kTranspose : View::kNone;
  }
  if (instruction.op == "aten::split" && instruction.overload == "Tensor") {
    return append_all(rest, sizes) ? View::kSplit : View::kNone;
  }
  if (instruction.op == "aten::t") {
    sizes = {{-1, -2}, {-1, -1}};  // which a tensor of one dimension does not have
    return View::kTranspose;
  }
  return View::kNone;
}

bool make_view(View view, const at::Tensor& base, std::span<const std::int64_t> sizes,
               std::vector<c10::IValue>& results) {
  if (!is_plain(base)) return false;
  switch (view) {
    case View::kReshape:
      return reshape(base, sizes, results);
    case View::kTranspose:
      return transpose(base, sizes[0], sizes[1], results);
    case View::kSplit:
      return split(base, sizes[0], sizes[1], results);
    case View::kNone:
      break;
  }
  return false;
}

}  // namespace elaswave::exec
