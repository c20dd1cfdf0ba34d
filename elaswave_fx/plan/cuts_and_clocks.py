"""Cuts and clocks in one: a stage that holds everybody up may run at a higher clock, or hand a unit to the next one.

    with_cuts_and_clocks(plan)  ->  the plan, or one whose lanes are cut near it; with the clocks for the shortest step

The cut that is best at nominal clocks is where it begins. What is compared is a whole step at the clocks that are best
for each cut under the power cap: the shorter one, and of equal ones that of less energy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elaswave_fx.plan.balance import near_cuts
from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import ROUNDING
from elaswave_fx.plan.derive import make_plan
from elaswave_fx.plan.frequency import with_clocks
from elaswave_fx.plan.lane_times import LaneTimes
from elaswave_fx.plan.operating_points import Power
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import fits_memory
from elaswave_fx.plan.tiling import Lane

MOVES = 16
"""Cuts are changed at most so often."""

TASKS_A_CUT = 4_000
"""So many tasks are run abstractly for the clocks of a cut that is tried; the first one, and the one that is taken, get
more."""


def with_cuts_and_clocks(plan: Plan, power: Power) -> Plan:
    """`plan` is one for nominal clocks. PlanError if even the lowest clocks draw more than the cap."""
    topology = replace(plan.topology, power=power)
    times, copies = LaneTimes(plan.workload, plan.topology), max((len(box.holders) for box in plan.boxes), default=0)
    first = best = with_clocks(replace(plan, topology=topology))
    seen = {_borders(plan.lanes)}
    for _ in range(MOVES):
        for lanes in _near(best.lanes, plan):
            if _borders(lanes) in seen:
                continue
            seen.add(_borders(lanes))
            other = make_plan(plan.topology, plan.workload, lanes, "", copies, times=times)
            if not fits_memory(other):
                continue
            other = with_clocks(replace(other, topology=topology), TASKS_A_CUT)
            if _is_better(other, best):
                best = other
                break
        else:
            break
    if best is first:
        return first
    best = with_clocks(best)
    return replace(best, reason="; ".join(part for part in (plan.reason, _words(best, first)) if part))


def _is_better(other: Plan, best: Plan) -> bool:
    """By the length of a step, then by its energy."""
    a, b = other.predicted, best.predicted
    if abs(a.step_s - b.step_s) > ROUNDING * b.step_s:
        return a.step_s < b.step_s
    return a.energy_j < b.energy_j * (1 - ROUNDING)


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
