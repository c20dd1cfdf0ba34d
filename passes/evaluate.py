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
from elaswave_fx.program.keys import DRAWS, DROPOUT, draws

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
        if value_of(mean).dtype != dtype:  # kernels want parameters and statistics of one dtype
            mean, var = (emit(graph, aten._to_copy.default, statistic, dtype=dtype) for statistic in (mean, var))
        op = aten._native_batch_norm_legit_no_training.default
        steady = emit(graph, op, x, weight, bias, mean, var, momentum, eps)
        out = emit(graph, operator.getitem, steady, 0)
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(out)


def _use_mean(graph: fx.Graph, node: fx.Node) -> None:
    """A mask of ones with probability p, divided by p, becomes 1: what dropout of whole channels or paths does."""
    value = value_of(node)
    sizes = _drawn_sizes(node)
    with graph.inserting_after(node):
        if sizes is None:
            mean = emit(graph, aten.full_like.default, node, mean_of(node))
        else:
            mean = emit(graph, aten.full.default, sizes, mean_of(node), dtype=value.dtype, device=value.device)
    node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _drawn_sizes(node: fx.Node) -> Any:
    """The sizes of the draw that a value was computed from, None where it has others by now."""
    draw = node
    while not is_aten(draw, *DRAWS):
        if not draw.all_input_nodes:
            return None
        draw = draw.all_input_nodes[0]
    same = [str(size) for size in value_of(draw).shape] == [str(size) for size in value_of(node).shape]
    return argument(draw, "size") if same else None


def run_evaluation(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Loss sum and count of the derived evaluation graphs, interpreted unit by unit."""
    samples = len(next(iter(batch.values())))
    found: dict[str, torch.Tensor] = {}
    invariants = _run_invariants(program, state)
    for unit in program.units:
        inputs = []
        for source in unit.sources:
            if source.role == Role.INPUT:
                inputs.append(batch[source.name])
            elif source.role == Role.KEYS:
                inputs.append(torch.zeros(samples, dtype=torch.int64))
            elif source.role == Role.STEP_KEYS:
                inputs.append(torch.zeros(1, dtype=torch.int64))
            elif source.role == Role.VALUE:
                inputs.append(found[source.name])
            elif source.role == Role.CONSTANT:
                inputs.append(invariants.get(source.name, program.tensors.get(source.name)))
            else:
                inputs.append(state[source.name])
        outputs = evaluation_graph(unit)(*inputs)
        for result, value in zip(evaluation_results(unit), outputs, strict=True):
            found[result.name or result.kind.value] = value
    return found


def _run_invariants(program: Program, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    module = program.invariants
    assert module is not None
    sources = [source_of(node) for node in placeholders(module.graph)]
    tensors = [program.tensors[s.name] if s.role == Role.CONSTANT else state[s.name] for s in sources]
    return dict(zip(module.meta["names"], module(*tensors), strict=True))


def evaluation_agrees(
    program: Program, model: torch.nn.Module, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> bool:
    """Whether the derived evaluation equals the model in evaluation mode, on one batch, within rounding.

    A model that draws random numbers in evaluation too cannot be compared and counts as equal.
    """
    samples = len(next(iter(batch.values()))) if program.dynamic_batch else program.granule
    part = {name: tensor[:samples].clone() for name, tensor in batch.items()}
    was_training = model.training
    model.eval()
    expected, again = (_seeded(model, part, seed) for seed in (0, 1))
    with torch.no_grad():
        got = run_evaluation(program, state, part)
    model.train(was_training)
    if expected != again and any(draws(evaluation_graph(unit).graph) for unit in program.units):
        return True
    tolerance = 2e-2 if program.float_dtypes() & {torch.bfloat16, torch.float16} else 1e-5
    pairs = zip(expected, (float(got["loss"]), float(got["count"])), strict=True)
    return all(abs(a - b) <= tolerance * max(1.0, abs(a)) for a, b in pairs)


def _seeded(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    with torch.enable_grad():  # forward itself may take gradients
        loss, count = model(**batch)
    return float(loss.detach()), float(count.detach())
