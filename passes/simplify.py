"""simplify: remove views that undo each other from joint graphs, and sizes that are computed twice.

Differentiation leaves a transposition for every transposed operand, and one more to take it back. At small widths the
calls take longer than the products between them.

    w_t = t(w); y = addmm(b, x, w_t)              y = addmm(b, x, t(w))
    dx = mm(dy, t(w_t))                     =>    dx = mm(dy, w)
    dw = t(t(mm(t(dy), x)))                       dw = mm(t(dy), x)
    db = reshape(sum(dy, [0], True), [n])         db = sum(dy, [0])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.passes.differentiate import rewrite_joints
from elaswave_fx.program.ir import Program, argument, calls, copy_graph, emit, is_aten, value_of

aten = torch.ops.aten
_TRANSPOSES = ("aten.t", "aten.transpose", "aten.permute")


@dataclass(frozen=True)
class Simplify:
    """Make fewer calls for the same numbers: every kernel sees the operands that it saw before."""

    name: ClassVar[str] = "simplify"

    def apply(self, program: Program) -> Program:
        return rewrite_joints(program, self.name, simplified)


def simplified(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a functional graph without needless calls."""
    module = copy_graph(module)
    graph = module.graph
    sizes: dict[Any, fx.Node] = {}
    for node in list(calls(graph)):
        same = _known_size(node, sizes)
        for rule in _RULES:
            same = same or rule(graph, node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _known_size(node: fx.Node, sizes: dict[Any, fx.Node]) -> fx.Node | None:
    """An earlier call with the same formula of the batch size."""
    value = value_of(node)
    if not isinstance(value, torch.SymInt):
        return None
    first = sizes.setdefault(value.node.expr, node)
    return first if first is not node else None


def _transposed_back(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    inner = node.args[0] if is_aten(node, *_TRANSPOSES) else None
    if not isinstance(inner, fx.Node) or not is_aten(inner, *_TRANSPOSES):
        return None
    first, second = _permutation(inner), _permutation(node)
    undone = [first[axis] for axis in second] == list(range(len(first)))
    source = inner.args[0]
    return source if undone and isinstance(source, fx.Node) else None


def _permutation(node: fx.Node) -> list[int]:
    """Return the axis of the source for each axis of the result."""
    axes = list(range(value_of(node).dim()))
    if is_aten(node, "aten.permute"):
        given: Any = node.args[1]
        return [axes[axis] for axis in given]
    if len(axes) > 1:
        a, b = (node.args[1], node.args[2]) if is_aten(node, "aten.transpose") else (0, 1)
        axes[a], axes[b] = axes[b], axes[a]  # type: ignore[index]
    return axes


def _reshaped_from_first(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A reshape from the first of a chain of shapes; the source itself if it has the last shape already.

    An inner reshape with other readers stays: it may have copied for all of them.
    """
    if not is_aten(node, "aten.reshape"):
        return None
    wanted = _formulas(value_of(node).shape)
    source: Any = node
    while is_aten(source, "aten.reshape"):
        source = source.args[0]
        if value_of(source).is_contiguous() and _formulas(value_of(source).shape) == wanted:
            return source
    while is_aten(node.args[0], "aten.reshape") and len(node.args[0].users) == 1:  # type: ignore[union-attr, arg-type]
        node.args = (node.args[0].args[0], *node.args[1:])  # type: ignore[union-attr]
    return None


def _sum_without_axis(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A sum that drops its axis, instead of a sum that keeps it for a reshape to drop."""
    total = node.args[0] if is_aten(node, "aten.reshape") else None
    if not isinstance(total, fx.Node) or not is_aten(total, "aten.sum.dim_IntList") or len(total.users) > 1:
        return None
    source, axes = total.args[0], argument(total, "dim")
    if not axes or not argument(total, "keepdim", False) or not isinstance(source, fx.Node):
        return None
    shape = value_of(source).shape
    gone = {axis % len(shape) for axis in axes}
    left = [size for axis, size in enumerate(shape) if axis not in gone]
    if _formulas(left) != _formulas(value_of(node).shape):
        return None
    with graph.inserting_before(node):
        return emit(graph, aten.sum.dim_IntList, source, axes, False, dtype=argument(total, "dtype"), like=node)


def _formulas(shape: Any) -> list[Any]:
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]


_RULES: tuple[Callable[[fx.Graph, fx.Node], fx.Node | None], ...] = (
    _transposed_back,
    _reshaped_from_first,
    _sum_without_axis,
)
