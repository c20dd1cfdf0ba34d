"""differentiate: the joint forward and backward graph of every distinct unit.

Units of one kind share it, so moving a unit never traces again, and a deep model costs no more than a shallow one.

    forward(params, h) -> h'   =>   joint(params, h, dh') -> (h', dparams, dh)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple

from elaswave_fx.errors import CaptureError, PassError
from elaswave_fx.passes.estimate_cost import VIEWS, elements
from elaswave_fx.passes.rewrite_rng import refuse_hidden_randomness
from elaswave_fx.program.data_sizes import number_of_values
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    Role,
    Source,
    Unit,
    calls,
    emit,
    is_aten,
    may_be_view,
    module_of,
    named_operator,
    output_nodes,
    placeholders,
    value_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """One graph for both directions: inputs are the unit's, then one tangent per differentiable result.

    Outputs are the unit's results, then one gradient (or None) per unit input. `lasting`: which inputs persist between
    steps (parameters, buffers, constants).
    """

    graph: fx.GraphModule
    num_inputs: int
    num_results: int
    lasting: tuple[bool, ...]


@dataclass(frozen=True)
class Differentiate:
    """Trace the derivative once per distinct unit."""

    name: ClassVar[str] = "differentiate"

    def apply(self, program: Program) -> Program:
        kinds: dict[str, Any] = {}
        for unit in program.units:
            if unit.kind not in kinds:
                kinds[unit.kind] = differentiate_unit(unit, program.graph.graph)
        return replace(program, kinds=kinds)


def joints_of(program: Program, name: str) -> dict[str, Joint]:
    """The joint graphs by kind. Raise PassError if the pass `name` runs too early."""
    for joint in program.kinds.values():
        if not isinstance(joint, Joint):
            raise PassError(f"{name}: the program is not differentiated; run `differentiate` first")
    return dict(program.kinds)


def rewrite_joints(program: Program, name: str, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> Program:
    """The program with every joint graph rewritten by the pass `name`. Raise PassError if it runs too early."""
    joints = joints_of(program, name)
    return replace(program, kinds={kind: replace(each, graph=rewrite(each.graph)) for kind, each in joints.items()})


def differentiate_unit(unit: Unit, whole: fx.Graph | None = None) -> Joint:
    """The joint graph of one unit, of the program `whole`. Raise CaptureError with the unit and the operator that has
    no derivative."""
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
        raise CaptureError(_refusal(unit, whole or unit.graph.graph, first.strip(), str(error))) from error
    _refuse_effects(joint.graph)
    _refuse_fixed_size(inputs, joint.graph)
    flat = _flatten(joint, len(inputs), forward.meta["order"], unit)
    refuse_hidden_randomness(flat.graph, "differentiate")
    lasting = tuple(source.role in (Role.PARAM, Role.BUFFER, Role.CONSTANT) for source in unit.sources)
    return Joint(flat, len(inputs), len(unit.results), lasting)


def _refuse_effects(graph: fx.Graph) -> None:
    """Raise CaptureError for a call with ordered effects: a check of values that may raise."""
    for node in calls(graph):
        if node.target is torch.ops.higher_order.with_effects:
            raise CaptureError(
                f"model: {node.args[1]} looks at values and may raise, as checks in torch.linalg do; units have no "
                "such effects; a way out is an operator without a check: torch.linalg.solve_ex, inv_ex, cholesky_ex"
            )


def _refuse_fixed_size(inputs: list[Any], graph: fx.Graph) -> None:
    """Raise CaptureError for a derivative that fixed a symbolic size to a number."""
    sizes = [size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape]
    if any(isinstance(size, torch.SymInt) and not size.node.expr.free_symbols for size in sizes):
        names = dict.fromkeys(str(node.target) for node in calls(graph) if "_backward" in str(node.target))
        named = f" ({', '.join(names)})" if names else ""
        raise CaptureError(
            f"model: a derivative{named} makes a plain number of the number of samples, and one program is for any "
            "number of them; a way out is to write that part with other operators"
        )


def _refusal(unit: Unit, whole: fx.Graph, first: str, message: str) -> str:
    if "unbacked" in message:  # in any program it fails with the first unit
        number = number_of_values(whole, "cannot be differentiated")
        if number is not None:
            return number
    return (
        f"model: unit {unit.index} cannot be differentiated{_suspects(unit, message)}: {first}; a way out is to give "
        "the operator a derivative, as torch.library.register_autograd does, or to do without it"
    )


def _suspects(unit: Unit, message: str) -> str:
    """The place of a failure: the operator that the message names, else foreign operators, else the unit's modules."""
    named = named_operator(message.replace("::", "."), unit.graph.graph)
    if named:
        return named
    foreign = [node for node in calls(unit.graph.graph) if not str(node.target).startswith(("aten.", "<built-in"))]
    places = dict.fromkeys(f"{node.target} in {module_of(node)}" for node in foreign)
    places = places or dict.fromkeys(module_of(node) for node in calls(unit.graph.graph))
    return f" in {', '.join(list(places)[:3])}"


def _only_differentiable(unit: Unit) -> fx.GraphModule:
    """The unit with its differentiable results first: the tracer asks for a tangent of each result that needs one.

    It refuses results that share memory with anything, also where an operator returns a view of its own product. So
    every result is a copy here, and `_own_memory` removes the needless ones.
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
            if is_aten(node, "aten.view.default", "aten._unsafe_view"):
                mapping[node].target = aten.reshape.default  # kernels may return other strides
        elif node.op == "placeholder":
            mapping[node] = graph.placeholder(node.name)
            mapping[node].meta["val"] = node.meta.get("val")
    outputs = [mapping[n] if isinstance(n, fx.Node) else None for n in output_nodes(joint.graph)]
    results: list[fx.Node | None] = [None] * len(order)
    for position, original in enumerate(order):
        results[original] = _own_memory(graph, outputs[position], unit.results[original].kind == ResultKind.VALUE)
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


def _own_memory(graph: fx.Graph, result: fx.Node | None, crosses: bool) -> fx.Node | None:
    """The result, without its copy if it has memory of its own and no more than it needs; a border value is
    contiguous."""
    source: Any = result
    while source is not None and is_aten(source, "aten.clone") and _owns(source.args[0]):
        source = source.args[0]
    if source is None or not crosses:
        return source
    return emit(graph, aten.contiguous.default, source)


def _owns(node: Any) -> bool:
    """Whether a call of this graph made a contiguous result's memory, for the result or a view of all of it."""
    root = node
    while is_aten(root, *VIEWS):
        root = root.args[0]
    made_here = root.op == "call_function" and not may_be_view(root)
    return made_here and elements(value_of(root)) == elements(value_of(node)) and value_of(node).is_contiguous()


def _gradient(graph: fx.Graph, source: Source, primal: fx.Node, gradient: fx.Node | None) -> fx.Node:
    """The gradient of an input: contiguous across a border, as the value was, and zero where there is none."""
    if gradient is None:
        return emit(graph, aten.zeros_like.default, primal)
    return emit(graph, aten.contiguous.default, gradient) if source.role == Role.VALUE else gradient
