"""evaluate: the forward graph that evaluation runs, derived from the training graph of every kind of unit.

Three rewrites of calls:

    keyed_dropout(x, ...) -> x
    keyed_uniform(...) < 0.9 -> 0.9, where it was a mask of bernoulli(0.9): the mean of what was drawn
    _native_batch_norm_legit.no_stats(x, ...) -> _native_batch_norm_legit_no_training(x, ..., running mean, var)
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from elaswave_fx.program.autocast import without_autocast
from elaswave_fx.program.equal_draws import EqualDraws, UnknownDraw
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
from elaswave_fx.program.keyed_draws import DRAWS, DROPOUT, draws
from elaswave_fx.program.mode_calls import ModeCalls, operator_name
from elaswave_fx.program.state_kept import equal_with_nan, state_kept, state_of
from elaswave_fx.program.trial_values import FAR, perturbed

aten = torch.ops.aten

_MEASURED = (ResultKind.LOSS, ResultKind.COUNT)
_DRAWN = 8
"""Evaluation runs of a model that draws in evaluation what `EqualDraws` does not know."""


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


def evaluation_agrees(
    program: Program, model: torch.nn.Module, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> bool:
    """Whether the derived evaluation equals the model in evaluation mode on one batch: within rounding, or within the
    spread of the model's draws in evaluation.

    Perturbed parameters and buffers must agree too: a gate that starts at 0, or an average that starts at its target,
    hides a difference between the modes. So may a bound that no value reaches yet: see `ModeCalls`, and `FAR`.
    """
    samples = len(next(iter(batch.values()))) if program.dynamic_batch else program.granule
    part = {name: tensor[:samples].clone() for name, tensor in batch.items()}
    was_training = model.training
    model.train()
    try:
        if not _evaluates(program, model, state, part) or _calls_differ(program, model, part):
            return False
        return all(_evaluates_with(factor, program, model, state, part) for factor in (1.0, FAR))
    finally:
        model.train(was_training)


def _evaluates_with(
    factor: float,
    program: Program,
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> bool:
    """Whether both agree with other parameters and buffers, parameters `factor` times as large; True where either does
    not run with those."""
    parameters = {name for name, _ in model.named_parameters()}
    with state_kept(model), contextlib.suppress(RuntimeError, ValueError):
        moved = {name: perturbed(tensor, name) * (factor if name in parameters and tensor.is_floating_point() else 1)
                 for name, tensor in state.items()}  # fmt: skip
        with torch.no_grad():
            for name, tensor in state_of(model):
                tensor.copy_(moved[name])
        return _evaluates(program, model, moved, batch, far=factor != 1.0)
    return True


def _calls_differ(program: Program, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
    try:
        calls = ModeCalls.of(model, batch)
    except RuntimeError:  # it runs neither with gradients nor without
        return True
    return calls.differ(*_live_operators(program))


def _evaluates(
    program: Program,
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    far: bool = False,
) -> bool:
    """Whether both agree once a model in training has got into evaluation mode. Modes may not change state, as by
    averages in the place of weights."""
    before = {name: tensor.detach().clone() for name, tensor in state_of(model)}
    model.eval()
    try:
        now = dict(state_of(model))
        same = now.keys() == before.keys() and all(equal_with_nan(now[name], tensor) for name, tensor in before.items())
        same = same and _agrees(program, model, state, batch, far)
    finally:
        evaluated = {name: tensor.detach().clone() for name, tensor in state_of(model)}
        model.train()
    return same and all(
        equal_with_nan(evaluated[name], tensor) for name, tensor in state_of(model) if name in evaluated
    )


def _live_operators(program: Program) -> tuple[Counter[str], int]:
    """Operators of the derived evaluation by name, and number of draws, on which its loss or count depends."""
    wanted: set[str] = set()
    operators: Counter[str] = Counter()
    drawn = 0
    for unit in reversed(program.units):
        graph = evaluation_graph(unit).graph
        results = zip(output_nodes(graph), evaluation_results(unit), strict=True)
        needed = tuple(node for node, each in results if each.name in wanted or each.kind in _MEASURED)
        output_node(graph).args = (needed,)
        for node in calls(graph):
            if is_aten(node, "aten.full_like"):
                node.args = (None, *node.args[1:])  # it takes a shape alone
        graph.eliminate_dead_code()
        drawn += len(draws(graph))
        operators.update(operator_name(str(node.target)) for node in calls(graph))
        wanted |= {source_of(node).name for node in placeholders(graph) if node.users}
    return operators, drawn


def _agrees(
    program: Program,
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    far: bool,
) -> bool:
    tolerance = 1e-4 if far else 1e-5
    lowest = program.float_dtypes() & {torch.bfloat16, torch.float16}
    with torch.no_grad(), contextlib.suppress(UnknownDraw), EqualDraws():
        same = _is_same(program, model, state, batch, tolerance, far)
        return same or (bool(lowest) and _is_same_in_single_precision(program, model, state, batch, far))
    return _agree_on_average(program, model, state, batch, 2e-2 if lowest else tolerance)


def _is_same(
    program: Program,
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    tolerance: float,
    far: bool,
) -> bool:
    ours = run_evaluation(program, state, batch)
    twice = (_seeded(model, batch, 0), _seeded(model, batch, 0))  # it may change what it reads
    return all(
        abs(one - float(ours[kind])) <= tolerance * max(1.0, abs(one)) or (far and not math.isfinite(one))
        for theirs in twice
        for one, kind in zip(theirs, ("loss", "count"), strict=True)
    )


def _is_same_in_single_precision(
    program: Program,
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    far: bool,
) -> bool:
    """Whether both agree without the roundings of a lower precision, which another kernel does elsewhere."""
    assert program.invariants is not None
    masters = {**state, **{name: tensor.detach() for name, tensor in state_of(model)}}  # `state` may be rounded
    units = tuple(replace(unit, graph=_in_single_precision(unit.graph)) for unit in program.units)
    single = replace(program, units=units, invariants=_in_single_precision(program.invariants))
    try:
        with without_autocast(model):
            return _is_same(single, model, masters, batch, 1e-4, far)
    except RuntimeError:
        return False  # the model itself goes to another precision


def _in_single_precision(module: fx.GraphModule) -> fx.GraphModule:
    def single(value: Any) -> Any:
        return torch.float32 if value in (torch.bfloat16, torch.float16) else value

    copied = copy_graph(module)
    copied.meta.update(module.meta)
    for node in calls(copied.graph):
        node.args = fx.node.map_aggregate(node.args, single)  # type: ignore[assignment]
        node.kwargs = fx.node.map_aggregate(node.kwargs, single)  # type: ignore[assignment]
    copied.recompile()
    return copied


def _agree_on_average(
    program: Program,
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
    tolerance: float,
) -> bool:
    """Whether means over some runs agree, of a model that draws what has no equal."""
    with torch.no_grad():
        ours = [run_evaluation(program, state, batch, seed) for seed in range(_DRAWN)]
    theirs = [_seeded(model, batch, seed) for seed in range(_DRAWN)]
    for place, kind in enumerate(("loss", "count")):
        expected = torch.tensor([each[place] for each in theirs], dtype=torch.float64)
        found = torch.tensor([float(each[kind]) for each in ours], dtype=torch.float64)
        spread = float((expected.var() + found.var()).sqrt())
        off = abs(float(expected.mean() - found.mean()))
        if not off <= tolerance * max(1.0, abs(float(expected.mean()))) + 4 * spread / _DRAWN**0.5:
            return False
    return True


def _seeded(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], seed: int) -> tuple[float, float]:
    try:
        with torch.no_grad():  # as in usual evaluation: forward may check
            return _values(model, batch, seed)
    except RuntimeError:  # forward itself takes gradients
        with torch.enable_grad():
            return _values(model, batch, seed)


def _values(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    loss, count = model(**batch)
    return float(loss.detach()), float(count.detach())
