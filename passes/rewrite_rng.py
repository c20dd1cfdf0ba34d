"""rewrite_rng: make every random draw a function of (seed, step, logical op, global sample, element).

Operators that draw from a hidden generator become operators that take per-sample keys. Each draw gets an index;
when units are cut, the index becomes local to the unit, so that equal units stay equal.

    before: y, _ = native_dropout(x, 0.1, True)
    after:  y = elaswave.keyed_dropout(x, keys, 0.1, op=0, axis=0, period=1)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import (
    Program,
    Role,
    SampleAxis,
    Source,
    argument,
    calls,
    draws_randomness,
    emit,
    is_aten,
    is_getitem,
    module_of,
    placeholders,
    set_mean,
    set_source,
    source_of,
    value_of,
)
from elaswave_fx.program.keys import NO_AXIS, UNIFORM, keyed_dropout, keyed_normal, keyed_uniform
from elaswave_fx.program.samples import locate_samples, sample_dims

aten = torch.ops.aten


@dataclass(frozen=True)
class RewriteRng:
    """Give every random draw a key that does not know ranks, stages or call order."""

    name: ClassVar[str] = "rewrite_rng"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        graph = program.graph.graph
        rewriter = _Rewriter(program)
        for node in list(calls(graph)):
            rewriter.rewrite(node)
        for node in calls(graph):
            _note_rounded_draw(node)
        graph.eliminate_dead_code()
        rewriter.drop_unused_keys()
        refuse_hidden_randomness(graph, self.name)
        program.graph.recompile()
        return program


def refuse_hidden_randomness(graph: fx.Graph, after: str) -> None:
    """Raise CaptureError for an operator that still draws randomness by itself."""
    for node in calls(graph):
        if draws_randomness(node):
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} draws random numbers that cannot be keyed ({after}); "
                "use dropout, bernoulli, rand, randn, randint, uniform_, normal_ or exponential_"
            )


def _note_rounded_draw(node: fx.Node) -> None:
    """floor(rand + p) is a draw of ones with probability p too."""
    if not is_aten(node, "aten.floor"):
        return
    added = node.args[0]
    if isinstance(added, fx.Node) and is_aten(added, "aten.add.Tensor", "aten.add.Scalar"):
        drawn, p = added.args[:2]
        if isinstance(drawn, fx.Node) and is_aten(drawn, UNIFORM) and isinstance(p, float) and 0.0 <= p <= 1.0:
            set_mean(node, p)


class _Rewriter:
    """Holds the key inputs and the running index of draws while one graph is rewritten."""

    def __init__(self, program: Program) -> None:
        self.graph = program.graph.graph
        self.axes = locate_samples(program)
        self.next_index = 0
        inputs = placeholders(self.graph)
        examples = [value_of(n) for n in inputs if source_of(n).role == Role.INPUT]
        if not examples:
            raise CaptureError("model: the graph reads none of its inputs; there is nothing to train on")
        sizes = (examples[0].shape[0],)
        self.keys = self._key_input(inputs[-1], Role.KEYS, examples[0].new_empty(sizes, dtype=torch.int64))
        self.step_keys = self._key_input(self.keys, Role.STEP_KEYS, examples[0].new_empty((1,), dtype=torch.int64))
        self.axes.note(self.keys)
        self.rewrites: dict[str, Callable[[fx.Node], fx.Node]] = {
            "aten.bernoulli.default": lambda node: self._below(node, node.args[0]),
            "aten.bernoulli.p": lambda node: self._below(node, argument(node, "p", 0.5)),
            "aten.rand": lambda node: self._draw(node, keyed_uniform),
            "aten.rand_like": lambda node: self._draw(node, keyed_uniform),
            "aten.randn": lambda node: self._draw(node, keyed_normal),
            "aten.randn_like": lambda node: self._draw(node, keyed_normal),
            "aten.randint": self._integers,
            "aten.randint_like": self._integers,
            "aten.uniform": self._uniform,
            "aten.normal_functional": self._normal,
            "aten.exponential": self._exponential,
        }

    def _key_input(self, after: fx.Node, role: Role, value: torch.Tensor) -> fx.Node:
        with self.graph.inserting_after(after):
            node = self.graph.placeholder(role.value)
        node.meta["val"] = value
        set_source(node, Source(role))
        return node

    def drop_unused_keys(self) -> None:
        for node in (self.keys, self.step_keys):
            if not node.users:
                self.graph.erase_node(node)

    def rewrite(self, node: fx.Node) -> None:
        """Replace one call, if it draws."""
        if is_aten(node, "aten.native_dropout"):
            self._dropout(node)
            return
        for name, make in self.rewrites.items():
            if is_aten(node, name):
                with self.graph.inserting_before(node):
                    made = make(node)
                self.axes.copy(node, made)
                node.replace_all_uses_with(made)
                self.graph.erase_node(node)
                return

    def _dropout(self, node: fx.Node) -> None:
        x, p, train = node.args[0], argument(node, "p"), argument(node, "train")
        assert isinstance(x, fx.Node)
        if any(user.args[1] != 0 and user.users for user in node.users):
            raise CaptureError(
                f"model: the mask of {node.target} in {module_of(node)} is used; it cannot be keyed; a way "
                "out is to draw the mask with torch.rand"
            )
        kept = x
        if train is not False and p != 0.0:
            with self.graph.inserting_before(node):
                kept = self._drop(node, x, float(p))
            self.axes.copy(x, kept)
        for user in list(node.users):
            assert is_getitem(user)
            user.replace_all_uses_with(kept)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _drop(self, node: fx.Node, x: fx.Node, p: float) -> fx.Node:
        keys, axis = self._place(x)
        if axis is None or axis.outer == 1:
            return emit(self.graph, keyed_dropout, x, keys, p, self._index(), *_where(axis), like=node)
        split = self._with_own_samples(x, x, axis)
        inner = SampleAxis(axis.axis + 1, axis.period)
        dropped = emit(self.graph, keyed_dropout, split, keys, p, self._index(), *_where(inner), like=node)
        return self._flattened(dropped, axis)

    def _index(self) -> int:
        self.next_index += 1
        return self.next_index - 1

    def _place(self, node: fx.Node) -> tuple[fx.Node, SampleAxis | None]:
        """The keys to draw the tensor of `node` with, and where its samples lie."""
        if self.axes.symbol is None:
            # A program of one fixed batch size runs granule by granule: the granule's first key serves it all.
            return emit(self.graph, aten.slice.Tensor, self.keys, 0, 0, 1), None
        axis = self.axes.of(node)
        if axis is not None:
            return self.keys, axis
        if sample_dims(value_of(node), self.axes.symbol):
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} draws a tensor of shape {tuple(value_of(node).shape)} that "
                "mixes samples; it cannot be keyed; a way out is to give the samples a dimension of their own"
            )
        return self.step_keys, None

    def _draw(self, node: fx.Node, op: Any, dtype: torch.dtype | None = None) -> fx.Node:
        """A keyed draw of the shape of `node`, and of its dtype unless told otherwise."""
        value = value_of(node)
        keys, axis = self._place(node)
        sizes = [self._size(node, dim) for dim in range(value.dim())]
        options = {"dtype": dtype or value.dtype, "device": value.device}
        if axis is None or axis.outer == 1:
            return emit(self.graph, op, keys, sizes, self._index(), *_where(axis), like=node, **options)
        samples = emit(self.graph, aten.sym_size.int, self.keys, 0)
        inner = samples if axis.period == 1 else emit(self.graph, operator.mul, samples, axis.period)
        sizes[axis.axis : axis.axis + 1] = [axis.outer, inner]
        drawn = emit(
            self.graph,
            op,
            keys,
            sizes,
            self._index(),
            *_where(SampleAxis(axis.axis + 1, axis.period)),
            like=node,
            **options,
        )
        return self._flattened(drawn, axis)

    def _size(self, node: fx.Node, dim: int) -> Any:
        """The size of a dimension of `node`, as a number or as a node."""
        size = value_of(node).shape[dim]
        if not isinstance(size, torch.SymInt):
            return size
        given = argument(node, "size")
        if given is not None:
            return given[dim]
        return emit(self.graph, aten.sym_size.int, node.args[0], dim, like=node)

    def _with_own_samples(self, x: fx.Node, like: fx.Node, axis: SampleAxis) -> fx.Node:
        """[..., outer * samples * period, ...] as [..., outer, samples * period, ...]."""
        total = emit(self.graph, aten.sym_size.int, x, axis.axis, like=like)
        inner = emit(self.graph, operator.floordiv, total, axis.outer)
        sizes: list[Any] = [total if isinstance(s, torch.SymInt) else s for s in value_of(x).shape]
        sizes[axis.axis : axis.axis + 1] = [axis.outer, inner]
        return emit(self.graph, aten.view.default, x, sizes, like=like)

    def _flattened(self, x: fx.Node, axis: SampleAxis) -> fx.Node:
        return emit(self.graph, aten.flatten.using_ints, x, axis.axis, axis.axis + 1)

    def _below(self, node: fx.Node, probability: Any) -> fx.Node:
        uniform = self._draw(node, keyed_uniform, torch.float32)
        compare = aten.lt.Tensor if isinstance(probability, fx.Node) else aten.lt.Scalar
        hit = emit(self.graph, compare, uniform, probability, like=node)
        result = emit(self.graph, aten._to_copy.default, hit, dtype=value_of(node).dtype, like=node)
        if isinstance(probability, float):
            set_mean(result, probability)
        return result

    def _integers(self, node: fx.Node) -> fx.Node:
        low, high = argument(node, "low", 0), argument(node, "high")
        if not isinstance(low, int) or not isinstance(high, int):
            raise CaptureError(f"model: {node.target} in {module_of(node)} draws up to a bound that is not a constant")
        uniform = self._draw(node, keyed_uniform, torch.float32)
        scaled = emit(self.graph, aten.mul.Scalar, uniform, high - low, like=node)
        floored = emit(self.graph, aten.floor.default, scaled, like=node)
        moved = emit(self.graph, aten.add.Scalar, floored, low, like=node)
        return emit(self.graph, aten._to_copy.default, moved, dtype=value_of(node).dtype, like=node)

    def _uniform(self, node: fx.Node) -> fx.Node:
        low, high = argument(node, "from", 0.0), argument(node, "to", 1.0)
        return self._scaled(node, self._draw(node, keyed_uniform), high - low, low)

    def _normal(self, node: fx.Node) -> fx.Node:
        return self._scaled(
            node, self._draw(node, keyed_normal), argument(node, "std", 1.0), argument(node, "mean", 0.0)
        )

    def _scaled(self, node: fx.Node, drawn: fx.Node, factor: float, offset: float) -> fx.Node:
        scaled = emit(self.graph, aten.mul.Scalar, drawn, factor, like=node)
        return emit(self.graph, aten.add.Scalar, scaled, offset, like=node)

    def _exponential(self, node: fx.Node) -> fx.Node:
        """-log(1 - u) / rate, for u in [0, 1)."""
        uniform = self._draw(node, keyed_uniform, torch.float32)
        negated = emit(self.graph, aten.neg.default, uniform, like=node)
        logarithm = emit(self.graph, aten.log1p.default, negated, like=node)
        scaled = emit(self.graph, aten.mul.Scalar, logarithm, -1.0 / argument(node, "lambd", 1.0), like=node)
        return emit(self.graph, aten._to_copy.default, scaled, dtype=value_of(node).dtype, like=node)


def _where(axis: SampleAxis | None) -> tuple[int, int]:
    """The arguments `axis` and `period` of a keyed operator."""
    return (NO_AXIS, 1) if axis is None else (axis.axis, axis.period)
