"""fold_buffers: split the update of a mutable buffer into values that a granule yields and a fold over granules.

A fold is applied to the buffer once per granule, wherever the granule was computed:

    before: mean' = mean * 0.9 + batch_mean(x) * 0.1                       # returned as the new buffer
    after:  the graph returns batch_mean(x) * 0.1 as FOLD value 0 of "bn.running_mean";
            fold(old, value) = old * 0.9 + value, applied granule by granule in order, by whoever keeps the buffer
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import (
    Fold,
    Program,
    Result,
    ResultKind,
    Role,
    module_of,
    output_node,
    output_nodes,
    placeholders,
    source_of,
    value_of,
)


@dataclass(frozen=True)
class FoldBuffers:
    """Make running statistics independent of who computed which granule."""

    name: ClassVar[str] = "fold_buffers"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        graph = program.graph.graph
        old = {source_of(n).name: n for n in placeholders(graph) if source_of(n).role == Role.BUFFER}
        outputs: list[fx.Node | None] = []
        results: list[Result] = []
        folds: list[Fold] = []
        for node, result in zip(output_nodes(graph), program.results, strict=True):
            if result.kind != ResultKind.BUFFER or node is None:
                outputs.append(node)
                results.append(result)
                continue
            before = old.get(result.name)
            others = set(old.values())
            update = _overwrite(result.name, node) if before is None else _split(result.name, before, node, others)
            folds.append(update.fold)
            outputs.extend(update.values)
            results.extend(Result(ResultKind.FOLD, result.name, i) for i in range(len(update.values)))
        output_node(graph).args = (tuple(outputs),)
        graph.eliminate_dead_code()
        program.graph.recompile()
        return replace(program, results=tuple(results), folds=tuple(folds))


@dataclass(frozen=True)
class _Update:
    """The values that a granule yields, and the fold that takes them."""

    values: list[fx.Node]
    fold: Fold


def _overwrite(buffer: str, new: fx.Node) -> _Update:
    """The update of a buffer that nobody reads: fold(old, value) = value."""
    graph = fx.Graph()
    for name in ("old", "value"):
        node = graph.placeholder(name)
        node.meta["val"] = value_of(new)
    graph.output((node,))
    return _Update([new], Fold(buffer, -1, fx.GraphModule(torch.nn.Module(), graph), 1))


def _split(buffer: str, old: fx.Node, new: fx.Node, buffers: set[fx.Node]) -> _Update:
    """What depends on the old value becomes the fold; what that reads besides are the values."""
    inside = _dependents(old)
    needed = {new} | _ancestors(new)
    body = [node for node in old.graph.nodes if node in inside and node is not old]
    for node in body:
        if node not in needed:
            raise CaptureError(
                f"model: buffer '{buffer}' is read by {node.target} in {module_of(node)} and updated in the same step; "
                "what a step reads must not depend on its own updates; a way out is to read it in evaluation mode alone"
            )
    sources = [source for node in body for source in node.all_input_nodes if source not in inside]
    frontier = list(dict.fromkeys(sources))
    for source in frontier:
        if source in buffers:
            raise CaptureError(f"model: the update of buffer '{buffer}' reads another buffer, {source_of(source).name}")
        if not isinstance(value_of(source), torch.Tensor):
            raise CaptureError(
                f"model: the update of buffer '{buffer}' reads the number {source.target} in {module_of(source)}; "
                "it can only read tensors"
            )
    return _Update(frontier, Fold(buffer, -1, _fold_graph(old, frontier, body, new), len(frontier)))


def _fold_graph(old: fx.Node, frontier: list[fx.Node], body: list[fx.Node], new: fx.Node) -> fx.GraphModule:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in (old, *frontier):
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta["val"] = node.meta["val"]
    for node in body:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output((mapping[new],))
    return fx.GraphModule(torch.nn.Module(), graph)


def _dependents(node: fx.Node) -> set[fx.Node]:
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found
