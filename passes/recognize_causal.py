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

from elaswave_fx.program.dependence import Nature, constant_value, natures
from elaswave_fx.program.ir import Program, argument, calls, is_aten, value_of


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
                masks[mask] = constant_value(program, mask)
            _simplify(node, masks[mask])
        program.graph.graph.eliminate_dead_code()
        program.graph.recompile()
        return program


def _mask(node: fx.Node) -> fx.Node | None:
    if not is_aten(node, "aten.scaled_dot_product_attention"):
        return None
    given = argument(node, "attn_mask")
    expanded = given.args[0] if isinstance(given, fx.Node) and is_aten(given, "aten.expand") else given
    return expanded if isinstance(expanded, fx.Node) else None


def _simplify(node: fx.Node, mask: torch.Tensor | None) -> None:
    if mask is None:
        return
    query, key = value_of(node.args[0]), value_of(node.args[1])  # type: ignore[arg-type]
    if bool(mask.all()):
        _set_mask(node, causal=bool(argument(node, "is_causal", False)))
    elif mask.dim() >= 2 and mask.shape[-2:] == (query.shape[-2], key.shape[-2]) and _is_causal(mask):
        _set_mask(node, causal=True)


def _is_causal(mask: torch.Tensor) -> bool:
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return torch.equal(mask, causal.expand(mask.shape))


def _set_mask(node: fx.Node, causal: bool) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given["attn_mask"], given["is_causal"] = None, causal
    node.args = tuple(given.pop(name) for name in names[:3])
    node.kwargs = given
