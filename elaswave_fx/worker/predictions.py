"""What steps took against what their plan predicts, by part; told at the end of every run.

    predictions = Predictions()
    predictions.step(plan, result, seconds)          after every committed step
    predictions.report(plan, rank, group)            -> {"pipeline_ms": 812.3, "predicted_pipeline_ms": 804.0, ...}

The *pipeline* goes from the first unit to the last one of a step, the *exchange* is the rest of it: sums, the vote, the
update, copies, parameters, and what the worker does between two steps. The plan's exchange is that of the messages
alone, one after another and not overlapped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.topology import Rank

_REPORT_S = 60.0


class Predictions:
    """Of one rank; of the steps in the newest epoch, for another plan predicts otherwise."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._steps_s: list[float] = []
        self._pipelines_s: list[float] = []
        self._modelled_s = self._overslept_s = 0.0

    def step(self, plan: Plan, result: _native.StepResult, seconds: float) -> None:
        """A committed step that took `seconds`. One that was finished after it had been left is not counted."""
        if not result.seconds:
            return
        if self._plan is None or plan.epoch != self._plan.epoch:
            self.__init__()
            self._plan = plan
        self._steps_s.append(seconds)
        self._pipelines_s.append(result.pipeline_seconds)
        self._modelled_s += result.emulated.modelled_s
        self._overslept_s += result.emulated.overslept_s

    def report(self, plan: Plan, rank: Rank, group: _native.Group) -> dict[str, Any]:
        """The same on all ranks of the plan, all of which call it; empty without a step in its epoch.

        Raises CommError when one of them is lost.
        """
        counts = self._plan is not None and self._plan.epoch == plan.epoch
        own = [0.0] * 4
        if counts:
            medians = [statistics.median(self._steps_s), statistics.median(self._pipelines_s)]
            own = [*medians, self._modelled_s, self._overslept_s]
        rows = torch.zeros(len(plan.ranks), 4, dtype=torch.float64)
        rows[plan.ranks.index(rank)] = torch.tensor(own, dtype=torch.float64)
        group.all_gather(rows.view(-1), [(4 * place, 4 * place + 4) for place in range(len(rows))], _REPORT_S)
        if not counts:
            return {}
        return _report(plan, len(self._steps_s), rows.tolist())


def _report(plan: Plan, steps: int, rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """`rows`: per rank the median step and pipeline, and sums of modelled and overslept time, in seconds."""
    predicted = plan.predicted
    step_s, pipeline_s = max(row[0] for row in rows), max(row[1] for row in rows)
    modelled_s, overslept_s = math.fsum(row[2] for row in rows), math.fsum(row[3] for row in rows)
    found = {
        "ranks": len(rows),
        "epoch": plan.epoch,
        "steps": steps,
        "predicted_pipeline_ms": _ms(predicted.pipeline_s),
        "pipeline_ms": _ms(pipeline_s),
        "predicted_exchange_ms": _ms(predicted.exchange_s),
        "exchange_ms": _ms(step_s - pipeline_s),
        "predicted_step_ms": _ms(predicted.step_s),
        "step_ms": _ms(step_s),
        "pipeline_over_predicted": round(pipeline_s / predicted.pipeline_s, 4),
        "step_over_predicted": round(step_s / predicted.step_s, 4),
    }
    return found | ({"overslept_share": round(overslept_s / modelled_s, 5)} if modelled_s else {})


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
