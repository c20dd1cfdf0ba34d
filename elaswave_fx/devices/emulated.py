"""The emulated device: real processes and messages, kernels replaced by the durations that the plan was made with.

    kernels(plan, rank)              -> {unit: (s per sample forward, backward, s per call, share)}, at its speed
    paces(plan.topology, rank)       -> {other rank: (latency in s, bytes per s)}, which its messages really take
    scaled_costs(artifact, 2.0)      -> costs by kind of unit, of 2 ms per sample and unit on average
    Faithfulness().report(group)     -> {"pipeline_ms": 812.3, "predicted_pipeline_ms": 804.0, ...}

Ranks that wait burn no processor, so many fit on few cores. Whether that is faithful is measured in every run: by how
much the sleeps were too long, and how long steps took against what the plan predicts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.devices.cpu import CpuDevice
from elaswave_fx.plan.cost import UnitCost
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.topology import Link, Rank, Topology
from elaswave_fx.program.artifact import Artifact, Seconds

Kernels = Mapping[int, tuple[float, float, float, float]]
"""Unit -> seconds per sample forward and backward, and per call; the share of weights in backward."""

_REPORT_S = 60.0


class EmulatedDevice(CpuDevice):
    """The memory and the tensors are the CPU's; see `Device`."""

    name = "emulated"


def kernels(plan: Plan, rank: Rank) -> Kernels:
    """Return how long the units of a rank's tile take it, at its speed and its clock."""
    speed = plan.topology.member(rank).speed / plan.slowdown(rank)
    costs = {unit: plan.workload.units[unit] for unit in plan.tile(rank).units}
    return {
        unit: (cost.forward_s / speed, cost.backward_s / speed, cost.fixed_s / speed, cost.weights_share)
        for unit, cost in costs.items()
    }


def paces(topology: Topology, rank: Rank) -> dict[int, tuple[float, float]]:
    """Rank -> (latency in seconds, bytes per second) of the links that are to be emulated: those between hosts that are
    not as this machine's."""
    links = {other: topology.link(rank, other) for other in topology.ranks if other != rank}
    return {other: (link.latency_s, link.bytes_per_s) for other, link in links.items() if link != Link()}


def scaled_costs(artifact: Artifact, costs: Sequence[UnitCost], unit_ms: float) -> dict[str, Seconds]:
    """Seconds per sample by kind, such that a unit takes `unit_ms` per sample on average, forward and backward
    together, while the proportions stay as they are. `costs` are those of the artifact's units."""
    whole_s = math.fsum(cost.forward_s + cost.backward_s for cost in costs)
    scale = 1e-3 * unit_ms * len(costs) / whole_s
    by_kind = zip(artifact.units, costs, strict=True)
    return {
        unit.kind: (scale * cost.forward_s, scale * cost.backward_s, scale * cost.backward_s * cost.weights_share)
        for unit, cost in by_kind
    }


class Faithfulness:
    """Compares the steps of one rank with the plan: those of the newest epoch, for another plan predicts otherwise."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._steps_s: list[float] = []
        self._spans_s: list[float] = []
        self._modelled_s = self._overslept_s = 0.0

    def step(self, plan: Plan, result: _native.StepResult, seconds: float) -> None:
        """A committed step that took `seconds`. One that was finished after it had been left is not counted."""
        emulated = result.emulated
        if not emulated.kernels:
            return
        if self._plan is None or plan.epoch != self._plan.epoch:
            self.__init__()
            self._plan = plan
        self._steps_s.append(seconds)
        self._spans_s.append(emulated.span_s)
        self._modelled_s += emulated.modelled_s
        self._overslept_s += emulated.overslept_s

    def report(self, plan: Plan, rank: Rank, group: _native.Group) -> dict[str, Any]:
        """The same on all ranks of the plan, all of which call it; empty without a step in its epoch.

        Raises CommError when one of them is lost.
        """
        counts = self._plan is not None and self._plan.epoch == plan.epoch
        own = (
            [statistics.median(self._steps_s), statistics.median(self._spans_s), self._modelled_s, self._overslept_s]
            if counts
            else [0.0] * 4
        )
        rows = torch.zeros(len(plan.ranks), 4, dtype=torch.float64)
        rows[plan.ranks.index(rank)] = torch.tensor(own, dtype=torch.float64)
        group.all_gather(rows.view(-1), [(4 * place, 4 * place + 4) for place in range(len(rows))], _REPORT_S)
        if not counts:
            return {}
        return _report(plan, len(self._steps_s), rows.tolist())


def _report(plan: Plan, steps: int, rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """`rows`: per rank the median step and span, and sums of modelled and overslept time, in seconds."""
    predicted_s = plan.predicted.pipeline_s
    step_s, span_s = max(row[0] for row in rows), max(row[1] for row in rows)
    modelled_s, overslept_s = math.fsum(row[2] for row in rows), math.fsum(row[3] for row in rows)
    return {
        "ranks": len(rows),
        "epoch": plan.epoch,
        "steps": steps,
        "predicted_pipeline_ms": round(1e3 * predicted_s, 3),
        "pipeline_ms": round(1e3 * span_s, 3),
        "step_ms": round(1e3 * step_s, 3),
        "pipeline_over_predicted": round(span_s / predicted_s, 4),
        "step_over_predicted": round(step_s / predicted_s, 4),
        "overslept_share": round(overslept_s / modelled_s, 5) if modelled_s else 0.0,
    }
