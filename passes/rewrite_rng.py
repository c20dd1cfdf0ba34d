"""rewrite_rng: make every random draw a function of (seed, step, logical op, global sample, element).

Operators that draw from a hidden generator become operators that take per-sample keys. Each draw gets an index;
when units are cut, the index becomes local to the unit, so that equal units stay equal.

    before: y, _ = native_dropout(x, 0.1, True)
    after:  y = elaswave.keyed_dropout(x, keys, 0.1, op=0, axis=0, period=1)
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import (
    Program,
    Role,
    Source,
    calls,
    emit,
    is_aten,
    module_of,
    placeholders,
    set_source,
    source_of,
    value_of,
)
from elaswave_fx.program.samples import batch_symbol, sample_axis, sample_dims

aten = torch.ops.aten
_TAGGED_BUT_QUIET = ("aten.scaled_dot_product_attention",)


@dataclass(frozen=True)
class RewriteRng:
    """Give every random draw a key that does not know ranks, stages or call order."""

    name: ClassVar[str] = "rewrite_rng"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        graph = program.graph.graph
        _expand_attention_dropout(graph)
        rewriter = _Rewriter(program)
        for node in list(calls(graph)):
            rewriter.rewrite(node)
        graph.eliminate_dead_code()
        rewriter.drop_unused_keys()
        refuse_hidden_randomness(graph, self.name)
        program.graph.recompile()
        return program


def refuse_hidden_randomness(graph: fx.Graph, after: str) -> None:
    """Raise CaptureError for an operator that still draws randomness by itself."""
    for node in calls(graph):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or is_aten(node, *_TAGGED_BUT_QUIET) or _draws_nothing(node):
            continue
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise CaptureError(
                f"model: {target} in {module_of(node)} draws random numbers that cannot be keyed ({after}); "
                "use dropout, bernoulli, rand, randn or randint"
            )


def _draws_nothing(node: fx.Node) -> bool:
    """Attention kernels carry the tag of randomness even when their dropout is zero."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    value = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return value == 0.0


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _expand_attention_dropout(graph: fx.Graph) -> None:
    """Attention with dropout becomes softmax(q k^T * scale + mask), dropout, times v (as PyTorch's docs define it)."""
    for node in list(calls(graph)):
        if is_aten(node, "aten.scaled_dot_product_attention") and _argument(node, "dropout_p", 0.0):
            with graph.inserting_before(node):
                result = _attention(graph, node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)


def _attention(graph: fx.Graph, node: fx.Node) -> fx.Node:
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    groups = value_of(q).shape[1] // value_of(k).shape[1] if _argument(node, "enable_gqa", False) else 1
    if groups > 1:
        k = emit(graph, aten.repeat_interleave.self_int, k, groups, 1, like=node)
        v = emit(graph, aten.repeat_interleave.self_int, v, groups, 1, like=node)
    scale = _argument(node, "scale", None) or 1.0 / math.sqrt(int(value_of(q).shape[-1]))
    transposed = emit(graph, aten.transpose.int, k, -2, -1, like=node)
    scores = emit(graph, aten.matmul.default, q, transposed, like=node)
    scores = emit(graph, aten.mul.Scalar, scores, scale, like=node)
    mask = _argument(node, "attn_mask", None)
    if _argument(node, "is_causal", False):
        size = [int(value_of(q).shape[-2]), int(value_of(k).shape[-2])]
        ones = emit(graph, aten.new_ones.default, q, size, dtype=torch.bool, like=node)
        mask = emit(graph, aten.tril.default, ones, like=node)
    if mask is not None and value_of(mask).dtype == torch.bool:
        hidden = emit(graph, aten.logical_not.default, mask, like=node)
        scores = emit(graph, aten.masked_fill.Scalar, scores, hidden, float("-inf"), like=node)
    elif mask is not None:
        scores = emit(graph, aten.add.Tensor, scores, mask, like=node)
    weights = emit(graph, aten._safe_softmax.default, scores, -1, like=node)
    dropped = emit(graph, aten.native_dropout.default, weights, float(_argument(node, "dropout_p", 0.0)), True, like=node)
    kept = emit(graph, operator.getitem, dropped, 0, like=node)
    return emit(graph, aten.matmul.default, kept, v, like=node)


