"""Buffers as they may be after many steps, for checks: a counter may bring in a term that is 0 in the first ones.

later_states(program, {"steps": 0, …})    ->  {"steps": 7, …}, {"steps": 1000, …}; none if no buffer counts
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from elaswave_fx.program.ir import Program, ResultKind, Role, output_nodes, placeholders, source_of

_STEPS = (7, 1000)
"""In a window, and in a period, that one of them is not in: annealing may be cyclical."""


def later_states(program: Program, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """`state` with advanced counters: buffers of one number that forward updates, and on which loss or count depend."""
    names = [name for name in program.updated_buffers() if state[name].numel() == 1 and state[name].dtype != torch.bool]
    counters = [name for name in names if _matters(program, name)]
    later = ({name: state[name] + steps for name in counters} for steps in _STEPS if counters)
    return tuple({**state, **advanced} for advanced in later)


def _matters(program: Program, name: str) -> bool:
    """Whether the loss or the count is computed from a buffer."""
    reached: set[fx.Node] = {
        node
        for node in placeholders(program.graph.graph)
        if source_of(node).role == Role.BUFFER and source_of(node).name == name
    }
    for node in program.graph.graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    outputs = zip(output_nodes(program.graph.graph), program.results, strict=True)
    return any(node in reached for node, result in outputs if result.kind in (ResultKind.LOSS, ResultKind.COUNT))
