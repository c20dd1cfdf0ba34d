"""estimate_cost: floating-point operations per sample of every call, from shapes alone.

Formulas: a product of [m, k] and [k, n] takes 2mkn operations; attention two such products, backward five; a
convolution 2 * output elements * kernel elements, backward as many for each of the gradients of input and kernel;
operators of others than torch that read two matrices count as products; everything else one per output element.

    linear [s0, 64, 128] x [384, 128] -> 2 * 64 * 128 * 384 operations per sample
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.program.ir import Program, argument, calls, is_aten, set_flops, tensors_in, value_of

_PRODUCTS = ("aten.mm", "aten.bmm", "aten.matmul")
_ATTENTION_BACKWARD = (
    "aten._scaled_dot_product_flash_attention_for_cpu_backward", "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
)  # fmt: skip
VIEWS = (
    "aten.view", "aten.transpose", "aten.permute", "aten.t", "aten.unsqueeze", "aten.squeeze", "aten.expand",
    "aten.slice", "aten.select", "aten.detach", "aten.split", "aten.unbind", "aten.chunk", "aten.sym_size",
    "aten.unsafe_split", "aten.split_with_sizes", "aten.narrow", "aten.alias", "aten._unsafe_view", "aten.reshape",
    "aten.flatten", "aten.unflatten", "aten.expand_as", "aten.diagonal", "aten.unfold", "aten.as_strided",
)  # fmt: skip


@dataclass(frozen=True)
class EstimateCost:
    """Count operations, so that cuts and stages can be chosen before anything has run."""

    name: ClassVar[str] = "estimate_cost"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        share = 1.0 if program.dynamic_batch else 1.0 / program.granule
        for node in calls(program.graph.graph):
            set_flops(node, share * operations(node))
        return program


def view_base(node: fx.Node) -> fx.Node:
    """The value in whose memory a view lies; any other value is its own base."""
    while is_aten(node, *VIEWS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def elements(value: Any) -> int:
    """Elements of all tensors in a value, for a batch of one sample (or the fixed batch, if there is one)."""
    return sum(math.prod(_one_sample(size) for size in tensor.shape) for tensor in tensors_in(value))


def _one_sample(size: Any) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    try:
        found = int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
    except (ZeroDivisionError, TypeError):  # by what is less than a row for a single sample; TypeError for 1 / 0
        found = 0
    return max(found, 1)  # such as half a row, where forward pairs samples


def value_bytes(value: Any) -> int:
    """Bytes of all tensors in a value, counted as in `elements`."""
    return sum(elements(tensor) * tensor.dtype.itemsize for tensor in tensors_in(value))


def operations(node: fx.Node) -> float:
    """Floating-point operations of one call, counted as in `elements`."""
    out = elements(value_of(node))
    if is_aten(node, *VIEWS) or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    if is_aten(node, "aten.linear", "aten.addmm", "aten.baddbmm"):
        operand = node.args[0] if is_aten(node, "aten.linear") else node.args[1]
        return 2.0 * out * _inner(operand)
    if is_aten(node, *_PRODUCTS):
        return 2.0 * out * _inner(node.args[0])
    if is_aten(node, "aten.convolution", "aten.conv1d", "aten.conv2d", "aten.conv3d"):
        weight = value_of(node.args[1])  # type: ignore[arg-type]
        return 2.0 * out * (elements(weight) // _one_sample(weight.shape[0]))
    if is_aten(node, "aten.convolution_backward"):
        gradient, weight = value_of(node.args[0]), value_of(node.args[2])  # type: ignore[arg-type]
        one = 2.0 * elements(gradient) * (elements(weight) // _one_sample(weight.shape[0]))
        return one * sum(argument(node, "output_mask")[:2])
    if is_aten(node, *_ATTENTION_BACKWARD):
        query, keys = value_of(node.args[1]), value_of(node.args[2])  # type: ignore[arg-type]
        return 10.0 * elements(query) * _one_sample(keys.shape[-2])
    if is_aten(node, "aten.scaled_dot_product_attention"):
        keys = value_of(node.args[1])  # type: ignore[arg-type]
        return 4.0 * out * _one_sample(keys.shape[-2])
    matrices = [each for each in node.all_input_nodes if _is_matrix(value_of(each))]
    if not str(node.target).startswith("aten.") and len(matrices) > 1:
        return 2.0 * out * _inner(matrices[0])  # a user's operator on two matrices is most likely their product
    return float(out)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


def _inner(operand: Any) -> int:
    return _one_sample(value_of(operand).shape[-1])
