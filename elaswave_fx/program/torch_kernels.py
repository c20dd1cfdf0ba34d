"""Kernels for tensors without data that torch lacks, or whose own kernels read the batch size as a plain number.

Tracing computes shapes with them; execution uses torch's own kernels. Importing this module registers them.

    _upsample_bicubic2d_aa_backward     -> no shapes for symbolic sizes (bilinear and lanczos have them)
    take_along_dim                      -> C++ that broadcasts to plain numbers
    fake_quantize_per_channel_affine    -> no shapes; a backward pass that compares plain sizes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._meta_registrations import meta_upsample_bimode2d_aa_backward

aten = torch.ops.aten
_Key = torch._C.DispatchKey


def _register(operator: Any, key: Any, kernel: Callable[..., Any]) -> None:
    """Register a kernel for an operator, unless an imported part of torch has registered one."""
    if key not in operator.py_kernels:
        operator.py_impl(key)(kernel)


def take_along_dim(source: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Gather along a dimension, the others broadcast against each other; without one, from the flat tensor."""
    if dim is None:
        return source.flatten().gather(0, indices.flatten())
    dim %= source.dim()
    others = torch.broadcast_shapes(_without(source, dim), _without(indices, dim))
    wide = [[*others[:dim], each.shape[dim], *others[dim + 1 :]] for each in (source, indices)]
    return source.expand(wide[0]).gather(dim, indices.expand(wide[1]))


def _fake_quantized(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The result, and where it has a derivative."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _fake_quantized_backward(grad: Tensor, mask: Tensor) -> Tensor:
    return grad * mask


def _without(tensor: Tensor, dim: int) -> list[int]:
    return [1 if place == dim else size for place, size in enumerate(tensor.shape)]


_register(aten._upsample_bicubic2d_aa_backward.default, _Key.Meta, meta_upsample_bimode2d_aa_backward)
for _operator in (
    aten.fake_quantize_per_tensor_affine_cachemask, aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams,
    aten.fake_quantize_per_channel_affine_cachemask,
):  # fmt: skip
    _register(_operator.default, _Key.Meta, _fake_quantized)
_register(
    aten.fake_quantize_per_channel_affine_cachemask_backward.default, _Key.CompositeImplicitAutograd,
    _fake_quantized_backward,
)  # fmt: skip
_register(aten.take_along_dim.default, _Key.CompositeImplicitAutograd, take_along_dim)
