"""Joint choice of cuts and clocks: a bottleneck stage may run at a higher clock, or pass a unit to its neighbour.

    with_cuts_and_clocks(plan, power)  ->  the plan, or one with a nearby cut; with the best clocks
    cut_for_clocks(plan, make)         ->  the same for a plan that has clocks; `make` plans other lanes

The search starts at the best cut for nominal clocks. Each cut is compared by a whole step at its best clocks under the
power cap: the shorter step, then the lower energy. After a failure, fetching parameters before the next step counts
too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from elaswave_fx.plan.lanes.balance import near_cuts
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import fits_memory
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import with_clocks
from elaswave_fx.plan.predict.lane_times import LaneTimes
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.operating_points import Power
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane

MOVES = 16
"""Upper bound of changes of the cut."""

TASKS_A_CUT = 4_000
"""Tasks run abstractly for the clocks of one cut that is tried; the first cut and the chosen cut get more."""


Make = Callable[[Sequence[Lane]], Plan | None]
"""The plan of some lanes for nominal clocks; None if it does not fit."""

Stall = Callable[[Sequence[Lane]], float]
"""Seconds in which all ranks wait before the first step with these lanes."""


def with_cuts_and_clocks(plan: Plan, power: Power) -> Plan:
    """The plan with the best cuts and clocks. `plan` is for nominal clocks, and no rank has state yet. Raise PlanError
    if even the lowest clocks draw more than the cap."""
    times, replicas = LaneTimes(plan.workload, plan.topology), max((len(box.holders) for box in plan.boxes), default=0)

    def make(lanes: Sequence[Lane]) -> Plan | None:
        other = make_plan(plan.topology, plan.workload, lanes, "", replicas, times=times)
        return other if fits_memory(other) else None

    return cut_for_clocks(with_clocks(replace(plan, topology=replace(plan.topology, power=power))), make)


def cut_for_clocks(first: Plan, make: Make, stall: Stall = lambda lanes: 0.0) -> Plan:
    """`first`, which has clocks, or a plan of `make` with a better cut; its reason says where units are cut. `make`
    keeps the boxes of `first` or deals new ones."""
    topology, life_s = first.topology, first.topology.life_s

    def cost(plan: Plan) -> tuple[float, float]:
        """Seconds of a step, including its share of the initial stall, and joules."""
        left_s = max(life_s - stall(plan.lanes), 1e-3 * life_s)
        return plan.predicted.step_s * life_s / left_s, plan.predicted.energy_j

    best, seen = first, {_borders(first.lanes)}
    for _ in range(MOVES):
        for lanes in _near(best.lanes, first):
            if _borders(lanes) in seen:
                continue
            seen.add(_borders(lanes))
            other = make(lanes)
            if other is None:
                continue
            other = with_clocks(replace(other, topology=topology), TASKS_A_CUT)
            if _is_less(cost(other), cost(best)):
                best = other
                break
        else:
            break
    if best is first:
        return first
    best = with_clocks(best)
    return replace(best, reason="; ".join(part for part in (first.reason, _words(best, first)) if part))


def _is_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether `one` is less in seconds; where these are equal, in joules."""
    if abs(one[0] - other[0]) > ROUNDING * other[0]:
        return one[0] < other[0]
    return one[1] < other[1] * (1 - ROUNDING)


def _near(lanes: Sequence[Lane], plan: Plan) -> Iterator[tuple[Lane, ...]]:
    """Lanes whose cut differs by one unit; lanes of one kind are cut alike."""
    kinds = [_kind(lane, plan) for lane in lanes]
    for kind in dict.fromkeys(kinds):
        borders = next(lane.borders for lane, other in zip(lanes, kinds, strict=True) if other == kind)
        for cut in near_cuts(borders):
            yield tuple(_cut(lane, cut) if other == kind else lane for lane, other in zip(lanes, kinds, strict=True))


def _kind(lane: Lane, plan: Plan) -> tuple[object, ...]:
    members = [plan.topology.member(rank) for rank in lane.ranks]
    return lane.borders, tuple(stage.deal for stage in lane.stages), tuple((m.speed, m.memory_bytes) for m in members)


def _cut(lane: Lane, borders: Sequence[int]) -> Lane:
    spans = itertools.pairwise(borders)
    stages = tuple(replace(stage, units=Span(*span)) for stage, span in zip(lane.stages, spans, strict=True))
    return replace(lane, stages=stages)


def _borders(lanes: Sequence[Lane]) -> tuple[tuple[int, ...], ...]:
    return tuple(lane.borders for lane in lanes)


def _words(found: Plan, first: Plan) -> str:
    """Where units are cut instead, and the gain."""
    cuts = " | ".join(", ".join(map(str, cut[1:-1])) for cut in dict.fromkeys(_borders(found.lanes)))
    steps = f"{found.predicted.step_s * 1e3:.4g} ms instead of {first.predicted.step_s * 1e3:.4g} ms"
    return f"with clocks, units are cut at {cuts}: a step of {steps}"
