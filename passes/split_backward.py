"""split_backward: split every backward program in two halves, so that a schedule can run the second one later.

The first half gives the gradients that the previous stage waits for. Other inputs of the second half are held between
them. It gives the gradients of parameters, which only the reduction waits for.

    backward(saved, dh') -> (dh, dW)    =>    inputs(saved, dh') -> (dh, held)    weights(held) -> dW

Every call runs once, in the order and on the operands of the whole program, so no bit changes. A convolution, whose one
call gives both kinds of gradients, is called once for each kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from elaswave_fx.errors import PassError
from elaswave_fx.passes.estimate_cost import VIEWS, operations
from elaswave_fx.passes.recompute import Derivative, Halves, extract
from elaswave_fx.program.ir import (
    Program,
    Role,
    Unit,
    argument,
    calls,
    copy_graph,
    emit,
    is_aten,
    is_getitem,
    output_nodes,
    placeholders,
)

_MASKED = "aten.convolution_backward"
_OF_INPUT = 0
"""Position of the input's gradient among the results of a convolution; the others are of parameters."""


@dataclass(frozen=True)
class SplitBackward:
    """Delay gradients of parameters behind the gradients that the previous stage waits for."""

    name: ClassVar[str] = "split_backward"

    def apply(self, program: Program) -> Program:
        kinds: dict[str, Any] = {}
        for unit in program.units:
            if unit.kind not in kinds:
                derivative = program.kinds.get(unit.kind)
                if not isinstance(derivative, Derivative):
                    raise PassError(f"{self.name}: there is no backward program to split; run `recompute` first")
                kinds[unit.kind] = replace(derivative, halves=_halves(unit, derivative))
        return replace(program, kinds=kinds)


def _halves(unit: Unit, derivative: Derivative) -> Halves | None:
    if derivative.backward is None:
        return None
    graph = _with_separate_results(derivative.backward).graph
    gradients = output_nodes(graph)
    of_values = [g if s.role == Role.VALUE else None for s, g in zip(unit.sources, gradients, strict=True)]
    of_weights = [None if s.role == Role.VALUE else g for s, g in zip(unit.sources, gradients, strict=True)]
    early = _needed(of_values)
    early |= {node for node in calls(graph) if is_getitem(node) and node.args[0] in early}
    held = _held(graph, of_weights, early)
    inputs = extract(graph, placeholders(graph), [*of_values, *held])
    weights = extract(graph, held, of_weights) if any(g is not None for g in of_weights) else None
    return Halves(inputs, weights, len(held), _share(inputs, weights))


def _needed(outputs: list[fx.Node | None]) -> set[fx.Node]:
    """The outputs, and all calls and placeholders they depend on."""
    found: set[fx.Node] = set()
    stack = [node for node in outputs if node is not None]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _held(graph: fx.Graph, of_weights: list[fx.Node | None], early: set[fx.Node]) -> list[fx.Node]:
    """Inputs of the second half, in graph order: values that it reads of the first half or of its inputs. A view of a
    held value is recomputed."""
    given = early | set(placeholders(graph))
    read: set[fx.Node] = set()
    for node in _needed(of_weights) - given:
        read |= given.intersection(node.all_input_nodes)
    read |= {node for node in of_weights if node in given and node is not None}
    spare = {node for node in read if node not in of_weights and _base(node) in read - {node}}
    return [node for node in graph.nodes if node in read - spare]


def _base(node: fx.Node) -> fx.Node:
    """The base of nested views; any other value is its own base."""
    while is_aten(node, *VIEWS) and isinstance(node.args[0], fx.Node) and len(node.all_input_nodes) == 1:
        node = node.args[0]
    return node


def _with_separate_results(module: fx.GraphModule) -> fx.GraphModule:
    """A copy in which each convolution call gives the gradient of its input or those of its parameters, not both."""
    module = copy_graph(module)
    graph = module.graph
    for node in list(calls(graph)):
        wanted = argument(node, "output_mask") if is_aten(node, _MASKED) else None
        if wanted is None or not wanted[_OF_INPUT] or not any(wanted[_OF_INPUT + 1 :]):
            continue
        with graph.inserting_before(node):
            only_input = _masked(graph, node, [at == _OF_INPUT for at in range(len(wanted))])
            others = _masked(graph, node, [at != _OF_INPUT and want for at, want in enumerate(wanted)])
        for part in list(node.users):
            if part.op != "output":
                part.replace_input_with(node, only_input if part.args[1] == _OF_INPUT else others)
        graph.erase_node(node)
    module.recompile()
    return module


def _masked(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> fx.Node:
    schema = node.target._schema  # type: ignore[union-attr]
    args = [mask if each.name == "output_mask" else argument(node, each.name) for each in schema.arguments]
    return emit(graph, node.target, *args, like=node)


def _share(inputs: fx.GraphModule, weights: fx.GraphModule | None) -> float:
    """The second half's share of all operations."""
    early, late = (sum(map(operations, calls(m.graph))) if m is not None else 0.0 for m in (inputs, weights))
    return late / (early + late) if early + late else float(weights is not None)
