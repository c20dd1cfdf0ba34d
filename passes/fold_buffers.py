"""fold_buffers: split the update of a mutable buffer into values that a granule yields and a fold over granules.

A fold is applied to the buffer once per granule, wherever the granule was computed:

    before: mean' = mean * 0.9 + batch_mean(x) * 0.1                       # returned as the new buffer
    after:  the graph returns batch_mean(x) * 0.1 as FOLD value 0 of "bn.running_mean";
            fold(old, value) = old * 0.9 + value, applied granule by granule in order, by whoever keeps the buffer

An update without samples, such as a counter or a power iteration, is the same in every granule; its fold, fold(old,
value) = value, is applied once per step. An update that does not read the old value keeps that of the last granule. An
update that does not split, such as a memory that the loss reads too, has
the same fold, which is right where a granule is the whole batch (`Program.whole_batch`). A step reads a buffer as it
was at the start of the step, or as the step itself computed it from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

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
    """Make running statistics independent of which rank computed which granule."""

    name: ClassVar[str] = "fold_buffers"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        graph = program.graph.graph
        old = {source_of(n).name: n for n in placeholders(graph) if source_of(n).role == Role.BUFFER}
        changed = {old[result.name] for result in program.results if result.name in old}
        sampled, forward = _of_samples(graph), _of_loss(program)
        outputs: list[fx.Node | None] = []
        results: list[Result] = []
        folds: list[Fold] = []
        whole_batch: list[str] = []
        for node, result in zip(output_nodes(graph), program.results, strict=True):
            if result.kind != ResultKind.BUFFER or node is None:
                outputs.append(node)
                results.append(result)
                continue
            update = _update(result.name, node, old, changed, sampled, forward)
            folds.append(update.fold)
            outputs.extend(update.values)
            results.extend(Result(ResultKind.FOLD, result.name, i) for i in range(len(update.values)))
            whole_batch += [update.unsplit] if update.unsplit else []
        output_node(graph).args = (tuple(outputs),)
        graph.eliminate_dead_code()
        program.graph.recompile()
        return replace(program, results=tuple(results), folds=tuple(folds), whole_batch=tuple(whole_batch))


@dataclass(frozen=True)
class _Update:
    """The values that a granule yields, and the fold that takes them; or why the update does not split."""

    values: list[fx.Node]
    fold: Fold
    unsplit: str = ""


def _update(
    buffer: str,
    new: fx.Node,
    old: Mapping[str, fx.Node],
    changed: set[fx.Node],
    sampled: set[fx.Node],
    forward: set[fx.Node],
) -> _Update:
    if new not in sampled:
        return _overwrite(buffer, new, per_step=True)
    if buffer not in old:
        return _overwrite(buffer, new)
    why = _reason_not_to_split(buffer, old[buffer], new, set(old.values()), changed, forward & sampled)
    if why:
        return replace(_overwrite(buffer, new), unsplit=why)
    if new not in _dependents(old[buffer]):  # its reader was dropped, such as copy_(), which has a value of its own
        return _overwrite(buffer, new)
    return _split(buffer, old[buffer], new)


def _overwrite(buffer: str, new: fx.Node, per_step: bool = False) -> _Update:
    """fold(old, value) = value."""
    graph = fx.Graph()
    for name in ("old", "value"):
        node = graph.placeholder(name)
        node.meta["val"] = value_of(new)
    graph.output((node,))
    return _Update([new], Fold(buffer, -1, fx.GraphModule(torch.nn.Module(), graph), 1, per_step))


def _reason_not_to_split(
    buffer: str, old: fx.Node, new: fx.Node, buffers: set[fx.Node], changed: set[fx.Node], forward: set[fx.Node]
) -> str:
    """Why an update does not split into its old value and a granule's values; empty if it does."""
    inside = _dependents(old)
    needed = {new} | _ancestors(new)
    for node in old.graph.nodes:
        if node in inside and node is not old and node not in needed:
            return f"buffer '{buffer}' is read by {node.target} in {module_of(node)}, and updated from the same samples"
    for source in _frontier(inside, old):
        # A rate that follows from a counter would be that of the step in each of its granules.
        others = {source} & buffers | _ancestors(source, stop=forward) & changed
        for other in (node for node in old.graph.nodes if node in others):
            return f"the update of buffer '{buffer}' reads another one, '{source_of(other).name}', and samples"
        if not isinstance(value_of(source), torch.Tensor):
            return f"the update of buffer '{buffer}' reads the number {source.target} in {module_of(source)}"
    return ""


def _of_loss(program: Program) -> set[fx.Node]:
    """Nodes on which the loss or the count depend."""
    nodes = zip(output_nodes(program.graph.graph), program.results, strict=True)
    kept = [node for node, result in nodes if node is not None and result.kind != ResultKind.BUFFER]
    return {*kept}.union(*map(_ancestors, kept))


def _split(buffer: str, old: fx.Node, new: fx.Node) -> _Update:
    """Split into the fold, which depends on the old value, and its other inputs, the values."""
    inside = _dependents(old)
    body = [node for node in old.graph.nodes if node in inside and node is not old]
    frontier = _frontier(inside, old)
    return _Update(frontier, Fold(buffer, -1, _fold_graph(old, frontier, body, new), len(frontier)))


def _frontier(inside: set[fx.Node], old: fx.Node) -> list[fx.Node]:
    """Other inputs of the nodes that depend on the old value, in graph order."""
    body = [node for node in old.graph.nodes if node in inside and node is not old]
    return list(dict.fromkeys(source for node in body for source in node.all_input_nodes if source not in inside))


def _of_samples(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on a sample, on a draw for a sample, or on the number of samples."""
    found: set[fx.Node] = set()
    for node in placeholders(graph):
        if source_of(node).role in (Role.INPUT, Role.KEYS):
            found |= _dependents(node)
    return found


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


def _ancestors(node: fx.Node, stop: Set[fx.Node] = frozenset()) -> set[fx.Node]:
    """What a node depends on; nothing that it does only through nodes of `stop`."""
    found, stack = set(), [node]
    while stack:
        each = stack.pop()
        for source in () if each in stop else each.all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found
