"""Shapes of losses that torch works out wrongly: with `reduction="none"` and a symbolic batch size, run_decompositions
says of some composite losses that they have no dimensions, which whoever sends them between units believes.

    mend_loss_shapes(exported.graph)    # cross_entropy_loss(scores, y, None, 0): [] -> [B]
"""

from __future__ import annotations

import torch
from torch import fx

from elaswave_fx.program.ir import calls, symbolic_sizes, value_of


def mend_loss_shapes(graph: fx.Graph) -> None:
    """Work out again the values of calls that have a reduction."""
    for node in calls(graph):
        if not isinstance(node.target, torch._ops.OpOverload) or not _reduces(node.target):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        with symbolic_sizes(getattr(value_of(node), "fake_mode", None)):
            node.meta["val"] = node.target(*args, **kwargs)


def _reduces(operator: torch._ops.OpOverload) -> bool:
    return any(argument.name == "reduction" for argument in operator._schema.arguments)
