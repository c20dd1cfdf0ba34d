"""Cuts and clocks in one: a stage that holds everybody up may run at a higher clock, or hand a unit to the next one.

    with_cuts_and_clocks(plan, power)  ->  the plan, or one whose lanes are cut near it; with the best clocks
    cut_for_clocks(plan, make)         ->  the same of a plan that has clocks; `make` gives it other lanes

The cut that is best at nominal clocks is where it begins. What is compared is a whole step at the clocks that are best
for each cut under the power cap: the shorter one, and of equal ones that of less energy. After a loss what ranks have
to fetch before they go on counts too.
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
from elaswave_fx.plan.work.box import Span
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.operating_points import Power
from elaswave_fx.plan.work.tiling import Lane

MOVES = 16
"""Cuts are changed at most so often."""

TASKS_A_CUT = 4_000
"""So many tasks are run abstractly for the clocks of a cut that is tried; the first one, and the one that is taken, get
more."""


Make = Callable[[Sequence[Lane]], Plan | None]
"""The plan of some lanes, for nominal clocks; None if it does not fit."""

Stall = Callable[[Sequence[Lane]], float]
"""Seconds in which everybody waits before the first step with these lanes."""


def with_cuts_and_clocks(plan: Plan, power: Power) -> Plan:
    """`plan` is one for nominal clocks, and so new that nobody has anything yet. PlanError if even the lowest clocks
    draw more than the cap."""
    times, copies = LaneTimes(plan.workload, plan.topology), max((len(box.holders) for box in plan.boxes), default=0)

    def make(lanes: Sequence[Lane]) -> Plan | None:
        other = make_plan(plan.topology, plan.workload, lanes, "", copies, times=times)
        return other if fits_memory(other) else None

    return cut_for_clocks(with_clocks(replace(plan, topology=replace(plan.topology, power=power))), make)


def cut_for_clocks(first: Plan, make: Make, stall: Stall = lambda lanes: 0.0) -> Plan:
    """`first` has clocks. With the same boxes as `make` gives, or others; words say where units are cut after all."""
    topology, life_s = first.topology, first.topology.life_s

    def cost(plan: Plan) -> tuple[float, float]:
        """Seconds of a step, with the share that each has in what everybody waits for at first; and its joules."""
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
    """By seconds, and where these are equal by joules."""
    if abs(one[0] - other[0]) > ROUNDING * other[0]:
        return one[0] < other[0]
    return one[1] < other[1] * (1 - ROUNDING)


def _near(lanes: Sequence[Lane], plan: Plan) -> Iterator[tuple[Lane, ...]]:
    """Lanes of one kind are cut alike, a unit from how they are."""
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
    """Where units are cut after all, and what that brings."""
    cuts = " | ".join(", ".join(map(str, cut[1:-1])) for cut in dict.fromkeys(_borders(found.lanes)))
    steps = f"{found.predicted.step_s * 1e3:.4g} ms instead of {first.predicted.step_s * 1e3:.4g} ms"
    return f"with clocks, units are cut at {cuts}: a step of {steps}"
