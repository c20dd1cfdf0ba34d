"""evaluate: the forward graph that evaluation runs, derived from the training graph of every kind of unit.

Three rewrites of calls:

    keyed_dropout(x, ...) -> x
    keyed_uniform(...) < 0.9 -> 0.9, where it was a mask of bernoulli(0.9): the mean of what was drawn
    _native_batch_norm_legit.no_stats(x, ...) -> _native_batch_norm_legit_no_training(x, ..., running mean, var)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from elaswave_fx.program.interpret import interpret_units
from elaswave_fx.program.ir import (
    Program,
    Result,
    ResultKind,
    Role,
    Unit,
    argument,
    calls,
    copy_graph,
    emit,
    is_aten,
    mean_of,
    output_node,
    output_nodes,
    placeholders,
    source_of,
    statistics_of,
    value_of,
)
from elaswave_fx.program.keyed_draws import DRAWS, DROPOUT

aten = torch.ops.aten


def evaluation_graph(unit: Unit) -> fx.GraphModule:
    """The unit without dropout and with running statistics; same inputs, FOLD results dropped."""
    module = copy_graph(unit.graph)
    graph = module.graph
    buffers = {source_of(n).name: n for n in placeholders(graph) if source_of(n).role == Role.BUFFER}
    kept = [n for n, r in zip(output_nodes(graph), unit.results, strict=True) if r.kind != ResultKind.FOLD]
    output_node(graph).args = (tuple(kept),)
    for node in list(calls(graph)):
        if is_aten(node, DROPOUT):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        elif statistics_of(node) is not None:
            _use_running_statistics(graph, node, buffers)
        elif mean_of(node) is not None:
            _use_mean(graph, node)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def evaluation_results(unit: Unit) -> tuple[Result, ...]:
    return tuple(result for result in unit.results if result.kind != ResultKind.FOLD)


def _use_running_statistics(graph: fx.Graph, node: fx.Node, buffers: dict[str, fx.Node]) -> None:
    x, weight, bias, _, momentum, eps = node.args
    mean, var = (buffers[name] for name in statistics_of(node) or ())
    with graph.inserting_before(node):
        dtype = value_of(weight).dtype if isinstance(weight, fx.Node) else value_of(mean).dtype
        if value_of(mean).dtype != dtype:  # kernels require parameters and statistics of one dtype
            mean, var = (emit(graph, aten._to_copy.default, statistic, dtype=dtype) for statistic in (mean, var))
        op = aten._native_batch_norm_legit_no_training.default
        steady = emit(graph, op, x, weight, bias, mean, var, momentum, eps)
        out = emit(graph, operator.getitem, steady, 0)
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(out)


def _use_mean(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a draw by its mean: a mask of ones with probability p, divided by p, becomes 1, as in dropout of whole
    channels or paths."""
    value = value_of(node)
    sizes = _drawn_sizes(node)
    with graph.inserting_after(node):
        if sizes is None:
            mean = emit(graph, aten.full_like.default, node, mean_of(node))
        else:
            mean = emit(graph, aten.full.default, sizes, mean_of(node), dtype=value.dtype, device=value.device)
    node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _drawn_sizes(node: fx.Node) -> Any:
    """The sizes of the draw behind a value, None if the value has other sizes."""
    draw = node
    while not is_aten(draw, *DRAWS):
        if not draw.all_input_nodes:
            return None
        draw = draw.all_input_nodes[0]
    same = [str(size) for size in value_of(draw).shape] == [str(size) for size in value_of(node).shape]
    return argument(draw, "size") if same else None


def run_evaluation(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Loss sum and count of the derived evaluation graphs, interpreted unit by unit."""
    keys = torch.arange(len(next(iter(batch.values()))), dtype=torch.int64) + (seed << 32)
    return interpret_units(program, state, batch, keys, lambda unit: (evaluation_graph(unit), evaluation_results(unit)))
