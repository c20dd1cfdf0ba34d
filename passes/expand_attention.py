"""expand_attention: attention with dropout becomes plain operators, so that its dropout can be keyed.

before: scaled_dot_product_attention(q, k, v, mask, 0.1)
after:  native_dropout(softmax(q k^T * scale + mask), 0.1) v     # as PyTorch's documentation defines it
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from elaswave_fx.program.ir import Program, argument, calls, emit, fixed_size, is_aten, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class ExpandAttention:
    """Spell out attention where it draws random numbers inside."""

    name: ClassVar[str] = "expand_attention"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        graph = program.graph.graph
        masks: dict[tuple[int, int], fx.Node] = {}
        for node in list(calls(graph)):
            if is_aten(node, "aten.scaled_dot_product_attention") and argument(node, "dropout_p", 0.0):
                with graph.inserting_before(node):
                    result = _expanded(graph, node, masks)
                node.replace_all_uses_with(result)
                graph.erase_node(node)
        program.graph.recompile()
        return program


def _expanded(graph: fx.Graph, node: fx.Node, masks: dict[tuple[int, int], fx.Node]) -> fx.Node:
    query, key, value = node.args[:3]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    if argument(node, "enable_gqa", False):
        groups = fixed_size(value_of(query).shape[-3]) // fixed_size(value_of(key).shape[-3])
        key = emit(graph, aten.repeat_interleave.self_int, key, groups, -3, like=node)
        value = emit(graph, aten.repeat_interleave.self_int, value, groups, -3, like=node)
    scale = argument(node, "scale")
    scale = 1.0 / math.sqrt(fixed_size(value_of(query).shape[-1])) if scale is None else scale
    transposed = emit(graph, aten.transpose.int, key, -2, -1, like=node)
    scores = emit(graph, aten.matmul.default, query, transposed, like=node)
    scores = emit(graph, aten.mul.Scalar, scores, scale, like=node)
    scores = _masked(graph, node, scores, masks)
    weights = emit(graph, aten._safe_softmax.default, scores, -1, like=node)
    probability = float(argument(node, "dropout_p", 0.0))
    dropped = emit(graph, aten.native_dropout.default, weights, probability, True, like=node)
    kept = emit(graph, operator.getitem, dropped, 0, like=node)
    return emit(graph, aten.matmul.default, kept, value, like=node)


def _masked(graph: fx.Graph, node: fx.Node, scores: fx.Node, masks: dict[tuple[int, int], fx.Node]) -> fx.Node:
    """Scores with -inf where the mask is False, or plus the mask of numbers."""
    mask = argument(node, "attn_mask")
    if argument(node, "is_causal", False):
        hidden = _future(graph, scores, masks)
    elif mask is None:
        return scores
    elif value_of(mask).dtype != torch.bool:
        return emit(graph, aten.add.Tensor, scores, mask, like=node)
    else:
        hidden = emit(graph, aten.logical_not.default, mask, like=node)
    return emit(graph, aten.masked_fill.Scalar, scores, hidden, float("-inf"), like=node)


def _future(graph: fx.Graph, scores: fx.Node, masks: dict[tuple[int, int], fx.Node]) -> fx.Node:
    """The positions that a causal mask hides; shared by all attentions of the same size."""
    size = (fixed_size(value_of(scores).shape[-2]), fixed_size(value_of(scores).shape[-1]))
    if size not in masks:
        ones = emit(graph, aten.ones.default, list(size), dtype=torch.bool, device=value_of(scores).device)
        masks[size] = emit(graph, aten.triu.default, ones, 1)
    return masks[size]
