"""Measured step times and the plan's predictions, by part; reported at the end of every run.

    predictions = Predictions()
    predictions.step(plan, result, seconds)          after every committed step
    predictions.report(plan, rank, group)            -> {"pipeline_ms": 812.3, "predicted_pipeline_ms": 804.0, ...}

The *pipeline* lasts from the first unit of a step to the last; the *update* is the optimizer's, on owned boxes and
replicas; the *exchange* is the rest: reductions, the vote, replicas, parameters, and the worker's time between steps.
The plan's exchange counts the messages alone, in sequence and not overlapped.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.disk_work import DISK_S
from elaswave_fx.observe.rank_events import Predicted
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank

_RECENT_STEPS = 1000
_UPDATING = ("UPDATE", "SNAPSHOT")
"""Instructions that update owned boxes and replicas; a rank has only those with work."""

_COLUMNS = 5
"""Columns of a rank in the report, in seconds: medians of step, pipeline, update; sums of modelled, overslept time."""


class Predictions:
    """Measurements of one rank, of the last steps in the newest epoch, whose plan they are compared with."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._pipelines_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._updates_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._modelled_s = self._overslept_s = 0.0

    def step(self, plan: Plan, result: _native.StepResult, seconds: float) -> None:
        """Record a committed step that took `seconds`. A step that was finished after an abort is not counted."""
        if not result.seconds:
            return
        if self._plan is None or plan.epoch != self._plan.epoch:
            self.__init__()
            self._plan = plan
        self._steps_s.append(seconds)
        self._pipelines_s.append(result.pipeline_seconds)
        timings = result.timings
        self._updates_s.append(math.fsum(timings[name].seconds for name in _UPDATING if name in timings))
        self._modelled_s += result.emulated.modelled_s
        self._overslept_s += result.emulated.overslept_s

    def report(self, plan: Plan, rank: Rank, group: _native.Group) -> Predicted | None:
        """Return the report, the same on all ranks of the plan, which all call this; None without a step in its epoch.

        Raises CommError if one of them is lost.
        """
        counts = self._plan is not None and self._plan.epoch == plan.epoch
        rows = torch.zeros(len(plan.ranks), _COLUMNS, dtype=torch.float64)
        if counts:
            medians = (statistics.median(times) for times in (self._steps_s, self._pipelines_s, self._updates_s))
            own = [*medians, self._modelled_s, self._overslept_s]
            rows[plan.ranks.index(rank)] = torch.tensor(own, dtype=torch.float64)
        parts = [(_COLUMNS * place, _COLUMNS * (place + 1)) for place in range(len(rows))]
        group.all_gather(rows.view(-1), parts, DISK_S)  # the first rank may still write the model
        if not counts:
            return None
        return _report(plan, len(self._steps_s), rows.tolist())


def _report(plan: Plan, steps: int, rows: Sequence[Sequence[float]]) -> Predicted:
    """Return the report; `rows`: the columns of each rank."""
    predicted = plan.predicted
    steps_s, pipelines_s, updates_s, modelled, overslept = zip(*rows, strict=True)
    step_s, pipeline_s, update_s = max(steps_s), max(pipelines_s), max(updates_s)
    modelled_s, overslept_s = math.fsum(modelled), math.fsum(overslept)
    return Predicted(
        ranks=len(rows),
        steps=steps,
        predicted_pipeline_ms=_ms(predicted.pipeline_s),
        pipeline_ms=_ms(pipeline_s),
        predicted_exchange_ms=_ms(predicted.exchange_s),
        exchange_ms=_ms(step_s - pipeline_s - update_s),
        predicted_update_ms=_ms(predicted.update_s),
        update_ms=_ms(update_s),
        predicted_step_ms=_ms(predicted.step_s),
        step_ms=_ms(step_s),
        pipeline_over_predicted=round(pipeline_s / predicted.pipeline_s, 4),
        step_over_predicted=round(step_s / predicted.step_s, 4),
        overslept_share=round(overslept_s / modelled_s, 5) if modelled_s else None,
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
