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

import sympy
import torch
from torch import fx

from elaswave_fx.program.batch_size import batch_symbol, fixed_shape, sample_dims, sized_axis
from elaswave_fx.program.ir import (
    Program,
    SampleAxis,
    argument,
    draws_randomness,
    fixed_size,
    is_aten,
    is_getitem,
    tensors_in,
    value_of,
)
from elaswave_fx.program.sized_values import SizedValues

_RESHAPES = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten.view_copy")
_MOST_ELEMENTS = 1 << 24
"""Bound of values that are computed."""


def _data_dependent(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> bool:
    known = {symbol} if symbol is not None else set()
    return any(size.node.expr.free_symbols - known for size in tensor.shape if isinstance(size, torch.SymInt))


class SampleAxes:
    """Sample axes of all tensors of a program; see `locate_samples`."""

    def __init__(self, program: Program) -> None:
        self.symbol = batch_symbol(program)
        self._program = program
        self._sized: SizedValues | None = None  # few programs need it
        self._fitting: dict[fx.Node, tuple[SampleAxis, ...]] = {}
        """Several, where the values are the same in each of these orders: ones, one half of them masked."""
        self._mixed: set[fx.Node] = set()

    def of(self, node: fx.Node) -> SampleAxis | None:
        """The sample axis of the tensor of `node`; None when it holds no samples, or mixes them."""
        fitting = self._fitting.get(node)
        return fitting[0] if fitting is not None else None

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
        found = self._follow(node, *sized) if sized is not None else ()
        if found:
            self._fitting[node] = found
        else:
            self._mixed.add(node)

    def copy(self, old: fx.Node, new: fx.Node) -> None:
        """Record that `new` holds samples as `old` does."""
        if old in self._fitting:
            self._fitting[new] = self._fitting[old]
        elif old in self._mixed:
            self._mixed.add(new)

    def _follow(self, node: fx.Node, dim: int, factor: int) -> tuple[SampleAxis, ...]:
        """The orders of samples in a dimension of `factor` entries per sample; none where arguments disagree."""
        if factor == 1:
            return (SampleAxis(dim),)
        inputs = self._inputs(node)
        equal = self._equal_samples(node, dim, factor)
        if equal:  # the order of what it is shaped like, as by zeros_like, comes first
            liked = {(fitting[0].outer, fitting[0].period) for fitting in inputs}
            return tuple(sorted(equal, key=lambda axis: ((axis.outer, axis.period) not in liked, axis.outer)))
        if is_aten(node, *_RESHAPES):
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            shapes = value_of(source), value_of(node)
            found = (_reshaped(axis, *shapes, dim, factor) for axis in self._fitting.get(source, ()))
            return tuple(axis for axis in found if axis is not None)
        if is_aten(node, "aten.repeat_interleave.self_int"):
            mixed = not self._mixed.isdisjoint(node.all_input_nodes)
            axis = None if mixed else _interleaved(node, inputs[0][0] if inputs else None, dim, factor)
            return (axis,) if axis is not None else ()
        if is_aten(node, "aten.cat", "aten.repeat") and any(_entries(fitting[0]) != factor for fitting in inputs):
            axis = _repeated(inputs, dim, factor)
            return (axis,) if axis is not None else ()
        orders = [[SampleAxis(dim, axis.period, axis.outer) for axis in fitting if _entries(axis) == factor]
                  for fitting in inputs]  # fmt: skip
        first, *others = [each for each in orders if each] or [[SampleAxis(dim, factor)]]
        found = tuple(axis for axis in first if all(axis in each for each in others))
        return found[:1] if draws_randomness(node) else found

    def _inputs(self, node: fx.Node) -> list[tuple[SampleAxis, ...]]:
        """Sample axes of a node's inputs; an element of a tuple has those of the tuple's inputs."""
        if is_getitem(node):
            return self._inputs(node.args[0])  # type: ignore[arg-type]
        return [self._fitting[source] for source in node.all_input_nodes if source in self._fitting]

    def _equal_samples(self, node: fx.Node, dim: int, factor: int) -> tuple[SampleAxis, ...]:
        """The orders in which a value that the number of samples tells is the same for every sample, such as
        torch.arange(2 * B) // B."""
        self._sized = self._sized or SizedValues(self._program)
        samples = 3 * self._program.granule
        if (
            node not in self._sized.sized
            or math.prod(fixed_shape(value_of(node), self.symbol, samples)) > _MOST_ELEMENTS
        ):
            return ()
        value = self._sized.at(node, samples)
        if value is None:
            return ()
        outers = (outer for outer in range(1, factor + 1) if factor % outer == 0)
        axes = (SampleAxis(dim, factor // outer, outer) for outer in outers)
        return tuple(axis for axis in axes if _is_equal(split_samples(value, axis), axis.axis + 1))


def _reshaped(axis: SampleAxis, source: torch.Tensor, result: torch.Tensor, dim: int, factor: int) -> SampleAxis | None:
    """The axis of a reshaped tensor: row-major order keeps the number of elements before the sample index."""
    before = math.prod(fixed_size(size) for size in source.shape[: axis.axis]) * axis.outer
    kept = math.prod(fixed_size(size) for size in result.shape[:dim])
    outer, rest = divmod(before, kept) if kept else (1, 0)
    return None if rest or outer == 0 or factor % outer else SampleAxis(dim, factor // outer, outer)


def _entries(axis: SampleAxis) -> int:
    """The number of entries per sample along the axis."""
    return axis.outer * axis.period


def _repeated(inputs: list[tuple[SampleAxis, ...]], dim: int, factor: int) -> SampleAxis | None:
    """The axis of copies or parts concatenated along the sample axis: they are more outer indices."""
    first, *others = inputs
    axis = next((axis for axis in first if all(axis in each for each in others)), None)
    return SampleAxis(dim, axis.period, factor // axis.period) if axis is not None else None


def _interleaved(node: fx.Node, axis: SampleAxis | None, dim: int, factor: int) -> SampleAxis | None:
    """The axis of copies of each entry, which are neighbours: of one entry there may be a copy for each sample."""
    shape = value_of(node.args[0]).shape  # type: ignore[arg-type]
    flat = argument(node, "dim") is None
    if axis is not None:
        outer = axis.outer * (math.prod(fixed_size(size) for size in shape[: axis.axis]) if flat else 1)
    else:
        outer = math.prod(fixed_size(size) for size in (shape if flat else shape[dim : dim + 1]))
    return None if factor % outer else SampleAxis(dim, factor // outer, outer)


def _is_equal(value: torch.Tensor, dim: int) -> bool:
    """Whether a tensor is the same throughout a dimension."""
    return bool((value == value.narrow(dim, 0, 1)).all())


def locate_samples(program: Program) -> SampleAxes:
    """Sample axes of every tensor of a program's graph."""
    axes = SampleAxes(program)
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