class _Rewriter:
    """Holds the key inputs and the running index of draws while one graph is rewritten."""

    def __init__(self, program: Program) -> None:
        self.graph = program.graph.graph
        self.symbol = batch_symbol(program)
        self.next_index = 0
        inputs = placeholders(self.graph)
        example = next(value_of(n) for n in inputs if source_of(n).role == Role.INPUT)
        self.keys = self._key_input(inputs[-1], Role.KEYS, example.new_empty((example.shape[0],), dtype=torch.int64))
        self.step_keys = self._key_input(self.keys, Role.STEP_KEYS, example.new_empty((1,), dtype=torch.int64))

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
        elif is_aten(node, "aten.bernoulli.default"):
            self._replace(node, lambda: self._below(node, node.args[0]))
        elif is_aten(node, "aten.bernoulli.p"):
            self._replace(node, lambda: self._below(node, node.args[1]))
        elif is_aten(node, "aten.rand", "aten.rand_like"):
            self._replace(node, lambda: self._draw(node, "keyed_uniform", value_of(node)))
        elif is_aten(node, "aten.randn", "aten.randn_like"):
            self._replace(node, lambda: self._draw(node, "keyed_normal", value_of(node)))
        elif is_aten(node, "aten.randint", "aten.randint_like"):
            self._replace(node, lambda: self._integers(node))

    def _replace(self, node: fx.Node, make: Any) -> None:
        with self.graph.inserting_before(node):
            node.replace_all_uses_with(make())
        self.graph.erase_node(node)

    def _dropout(self, node: fx.Node) -> None:
        x, p, train = node.args
        assert isinstance(x, fx.Node)
        if any(user.args[1] != 0 and user.users for user in node.users):
            raise CaptureError(f"model: the mask of {node.target} in {module_of(node)} is used; it cannot be keyed")
        kept = x
        if train is not False and p != 0.0:
            op = torch.ops.elaswave.keyed_dropout.default
            with self.graph.inserting_before(node):
                keys, axis, period = self._place(value_of(x))
                kept = emit(self.graph, op, x, keys, float(p), self._index(), axis, period, like=node)  # type: ignore[arg-type]
        for user in list(node.users):
            user.replace_all_uses_with(kept)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _index(self) -> int:
        self.next_index += 1
        return self.next_index - 1

    def _place(self, value: torch.Tensor) -> tuple[fx.Node, int, int]:
        """The keys to draw with and where the samples lie in a drawn tensor."""
        if self.symbol is None:
            # A program of one fixed batch size runs granule by granule: the granule's first key serves it all.
            return emit(self.graph, aten.slice.Tensor, self.keys, 0, 0, 1), -1, 1
        axis = sample_axis(value, self.symbol)
        if axis is not None:
            return self.keys, axis.axis, axis.period
        if sample_dims(value, self.symbol):
            raise CaptureError(f"model: a random tensor of shape {tuple(value.shape)} mixes samples; it cannot be keyed")
        return self.step_keys, -1, 1

    def _draw(self, node: fx.Node, name: str, like: torch.Tensor) -> fx.Node:
        keys, axis, period = self._place(like)
        op = getattr(torch.ops.elaswave, name).default
        size = [self._size(node, like, dim) for dim in range(like.dim())]
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return emit(
            self.graph, op, keys, size, self._index(), axis, period, dtype=dtype, device=like.device, like=node
        )

    def _size(self, node: fx.Node, like: torch.Tensor, dim: int) -> Any:
        size = like.shape[dim]
        if not isinstance(size, torch.SymInt):
            return int(size)
        given = node.args[0]
        if isinstance(given, (tuple, list)):
            return given[dim]
        return emit(self.graph, aten.sym_size.int, given, dim, like=node)

    def _below(self, node: fx.Node, probability: Any) -> fx.Node:
        value = value_of(node)
        uniform = self._draw(node, "keyed_uniform", value)
        compare = aten.lt.Tensor if isinstance(probability, fx.Node) else aten.lt.Scalar
        hit = emit(self.graph, compare, uniform, probability, like=node)
        return emit(self.graph, aten._to_copy.default, hit, dtype=value.dtype, like=node)

    def _integers(self, node: fx.Node) -> fx.Node:
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        named = dict(zip(names, node.args, strict=False))
        low, high = named.get("low", 0), named["high"]
        value = value_of(node)
        uniform = self._draw(node, "keyed_uniform", value.to(torch.float32))
        scaled = emit(self.graph, aten.mul.Scalar, uniform, high - low, like=node)  # type: ignore[operator]
        floored = emit(self.graph, aten.floor.default, scaled, like=node)
        moved = emit(self.graph, aten.add.Scalar, floored, low, like=node)
        return emit(self.graph, aten._to_copy.default, moved, dtype=value.dtype, like=node)
