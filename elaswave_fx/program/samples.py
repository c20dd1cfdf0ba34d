"""The position of the samples in every value.

The symbolic batch size B of the export marks the dimensions that hold samples: their size is a multiple of B. The
multiple alone does not give the order of samples within the dimension, so the order is followed from the inputs through
views; operators without a rule keep the order of their arguments.

    input_ids [B, 64]                    -> axis 0
    view [B, 64, 8] to [64*B, 8]         -> axis 0, period 64: the rows of a sample are neighbours
    view [64, B, 8] to [64*B, 8]         -> axis 0, outer 64: they are B rows apart, so the value cannot be sliced
    mm(x [B, 8], y.t() [8, B]) -> [B, B] -> mixed
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import fx

from elaswave_fx.program.ir import (
    Program,
    Role,
    SampleAxis,
    fixed_size,
    is_aten,
    is_getitem,
    placeholders,
    source_of,
    tensors_in,
    value_of,
)

_RESHAPES = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten.view_copy")


def batch_size(program: Program) -> torch.SymInt | None:
    """The batch size as a symbol; None when the program was captured at a fixed size."""
    for node in placeholders(program.graph.graph):
        if source_of(node).role == Role.INPUT and isinstance(value_of(node), torch.Tensor):
            size = value_of(node).shape[0]
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                return size
    return None


def batch_symbol(program: Program) -> sympy.Symbol | None:
    """The symbol of the batch size; None when the program was captured at a fixed size."""
    size = batch_size(program)
    return size.node.expr if size is not None else None


def sample_dims(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> list[int]:
    """The dimensions whose size depends on the batch size."""
    return [
        dim
        for dim, size in enumerate(tensor.shape)
        if symbol is not None and isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols
    ]


def sized_axis(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> tuple[int, int] | None:
    """The one dimension whose size is a whole multiple of the batch size, and the multiple; None if there is none."""
    dims = sample_dims(tensor, symbol)
    if len(dims) != 1:
        return None
    size: Any = tensor.shape[dims[0]]
    factor = size.node.expr.coeff(symbol)
    return (dims[0], int(factor)) if factor.is_Integer and size.node.expr == factor * symbol else None


def fixed_shape(tensor: torch.Tensor, symbol: sympy.Symbol | None, batch: int) -> tuple[int, ...]:
    """The shape for a batch of `batch` samples."""
    return tuple(
        int(size.node.expr.subs(symbol, batch)) if isinstance(size, torch.SymInt) else size for size in tensor.shape
    )


def _data_dependent(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> bool:
    known = {symbol} if symbol is not None else set()
    return any(size.node.expr.free_symbols - known for size in tensor.shape if isinstance(size, torch.SymInt))


class SampleAxes:
    """Sample axes of all tensors of a program; see `locate_samples`."""

    def __init__(self, symbol: sympy.Symbol | None) -> None:
        self.symbol = symbol
        self._axes: dict[fx.Node, SampleAxis] = {}
        self._mixed: set[fx.Node] = set()

    def of(self, node: fx.Node) -> SampleAxis | None:
        """The sample axis of the tensor of `node`; None when it holds no samples, or mixes them."""
        return self._axes.get(node)

    def mixed(self, node: fx.Node) -> bool:
        """Whether a tensor's size depends on the batch or on data, but not as samples along one dimension."""
        return node in self._mixed

    def sliceable(self, node: fx.Node) -> SampleAxis | None:
        """`of`, if the elements of a run of samples are one slice along the axis."""
        axis = self.of(node)
        return axis if axis is not None and axis.outer == 1 else None

    def data_dependent(self, node: fx.Node) -> bool:
        """Whether a tensor's size depends on data, as that of nonzero() does."""
        return any(_data_dependent(tensor, self.symbol) for tensor in tensors_in(value_of(node)))

    def note(self, node: fx.Node) -> None:
        """Compute the axis of a node whose inputs are known."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return
        if not sample_dims(value, self.symbol):
            if self.data_dependent(node):
                self._mixed.add(node)
            return
        sized = None if self.data_dependent(node) else sized_axis(value, self.symbol)
        found = self._follow(node, *sized) if sized is not None else None
        if found is None:
            self._mixed.add(node)
        else:
            self._axes[node] = found

    def copy(self, old: fx.Node, new: fx.Node) -> None:
        """Record that `new` holds samples as `old` does."""
        if old in self._axes:
            self._axes[new] = self._axes[old]
        elif old in self._mixed:
            self._mixed.add(new)

    def _follow(self, node: fx.Node, dim: int, factor: int) -> SampleAxis | None:
        """The order of samples in a dimension of `factor` entries per sample; None where arguments disagree."""
        if factor == 1:
            return SampleAxis(dim)
        if is_aten(node, *_RESHAPES):
            return self._reshaped(node.args[0], value_of(node), dim, factor)  # type: ignore[arg-type]
        inputs = self._inputs(node)
        if is_aten(node, "aten.cat", "aten.repeat"):
            return self._repeated(inputs, dim, factor)
        orders = {(axis.outer, axis.period) for axis in inputs if axis.outer * axis.period == factor} or {(1, factor)}
        if len(orders) > 1:
            return None
        outer, period = orders.pop()
        return SampleAxis(dim, period, outer)

    def _inputs(self, node: fx.Node) -> list[SampleAxis]:
        """Sample axes of a node's inputs; an element of a tuple has those of the tuple's inputs."""
        if is_getitem(node):
            return self._inputs(node.args[0])  # type: ignore[arg-type]
        return [self._axes[source] for source in node.all_input_nodes if source in self._axes]

    def _reshaped(self, source: fx.Node, result: torch.Tensor, dim: int, factor: int) -> SampleAxis | None:
        """The axis of a reshaped tensor: row-major order keeps the number of elements before the sample index."""
        axis = self._axes.get(source)
        if axis is None:
            return None
        before = math.prod(fixed_size(size) for size in value_of(source).shape[: axis.axis]) * axis.outer
        kept = math.prod(fixed_size(size) for size in result.shape[:dim])
        outer, rest = divmod(before, kept) if kept else (1, 0)
        return None if rest or outer == 0 or factor % outer else SampleAxis(dim, factor // outer, outer)

    def _repeated(self, inputs: list[SampleAxis], dim: int, factor: int) -> SampleAxis | None:
        """The axis of copies or parts concatenated along the sample axis: their number is a new outer index."""
        if not inputs:
            return SampleAxis(dim, factor)
        if len(set(inputs)) != 1:
            return None
        axis = inputs[0]
        if axis.outer * axis.period == factor:
            return SampleAxis(dim, axis.period, axis.outer)
        return SampleAxis(dim, axis.period, factor // axis.period) if axis.outer == 1 else None


def locate_samples(program: Program) -> SampleAxes:
    """Sample axes of every tensor of a program's graph."""
    axes = SampleAxes(batch_symbol(program))
    for node in program.graph.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            axes.note(node)
    return axes


def per_sample_shape(tensor: torch.Tensor, axis: SampleAxis) -> tuple[int, ...]:
    """The shape of one sample's part; the sample axis holds its period."""
    return tuple(axis.period if dim == axis.axis else fixed_size(size) for dim, size in enumerate(tensor.shape))


def split_samples(tensor: torch.Tensor, axis: SampleAxis) -> torch.Tensor:
    """A view with a separate dimension for the samples: [..., outer, samples, period, ...]."""
    samples = tensor.shape[axis.axis] // (axis.outer * axis.period)
    return tensor.unflatten(axis.axis, (axis.outer, samples, axis.period))
