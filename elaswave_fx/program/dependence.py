"""Dependences of every node of a program, which decide the nodes that a unit can recompute for itself.

Three natures, by the inputs of a value's computation:

    FIXED     constants, buffers that never change, nothing          -> computed once per rank
    PREPARED  inputs or parameters, but not both, no random draw      -> computed again in every unit that reads it
    MAIN      samples meet parameters, or a random draw               -> belongs to exactly one unit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import fx

from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    Role,
    argument,
    draws_randomness,
    is_aten,
    is_getitem,
    output_nodes,
    placeholders,
    source_of,
    symbolic_sizes,
    tensors_in,
    value_of,
)

_SHAPE_ALONE = (
    "aten.empty_like", "aten.full_like", "aten.new_empty", "aten.new_full", "aten.new_ones", "aten.new_zeros",
    "aten.ones_like", "aten.rand_like", "aten.randn_like", "aten.zeros_like",
)  # fmt: skip
_LIKE_ANOTHER = ("aten.expand_as", "aten.reshape_as", "aten.to.other", "aten.type_as", "aten.view_as")
_LOSS_GRADIENTS = ("aten.nll_loss_backward", "aten.nll_loss2d_backward")
_MEAN = 1
"""Of PyTorch's numbers of reductions."""


class Nature(Enum):
    FIXED = "fixed"
    PREPARED = "prepared"
    MAIN = "main"


def natures(program: Program) -> dict[fx.Node, Nature]:
    """The nature of every call and placeholder."""
    mutated = set(program.updated_buffers())
    roots: dict[fx.Node, frozenset[str]] = {}
    found: dict[fx.Node, Nature] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            source = source_of(node)
            fixed = source.role == Role.CONSTANT or (source.role == Role.BUFFER and source.name not in mutated)
            roots[node] = frozenset() if fixed else frozenset({source.role.value})
        elif node.op == "call_function":
            roots[node] = frozenset().union(*(roots[source] for source in node.all_input_nodes))
        else:
            continue
        found[node] = _nature(roots[node])
    return found


def _nature(roots: frozenset[str]) -> Nature:
    samples = roots & {Role.INPUT.value}
    learned = roots & {Role.PARAM.value, Role.BUFFER.value}
    drawn = roots & {Role.KEYS.value, Role.STEP_KEYS.value}
    if drawn or (samples and learned):
        return Nature.MAIN
    return Nature.PREPARED if roots else Nature.FIXED


def values_read(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs whose values a call computes with: not that whose shape or dtype alone it takes, and no total weight
    of targets for a loss that is a sum."""
    if is_getitem(node):
        return values_read(node.args[0])  # type: ignore[arg-type]
    if is_aten(node, *_SHAPE_ALONE):
        return iter(())
    if is_aten(node, *_LIKE_ANOTHER):
        return (source for source in node.args[:1] if isinstance(source, fx.Node))
    is_sum = is_aten(node, *_LOSS_GRADIENTS) and argument(node, "reduction") != _MEAN
    unused = argument(node, "total_weight") if is_sum else None
    return (source for source in node.all_input_nodes if source is not unused)


class _GradientFlow(fx.Interpreter):
    """Runs the graph on fake tensors under autograd and records which values carry gradients."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.flows: set[str] = set()

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if n.op != "output" and any(tensor.requires_grad for tensor in tensors_in(value)):
            self.flows.add(n.name)
        return value


def gradient_nodes(program: Program) -> set[fx.Node]:
    """Nodes whose value takes part in the gradient: on a path from the loss to a parameter."""
    inputs, mode = [], None
    for node in placeholders(program.graph.graph):
        value = value_of(node)
        mode = getattr(value, "fake_mode", mode)
        if source_of(node).role == Role.PARAM and program.params[source_of(node).name].trainable:
            value = value.detach().requires_grad_(True)
        inputs.append(value)
    flow = _GradientFlow(program.graph)
    assert mode is not None
    with symbolic_sizes(mode), torch.enable_grad():
        flow.run(*inputs)
    reached: set[fx.Node] = set()
    outputs = zip(output_nodes(program.graph.graph), program.results, strict=True)
    stack = [node for node, result in outputs if result.kind == ResultKind.LOSS and node is not None]
    while stack:
        node = stack.pop()
        if node not in reached and node.name in flow.flows:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached


def constant_value(
    program: Program, node: fx.Node, stand_in: Callable[[fx.Node], tuple[fx.Node, torch.Tensor] | None] = lambda _: None
) -> torch.Tensor | None:
    """The value of a node, computed from the program's constants alone.

    `stand_in` may give, for a call, one of its arguments and the tensor to use for it instead of its value. None when
    the node reads a buffer, a parameter or an input, whose data is not available, or draws random numbers.
    """
    known: dict[fx.Node, Any] = {}

    def value(item: fx.Node) -> Any:
        if item not in known:
            known[item] = compute(item)
        return known[item]

    def compute(item: fx.Node) -> Any:
        if item.op == "placeholder":
            source = source_of(item)
            return program.tensors[source.name] if source.role == Role.CONSTANT else None
        replaced = stand_in(item)
        given = dict([replaced] if replaced is not None else [])  # in this call alone: others read the value itself
        read = {source: given[source] if source in given else value(source) for source in item.all_input_nodes}
        if draws_randomness(item) or any(each is None for each in read.values()):
            return None
        args, kwargs = fx.map_arg((item.args, item.kwargs), read.__getitem__)
        return item.target(*args, **kwargs)  # type: ignore[operator]

    return value(node)
