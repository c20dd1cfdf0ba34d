"""recognize_causal: give attention its `is_causal` flag back where the export wrote the mask out.

A written-out mask would be turned into floats and kept for every block; the flag costs nothing.

    before: scaled_dot_product_attention(q, k, v, tril(ones(64, 64)))
    after:  scaled_dot_product_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.program.dependence import Nature, natures
from elaswave_fx.program.ir import Program, Role, calls, is_aten, source_of, value_of


@dataclass(frozen=True)
class RecognizeCausal:
    """Replace constant causal masks by the flag, and masks that hide nothing by none."""

    name: ClassVar[str] = "recognize_causal"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        kinds = natures(program)
        masks: dict[fx.Node, torch.Tensor | None] = {}
        for node in calls(program.graph.graph):
            mask = _mask(node)
            if mask is None or kinds.get(mask) != Nature.FIXED or value_of(mask).dtype != torch.bool:
                continue
            if mask not in masks:
                masks[mask] = _constant(program, mask)
            _simplify(node, masks[mask])
        program.graph.graph.eliminate_dead_code()
        program.graph.recompile()
        return program


def _mask(node: fx.Node) -> fx.Node | None:
    if not is_aten(node, "aten.scaled_dot_product_attention"):
        return None
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if not isinstance(given, fx.Node):
        return None
    expanded = given.args[0] if is_aten(given, "aten.expand") else given
    return expanded if isinstance(expanded, fx.Node) else None


def _simplify(node: fx.Node, mask: torch.Tensor | None) -> None:
    if mask is None or mask.dim() < 2:
        return
    size = mask.shape[-2:]
    causal = torch.ones(size, dtype=torch.bool).tril()
    if size[0] == size[1] and torch.equal(mask, causal.expand(mask.shape)):
        _set_flags(node, causal=True)
    elif bool(mask.all()):
        _set_flags(node, causal=False)


def _set_flags(node: fx.Node, causal: bool) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given["attn_mask"], given["is_causal"] = None, causal or given.get("is_causal", False)
    node.args = tuple(given.pop(name) for name in names[:3])
    node.kwargs = given


def _constant(program: Program, node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on nothing but constants of the program; None if it reads a buffer."""
    known: dict[fx.Node, Any] = {}

    def value(item: fx.Node) -> Any:
        if item not in known:
            if item.op == "placeholder":
                source = source_of(item)
                known[item] = program.tensors[source.name] if source.role == Role.CONSTANT else None
            else:
                args, kwargs = fx.map_arg((item.args, item.kwargs), value)
                reads_buffer = any(known[source] is None for source in item.all_input_nodes)
                known[item] = None if reads_buffer else item.target(*args, **kwargs)  # type: ignore[operator]
        return known[item]

    return value(node)
