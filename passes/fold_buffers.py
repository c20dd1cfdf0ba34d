"""fold_buffers: split the update of a mutable buffer into values that a granule yields and a fold over granules.

A fold is applied to the buffer once per granule, wherever the granule was computed:

    before: mean' = mean * 0.9 + batch_mean(x) * 0.1                       # returned as the new buffer
    after:  the graph returns batch_mean(x) * 0.1 as FOLD value 0 of "bn.running_mean";
            fold(old, value) = old * 0.9 + value, applied granule by granule in order, by every replica
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
    output_node,
    output_nodes,
    placeholders,
    source_of,
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
            values, fold = _split(result.name, old[result.name], node, set(old.values()))
            folds.append(fold)
            outputs.extend(values)
            results.extend(Result(ResultKind.FOLD, result.name, i) for i in range(len(values)))
        output_node(graph).args = (tuple(outputs),)
        graph.eliminate_dead_code()
        program.graph.recompile()
        return replace(program, results=tuple(results), folds=tuple(folds))


def _split(buffer: str, old: fx.Node, new: fx.Node, buffers: set[fx.Node]) -> tuple[list[fx.Node], Fold]:
    inside = _dependents(old)
    needed = {new} | _ancestors(new)
    for node in inside:
        readers = [user for user in node.users if user not in inside and user.op != "output"]
        if readers or (node.op != "placeholder" and node not in needed):
            raise CaptureError(
                f"model: buffer '{buffer}' is read by {node.target} and updated in the same step; "
                "what a step reads must not depend on its own updates"
            )
    body = [node for node in old.graph.nodes if node in inside and node is not old]
    frontier: list[fx.Node] = []
    for node in body:
        frontier += [s for s in node.all_input_nodes if s not in inside and s not in frontier]
    others = [s for s in frontier if s in buffers]
    if others:
        raise CaptureError(f"model: the update of buffer '{buffer}' reads another buffer, {others[0].name}")
    return frontier, Fold(buffer, -1, _fold_graph(old, frontier, body, new), len(frontier))


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
