"""differentiate: the joint forward and backward graph of every distinct unit.

Units of one kind share it, so moving a unit never traces again, and a deep model costs no more than a shallow one.

    forward(params, h) -> h'   =>   joint(params, h, dh') -> (h', dparams, dh)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import (
    Program,
    Role,
    Source,
    Unit,
    calls,
    emit,
    is_aten,
    is_getitem,
    output_nodes,
    placeholders,
    value_of,
)
from passes.estimate_cost import VIEWS, elements
from passes.rewrite_rng import refuse_hidden_randomness

aten = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """One graph for both directions: inputs are the unit's, then one tangent per differentiable result.

    Outputs are the unit's results, then one gradient (or None) per unit input.
    """

    graph: fx.GraphModule
    num_inputs: int
    num_results: int


@dataclass(frozen=True)
class Differentiate:
    """Trace the derivative once per distinct unit."""

    name: ClassVar[str] = "differentiate"

    def apply(self, program: Program) -> Program:
        kinds: dict[str, Any] = {}
        for unit in program.units:
            if unit.kind not in kinds:
                kinds[unit.kind] = differentiate_unit(unit)
        return replace(program, kinds=kinds)


def differentiate_unit(unit: Unit) -> Joint:
    """The joint graph of one unit.

    Raises CaptureError naming the unit and the operator for which there is no derivative.
    """
    inputs = []
    for node, grad in zip(placeholders(unit.graph.graph), unit.grad_inputs, strict=True):
        value = value_of(node)
        inputs.append(value.detach().requires_grad_(grad) if isinstance(value, torch.Tensor) else value)
    logging.getLogger("torch._functorch").setLevel(logging.ERROR)
    forward = _only_differentiable(unit)
    try:
        joint: Any = aot_export_joint_simple(forward, tuple(inputs), trace_joint=any(unit.grad_results))
    except (RuntimeError, NotImplementedError, AssertionError, TypeError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
        operators = sorted({str(node.target) for node in calls(unit.graph.graph)})
        raise CaptureError(
            f"model: unit {unit.index} cannot be differentiated: {first.strip()} (operators: {', '.join(operators)})"
        ) from error
    flat = _flatten(joint, len(inputs), forward.meta["order"], unit)
    refuse_hidden_randomness(flat.graph, "differentiate")
    return Joint(flat, len(inputs), len(unit.results))


def _only_differentiable(unit: Unit) -> fx.GraphModule:
    """The unit with its differentiable results first: the tracer asks for a tangent of each result that needs one.

    It refuses results that share memory with anything, also where an operator returns a view of its own product; so
    every result is a copy here, and `_without_copy` takes back the needless ones.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(unit.graph.graph, mapping)
    assert isinstance(outputs, tuple)
    order = sorted(range(len(outputs)), key=lambda i: not unit.grad_results[i])
    stop = aten.detach.default
    results = [outputs[i] if unit.grad_results[i] else graph.call_function(stop, (outputs[i],)) for i in order]
    graph.output(tuple(graph.call_function(aten.clone.default, (result,)) for result in results))
    module = fx.GraphModule(torch.nn.Module(), graph)
    module.meta["order"] = order
    return module


def _flatten(joint: fx.GraphModule, num_inputs: int, order: list[int], unit: Unit) -> fx.GraphModule:
    """A graph with plain placeholders and outputs [results in the unit's order, gradients in input order]."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    nodes = placeholders(joint.graph)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        elif node.op == "placeholder":
            mapping[node] = graph.placeholder(node.name)
            mapping[node].meta["val"] = node.meta.get("val")
    outputs = [mapping[n] if isinstance(n, fx.Node) else None for n in output_nodes(joint.graph)]
    results: list[fx.Node | None] = [None] * len(order)
    for position, original in enumerate(order):
        results[original] = _without_copy(outputs[position])
    gradients = outputs[len(order) :] if any(unit.grad_results) else [None] * num_inputs
    primals = [mapping[n] for n in nodes[:num_inputs]]
    kept = [
        _gradient(graph, source, primal, gradient) if wanted else None
        for source, primal, gradient, wanted in zip(unit.sources, primals, gradients, unit.grad_inputs, strict=True)
    ]
    tangents = [mapping[n] for n in nodes[num_inputs:]]
    needed = sum(unit.grad_results)
    for spare in tangents[needed:]:
        if spare.users:
            raise CaptureError(f"model: unit {unit.index} wants the derivative of a result that has none")
        graph.erase_node(spare)
    graph.output((*results, *kept))
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _without_copy(result: fx.Node | None) -> fx.Node | None:
    """A result that has memory of its own, contiguous and no more than it needs, is not copied."""
    if result is None or not is_aten(result, "aten.clone"):
        return result
    source: Any = result.args[0]
    root = source
    while is_aten(root, *VIEWS):
        root = root.args[0]
    made_here = root.op == "call_function" and not is_getitem(root)
    whole = made_here and elements(value_of(root)) == elements(value_of(source))
    return _without_copy(source) if whole and value_of(source).is_contiguous() else result


def _gradient(graph: fx.Graph, source: Source, primal: fx.Node, gradient: fx.Node | None) -> fx.Node:
    """The gradient of an input; it crosses a border contiguous, as the value did, and is zero where there is none."""
    if gradient is None:
        return emit(graph, aten.zeros_like.default, primal)
    if source.role == Role.VALUE and not value_of(gradient).is_contiguous():
        return emit(graph, aten.clone.default, gradient, memory_format=torch.contiguous_format)
    return gradient
