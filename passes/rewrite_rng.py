"""rewrite_rng: make every random draw a function of (seed, step, logical op, global sample, element).

Operators that draw from a hidden generator become operators that take per-sample keys. Each draw gets an index;
when units are cut, the index becomes local to the unit, so that equal units stay equal.

    before: y, _ = native_dropout(x, 0.1, True)
    after:  y = elaswave.keyed_dropout(x, keys, 0.1, op=0, axis=0, period=1)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.batch_size import sample_dims
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
    mean_of,
    module_of,
    placeholders,
    set_mean,
    set_source,
    source_of,
    value_of,
)
from elaswave_fx.program.keyed_draws import NO_AXIS, UNIFORM, keyed_dropout, keyed_normal, keyed_uniform
from elaswave_fx.program.samples import locate_samples

aten = torch.ops.aten

_SELU_LIMIT = 1.7580993408473766
"""Negated replacement of an element dropped by alpha dropout (Klambauer et al. 2017, section 3)."""

_DISTINCT = 1 << 24
"""Number of distinct values of a uniform draw."""

_SMALLEST = 2.0**-24
"""What an exponential draw of rate 1 is where the uniform one is 0; torch does the same on GPUs."""


@dataclass(frozen=True)
class RewriteRng:
    """Key every random draw independently of ranks, stages and call order."""

    name: ClassVar[str] = "rewrite_rng"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        graph = program.graph.graph
        rewriter = _Rewriter(program)
        for node in list(calls(graph)):
            rewriter.rewrite(node)
        for node in calls(graph):
            _note_rounded_draw(node)
            _note_alpha_dropout(node)
        graph.eliminate_dead_code()
        rewriter.drop_unused_keys()
        refuse_hidden_randomness(graph, self.name)
        program.graph.recompile()
        return program


def refuse_hidden_randomness(graph: fx.Graph, after: str) -> None:
    """Raise CaptureError for an operator that still draws from a hidden generator."""
    for node in calls(graph):
        if draws_randomness(node):
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} draws random numbers that cannot be keyed ({after}); a way "
                "out is to compute them from torch.rand or torch.randn, or to make them part of the data"
            )


def _note_rounded_draw(node: fx.Node) -> None:
    """Note the mean of floor(rand + p), a draw of ones with probability p."""
    if not is_aten(node, "aten.floor"):
        return
    added = node.args[0]
    if isinstance(added, fx.Node) and is_aten(added, "aten.add.Tensor", "aten.add.Scalar"):
        drawn, p = added.args[:2]
        if isinstance(drawn, fx.Node) and is_aten(drawn, UNIFORM) and isinstance(p, float) and 0.0 <= p <= 1.0:
            set_mean(node, p)


def _note_alpha_dropout(mask: fx.Node) -> None:
    """Note the means of alpha dropout, which scales by mask * a and shifts by (mask - 1) * a * limit + a * limit * p;
    evaluation does neither."""
    keep = mean_of(mask)
    if keep is None or not 0.0 < keep < 1.0:
        return
    p = 1.0 - keep
    a = ((_SELU_LIMIT**2 * p + 1.0) * keep) ** -0.5
    scale, shift = _next(mask, "aten.mul", a), _next(mask, "aten.add", -1.0)
    shift = _next(_next(shift, "aten.mul", a * _SELU_LIMIT), "aten.add", a * _SELU_LIMIT * p)
    if scale is not None and shift is not None:
        set_mean(scale, 1.0)
        set_mean(shift, 0.0)


def _next(node: fx.Node | None, operator: str, number: float) -> fx.Node | None:
    """The user of a node that applies an operator with a number."""
    for user in node.users if node is not None else ():
        if is_aten(user, operator) and isinstance(user.args[1], (int, float)) and math.isclose(user.args[1], number):
            return user
    return None


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
            "aten.bernoulli": lambda node: self._below(node, argument(node, "p", 0.5)),
            "aten.rand": lambda node: self._draw(node, keyed_uniform),
            "aten.rand_like": lambda node: self._draw(node, keyed_uniform),
            "aten.randn": lambda node: self._draw(node, keyed_normal),
            "aten.randn_like": lambda node: self._draw(node, keyed_normal),
            "aten.randint": self._integers,
            "aten.randint_like": self._integers,
            "aten.random.from": self._integers,
            "aten.random.to": self._integers,
            "aten.uniform": self._uniform,
            "aten.normal_functional": self._normal,
            "aten.normal": self._normal,
            "aten.log_normal": lambda node: emit(self.graph, aten.exp.default, self._normal(node), like=node),
            "aten.exponential": self._exponential,
            "aten.geometric": self._geometric,
            "aten.cauchy": self._cauchy,
            "aten.rrelu": self._leaky,
            "aten.multinomial": self._multinomial,
            "aten.randperm": self._permutation,
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
        """The keys and the sample axis of a draw of the tensor of `node`."""
        if self.axes.symbol is None:
            # A program of one fixed batch size runs granule by granule: the granule's first key serves all of it.
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
        """A keyed draw of the shape of `node`, by default of its dtype."""
        value = value_of(node)
        if value.is_complex():
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} draws complex numbers; a way out is to draw real and "
                "imaginary parts, each 0.5**0.5 * torch.randn(...), and torch.complex(real, imaginary)"
            )
        keys, axis = self._place(node)
        sizes: list[Any] = list(value.shape)
        options = {"dtype": dtype or value.dtype, "device": value.device}
        if axis is not None:
            samples = emit(self.graph, aten.sym_size.int, self.keys, 0)
            inner = samples if axis.period == 1 else emit(self.graph, operator.mul, samples, axis.period)
            sizes[axis.axis : axis.axis + 1] = [inner] if axis.outer == 1 else [axis.outer, inner]
        if axis is None or axis.outer == 1:
            return emit(self.graph, op, keys, sizes, self._index(), *_where(axis), like=node, **options)
        where = _where(SampleAxis(axis.axis + 1, axis.period))
        drawn = emit(self.graph, op, keys, sizes, self._index(), *where, like=node, **options)
        return self._flattened(drawn, axis)

    def _with_own_samples(self, x: fx.Node, like: fx.Node, axis: SampleAxis) -> fx.Node:
        """The tensor [..., outer * samples * period, ...] as [..., outer, samples * period, ...]."""
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
        low = argument(node, "from", argument(node, "low", 0))
        high = argument(node, "to", argument(node, "high"))
        if not isinstance(low, int) or not isinstance(high, int):
            raise CaptureError(f"model: {node.target} in {module_of(node)} draws up to a bound that is not a constant")
        if high - low > _DISTINCT:
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} draws from {high - low} integers; a keyed draw tells "
                f"{_DISTINCT} apart; a way out is to compose two draws"
            )
        uniform = self._draw(node, keyed_uniform, torch.float32)
        scaled = emit(self.graph, aten.mul.Scalar, uniform, high - low, like=node)
        floored = emit(self.graph, aten.floor.default, scaled, like=node)
        moved = emit(self.graph, aten.add.Scalar, floored, low, like=node)
        return emit(self.graph, aten._to_copy.default, moved, dtype=value_of(node).dtype, like=node)

    def _uniform(self, node: fx.Node) -> fx.Node:
        low, high = argument(node, "from", 0.0), argument(node, "to", 1.0)
        return self._scaled(node, self._draw(node, keyed_uniform), high - low, low)

    def _normal(self, node: fx.Node) -> fx.Node:
        """mean + std * n; either may be a tensor, to which no gradient flows, as in torch."""
        default = (1.0, 2.0) if is_aten(node, "aten.log_normal") else (0.0, 1.0)
        mean, std = argument(node, "mean", default[0]), argument(node, "std", default[1])
        return self._scaled(node, self._draw(node, keyed_normal), std, mean)

    def _scaled(self, node: fx.Node, drawn: fx.Node, factor: Any, offset: Any) -> fx.Node:
        """drawn * factor + offset, by numbers or by tensors."""
        for scalar, tensor, by in (
            (aten.mul.Scalar, aten.mul.Tensor, factor),
            (aten.add.Scalar, aten.add.Tensor, offset),
        ):
            steady = emit(self.graph, aten.detach.default, by, like=node) if isinstance(by, fx.Node) else by
            drawn = emit(self.graph, tensor if isinstance(by, fx.Node) else scalar, drawn, steady, like=node)
        return drawn

    def _exponential(self, node: fx.Node) -> fx.Node:
        """-log(1 - u) / rate, for u in [0, 1); never 0 in fp32, as in torch, because many take its logarithm."""
        negative = emit(self.graph, aten.clamp.default, self._log_uniform(node, node), None, -_SMALLEST, like=node)
        scaled = emit(self.graph, aten.mul.Scalar, negative, -1.0 / argument(node, "lambd", 1.0), like=node)
        return emit(self.graph, aten._to_copy.default, scaled, dtype=value_of(node).dtype, like=node)

    def _log_uniform(self, node: fx.Node, shape: fx.Node) -> fx.Node:
        """log(1 - u), for u in [0, 1) of the shape of a node; never minus infinity."""
        uniform = self._draw(shape, keyed_uniform, torch.float32)
        negated = emit(self.graph, aten.neg.default, uniform, like=node)
        return emit(self.graph, aten.log1p.default, negated, like=node)

    def _geometric(self, node: fx.Node) -> fx.Node:
        """1 + floor(log(1 - u) / log(1 - p)): trials until the first success of probability p."""
        p = argument(node, "p")
        failed = -1.0 / math.log1p(-p) if p < 1.0 else 0.0
        scaled = emit(self.graph, aten.mul.Scalar, self._log_uniform(node, node), -failed, like=node)
        counted = emit(self.graph, aten.add.Scalar, emit(self.graph, aten.floor.default, scaled), 1.0, like=node)
        return emit(self.graph, aten._to_copy.default, counted, dtype=value_of(node).dtype, like=node)

    def _cauchy(self, node: fx.Node) -> fx.Node:
        """median + sigma * tan(pi * (u - 1/2))."""
        angle = self._scaled(node, self._draw(node, keyed_uniform, torch.float32), math.pi, -math.pi / 2)
        tangent = emit(self.graph, aten.tan.default, angle, like=node)
        spread = self._scaled(node, tangent, argument(node, "sigma", 1.0), argument(node, "median", 0.0))
        return emit(self.graph, aten._to_copy.default, spread, dtype=value_of(node).dtype, like=node)

    def _leaky(self, node: fx.Node) -> fx.Node:
        """x where it is positive, else x times a slope: drawn in training, its mean in evaluation."""
        x, low, high = node.args[0], argument(node, "lower", 1 / 8), argument(node, "upper", 1 / 3)
        mean = (low + high) / 2
        if not argument(node, "training", False):
            return emit(self.graph, aten.leaky_relu.default, x, mean, like=node)
        slope = self._scaled(node, self._draw(node, keyed_uniform), high - low, low)
        set_mean(slope, mean)
        leaked = emit(self.graph, aten.mul.Tensor, x, slope, like=node)
        positive = emit(self.graph, aten.gt.Scalar, x, 0, like=node)
        return emit(self.graph, aten.where.self, positive, x, leaked, like=node)

    def _multinomial(self, node: fx.Node) -> fx.Node:
        """The places of the largest p / e, for exponential draws e: one race for all numbers, or one for each."""
        weights, number = node.args[0], argument(node, "num_samples")
        assert isinstance(weights, fx.Node)
        races = argument(node, "replacement", False) and number != 1
        if races:
            sizes: list[Any] = [-1] * (value_of(weights).dim() + 1)
            sizes[-2] = number
            apart = emit(self.graph, aten.unsqueeze.default, weights, -2, like=node)
            self.axes.note(apart)
            weights = emit(self.graph, aten.expand.default, apart, sizes, like=node)
            self.axes.note(weights)
        negative = self._log_uniform(node, weights)
        waited = emit(self.graph, aten.rsub.Scalar, negative, 1e-30, like=node)  # not zero: 0 / 0 would win
        steady = emit(self.graph, aten.detach.default, weights, like=node)
        score = emit(self.graph, aten.div.Tensor, steady, waited, like=node)
        if races:
            return emit(self.graph, aten.argmax.default, score, -1, like=node)
        best = emit(self.graph, aten.topk.default, score, number, -1, like=node)
        return emit(self.graph, operator.getitem, best, 1, like=node)

    def _permutation(self, node: fx.Node) -> fx.Node:
        """The order of as many uniform draws."""
        uniform = self._draw(node, keyed_uniform, torch.float32)
        order = emit(self.graph, aten.argsort.stable, uniform, stable=True, dim=0, like=node)
        return emit(self.graph, aten._to_copy.default, order, dtype=value_of(node).dtype, like=node)


def _where(axis: SampleAxis | None) -> tuple[int, int]:
    """The arguments `axis` and `period` of a keyed operator."""
    return (NO_AXIS, 1) if axis is None else (axis.axis, axis.period)
