"""Shapes of losses that torch works out wrongly: with `reduction="none"` and a symbolic batch size, run_decompositions
says of some composite losses that they have no dimensions, which whoever sends them between units believes.

    mend_loss_shapes(exported.graph)    # cross_entropy_loss(scores, y, None, 0): [] -> [B]
"""

from __future__ import annotations

import torch
from torch import fx

from elaswave_fx.program.ir import calls, symbolic_sizes, tensors_in, value_of


def mend_loss_shapes(graph: fx.Graph) -> None:
    """Work out again the values of calls that have a reduction, and of what is made of them."""
    mended: set[fx.Node] = set()
    for node in calls(graph):
        reduces = isinstance(node.target, torch._ops.OpOverload) and _reduces(node.target)
        if not reduces and mended.isdisjoint(node.all_input_nodes):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        with symbolic_sizes(getattr(value_of(node), "fake_mode", None)):
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if not reduces or _shapes(value) != _shapes(value_of(node)):
            mended.add(node)
        node.meta["val"] = value


def _shapes(value: object) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in(value)]


def _reduces(operator: torch._ops.OpOverload) -> bool:
    return any(argument.name == "reduction" for argument in operator._schema.arguments)
