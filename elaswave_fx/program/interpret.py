"""Interpreted execution of a program's units in sequence, as the reference of analyses and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from elaswave_fx.program.ir import Program, Result, Role, Unit, placeholders, source_of

Tensors = Mapping[str, torch.Tensor]
Graph = tuple[fx.GraphModule, Sequence[Result]]


def interpret_units(
    program: Program, state: Tensors, batch: Tensors, keys: torch.Tensor, graph_of: Callable[[Unit], Graph]
) -> dict[str, torch.Tensor]:
    """Outputs of the units' graphs by name, including "loss" and "count". `keys` int64 [samples] serve every unit."""
    found: dict[str, torch.Tensor] = {}
    invariants = _invariants(program, state)
    for unit in program.units:
        inputs = []
        for source in unit.sources:
            if source.role == Role.INPUT:
                inputs.append(batch[source.name])
            elif source.role == Role.KEYS:
                inputs.append(keys)
            elif source.role == Role.STEP_KEYS:
                inputs.append(keys[:1])
            elif source.role == Role.VALUE:
                inputs.append(found[source.name])
            elif source.role == Role.CONSTANT:
                inputs.append(invariants.get(source.name, program.tensors.get(source.name)))
            else:
                inputs.append(state[source.name])
        graph, results = graph_of(unit)
        for result, value in zip(results, graph(*inputs), strict=True):
            found[result.name or result.kind.value] = value
    return found


def _invariants(program: Program, state: Tensors) -> dict[str, torch.Tensor]:
    module = program.invariants
    assert module is not None
    sources = [source_of(node) for node in placeholders(module.graph)]
    tensors = [program.tensors[s.name] if s.role == Role.CONSTANT else state[s.name] for s in sources]
    return dict(zip(module.meta["names"], module(*tensors), strict=True))
