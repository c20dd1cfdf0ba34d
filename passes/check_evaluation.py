"""Comparison of the derived evaluation with the model in evaluation mode, on one batch.

    evaluation_agrees(program, model, state, batch)   ->  False where label smoothing is for training alone

Other parameters and buffers are tried too: a gate that starts at 0, or an average that starts at its target, hides a
difference between the modes. So may a bound that no value reaches yet: see `ModeCalls`, and `FAR`.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from elaswave_fx.passes.evaluate import evaluation_graph, evaluation_results, run_evaluation
from elaswave_fx.program.autocast import without_autocast
from elaswave_fx.program.equal_draws import EqualDraws, UnknownDraw
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    calls,
    copy_graph,
    is_aten,
    output_node,
    output_nodes,
    placeholders,
    source_of,
)
from elaswave_fx.program.keyed_draws import draws
from elaswave_fx.program.mode_calls import ModeCalls, operator_name
from elaswave_fx.program.state_kept import equal_with_nan, state_kept, state_of
from elaswave_fx.program.trial_values import FAR, perturbed

_MEASURED = (ResultKind.LOSS, ResultKind.COUNT)
_DRAWN = 8
"""Evaluation runs of a model that draws in evaluation what `EqualDraws` does not know."""


class _ModelFails(RuntimeError):
    """The model raises an error in evaluation mode, or returns something else than a loss and a count there, as
    detectors do."""


def evaluation_agrees(
    program: Program, model: torch.nn.Module, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> bool:
    """Whether the derived evaluation equals the model in evaluation mode: within rounding, or within the spread of the
    model's draws in evaluation. `state`: parameters and buffers as the program reads them."""
    samples = len(next(iter(batch.values()))) if program.dynamic_batch else program.granule
    trial = _Trial(program, model, {name: tensor[:samples].clone() for name, tensor in batch.items()})
    was_training = model.training
    model.train()
    try:
        if not trial.agrees(state) or trial.calls_differ():
            return False
        return all(trial.agrees_with_others(state, factor) for factor in (1.0, FAR))
    except _ModelFails:
        return False
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class _Trial:
    """A program and its model, and a batch that both evaluate."""

    program: Program
    model: torch.nn.Module
    batch: Mapping[str, torch.Tensor]

    def agrees(self, state: Mapping[str, torch.Tensor], far: bool = False) -> bool:
        """Whether both agree once a model in training has got into evaluation mode. Modes may not change state, as by
        averages in the place of weights. `far`: the parameters are beyond usual sizes."""
        before = {name: tensor.detach().clone() for name, tensor in state_of(self.model)}
        self.model.eval()
        try:
            now = dict(state_of(self.model))
            same = now.keys() == before.keys()
            same = same and all(equal_with_nan(now[name], tensor) for name, tensor in before.items())
            same = same and self._sums_agree(state, far)
        finally:
            evaluated = {name: tensor.detach().clone() for name, tensor in state_of(self.model)}
            self.model.train()
        after = state_of(self.model)
        return same and all(equal_with_nan(evaluated[name], tensor) for name, tensor in after if name in evaluated)

    def agrees_with_others(self, state: Mapping[str, torch.Tensor], factor: float) -> bool:
        """Whether both agree with other parameters and buffers, parameters `factor` times as large; True where either
        does not run with those."""
        parameters = {name for name, _ in self.model.named_parameters()}
        with state_kept(self.model), contextlib.suppress(RuntimeError, ValueError):
            moved = {name: perturbed(tensor, name) for name, tensor in state.items()}
            moved |= {name: factor * moved[name] for name in parameters if moved[name].is_floating_point()}
            with torch.no_grad():
                for name, tensor in state_of(self.model):
                    tensor.copy_(moved[name])
            return self.agrees(moved, far=factor != 1.0)
        return True

    def calls_differ(self) -> bool:
        """Whether the modes differ by more calls than the program's derivation leaves out."""
        try:
            modes = ModeCalls.of(self.model, self.batch)
        except RuntimeError:  # it runs neither with gradients nor without
            return True
        return modes.differ(*_live_operators(self.program))

    def _sums_agree(self, state: Mapping[str, torch.Tensor], far: bool) -> bool:
        tolerance = 1e-4 if far else 1e-5
        lowest = self.program.float_dtypes() & {torch.bfloat16, torch.float16}
        with torch.no_grad(), contextlib.suppress(UnknownDraw), EqualDraws():
            same = self._is_same(state, tolerance, far)
            return same or (bool(lowest) and self._is_same_in_single_precision(state, far))
        return self._agree_on_average(state, 2e-2 if lowest else tolerance)

    def _is_same(self, state: Mapping[str, torch.Tensor], tolerance: float, far: bool) -> bool:
        ours = run_evaluation(self.program, state, self.batch)
        twice = (self._seeded(0), self._seeded(0))  # it may change what it reads
        return all(
            abs(one - float(ours[kind])) <= tolerance * max(1.0, abs(one)) or (far and not math.isfinite(one))
            for theirs in twice
            for one, kind in zip(theirs, ("loss", "count"), strict=True)
        )

    def _is_same_in_single_precision(self, state: Mapping[str, torch.Tensor], far: bool) -> bool:
        """Whether both agree without the roundings of a lower precision, which another kernel does elsewhere."""
        program = self.program
        assert program.invariants is not None
        masters = {**state, **{name: tensor.detach() for name, tensor in state_of(self.model)}}  # those may be rounded
        units = tuple(replace(unit, graph=_in_single_precision(unit.graph)) for unit in program.units)
        single = replace(program, units=units, invariants=_in_single_precision(program.invariants))
        try:
            with without_autocast(self.model):
                return replace(self, program=single)._is_same(masters, 1e-4, far)
        except RuntimeError:
            return False  # the model itself goes to another precision

    def _agree_on_average(self, state: Mapping[str, torch.Tensor], tolerance: float) -> bool:
        """Whether means over some runs agree, of a model that draws what has no equal."""
        with torch.no_grad():
            ours = [run_evaluation(self.program, state, self.batch, seed) for seed in range(_DRAWN)]
        theirs = [self._seeded(seed) for seed in range(_DRAWN)]
        for place, kind in enumerate(("loss", "count")):
            expected = torch.tensor([each[place] for each in theirs], dtype=torch.float64)
            found = torch.tensor([float(each[kind]) for each in ours], dtype=torch.float64)
            spread = float((expected.var() + found.var()).sqrt())
            off = abs(float(expected.mean() - found.mean()))
            if not off <= tolerance * max(1.0, abs(float(expected.mean()))) + 4 * spread / _DRAWN**0.5:
                return False
        return True

    def _seeded(self, seed: int) -> tuple[float, float]:
        """Loss and count of the model."""
        try:
            with torch.no_grad():  # as in usual evaluation: forward may check
                return self._values(seed)
        except _ModelFails:  # forward itself takes gradients
            with torch.enable_grad():
                return self._values(seed)

    def _values(self, seed: int) -> tuple[float, float]:
        torch.manual_seed(seed)
        try:
            loss, count = self.model(**self.batch)
            return float(loss.detach()), float(count.detach())
        except UnknownDraw:
            raise
        except Exception as error:  # of the user's code
            raise _ModelFails from error


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
