"""Invariants of every program between passes, checked by the runner after each pass.

Before units exist: the graph is well formed, reads only known nodes and returns the declared results. After: values
flow to later units only, every value has one producer, and both sides agree on gradients.
"""

from __future__ import annotations

from elaswave_fx.errors import PassError
from elaswave_fx.program.batch_size import batch_symbol
from elaswave_fx.program.ir import (
    BorderValue,
    Program,
    ResultKind,
    Role,
    Unit,
    calls,
    output_nodes,
    placeholders,
    source_of,
    value_of,
)


def verify(program: Program, after: str) -> None:
    """Raise PassError with the pass after which a rule was broken."""
    try:
        program.graph.graph.lint()
    except RuntimeError as error:
        raise PassError(f"{after}: the graph is malformed: {error}") from error
    outputs = output_nodes(program.graph.graph)
    if len(outputs) != len(program.results):
        raise PassError(f"{after}: the graph returns {len(outputs)} values for {len(program.results)} results")
    for node in placeholders(program.graph.graph):
        source = source_of(node)
        known = {Role.PARAM: program.params, Role.BUFFER: program.buffers, Role.CONSTANT: program.tensors}
        if source.role in known and source.name not in known[source.role]:
            raise PassError(f"{after}: input {node.name} reads the unknown {source.role.value} '{source.name}'")
    for node in calls(program.graph.graph):
        if value_of(node) is None:
            raise PassError(f"{after}: node {node.name} has no value; passes add calls through `emit`")
    if program.dynamic_batch and batch_symbol(program) is None:
        raise PassError(f"{after}: the batch size became a constant; passes keep it symbolic")
    if program.units:
        _verify_units(program, after)


def _verify_units(program: Program, after: str) -> None:
    values = {value.name: value for value in program.values}
    produced: dict[str, int] = {}
    for unit in program.units:
        _verify_interface(unit, after)
        for source, grad in zip(unit.sources, unit.grad_inputs, strict=True):
            if source.role == Role.VALUE:
                _verify_read(unit, source.name, grad, values, after)
        for result, grad in zip(unit.results, unit.grad_results, strict=True):
            if result.kind != ResultKind.VALUE:
                continue
            value = values.get(result.name)
            if value is None or value.producer != unit.index or value.has_grad != grad or result.name in produced:
                raise PassError(f"{after}: unit {unit.index} gives {result.name}, which is declared as {value}")
            produced[result.name] = unit.index
    missing = sorted(values.keys() - produced.keys())
    if missing:
        raise PassError(f"{after}: no unit gives the values {', '.join(missing)}")
    for kind in (ResultKind.LOSS, ResultKind.COUNT):
        givers = [unit.index for unit in program.units for result in unit.results if result.kind == kind]
        if len(givers) != 1:
            raise PassError(f"{after}: the {kind.value} is given by units {givers}; exactly one gives it")


def _verify_interface(unit: Unit, after: str) -> None:
    read = tuple(source_of(node) for node in placeholders(unit.graph.graph))
    returned = output_nodes(unit.graph.graph)
    if read != unit.sources or len(returned) != len(unit.results) or None in returned:
        raise PassError(f"{after}: unit {unit.index}: its graph does not read and return what the unit declares")


def _verify_read(unit: Unit, name: str, grad: bool, values: dict[str, BorderValue], after: str) -> None:
    value = values.get(name)
    if value is None:
        raise PassError(f"{after}: unit {unit.index} reads {name}, which no unit gives")
    if value.producer >= unit.index:
        raise PassError(
            f"{after}: unit {unit.index} reads {name} of unit {value.producer}; values only flow to later units"
        )
    if unit.index not in value.consumers or grad != value.has_grad:
        raise PassError(f"{after}: unit {unit.index} reads {name}, which is declared as {value}")
