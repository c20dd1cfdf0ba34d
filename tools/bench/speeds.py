"""Ranks whose speed changes, by the clocks that the planner chooses or because something holds one up: `frequency` and
`slow`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import clock_words, with_clocks
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power
from tools.bench.gpt_job import COMPUTE_BOUND, EmulatedLanes, tiny
from tools.bench.processes import BenchFailed
from tools.bench.recording import Recording
from tools.bench.scenarios import Comparison, Figures, Runs, Scenario, Side, Table

# --- frequency: energy of a sample and length of a step, with the planner's clocks over fixed ones

WATTS = {1050: 162, 1200: 198, 1350: 243, 1500: 300, 1650: 370, 1800: 453}
"""By the clock in MHz, of which 1500 is nominal."""

POINTS = tuple(OperatingPoint(mhz, mhz / 1500, watts) for mhz, watts in WATTS.items())
NOMINAL, IDLE_W = Power(POINTS).nominal, 60.0
CAP_STEP = 0.02
"""Of the cap, by which it is lowered while the step stays as short."""

SAME_STEP = 0.99
"""The target: equal, but for noise."""

STEPS, SKIPPED = 8, 2


def _clocks(points: Sequence[OperatingPoint], cap_w: float | None = None) -> Side:
    listed = ", ".join(f"{{mhz: {each.mhz:g}, speed: {each.speed:g}, watts: {each.watts:g}}}" for each in points)
    return Side((f"power.points=[{listed}]", *(() if cap_w is None else (f"power.cap_w={cap_w:g}",))))


FIXED = _clocks((NOMINAL,))
"""All ranks at the nominal clock."""


def clocked(lanes: EmulatedLanes, speeds: Sequence[float] = ()) -> Scenario:
    """Ranks of these speeds at the nominal clock. Step times are measured. Joules are not: they are the watts of a
    rank's clock for the time that its plan says it computes, and `IDLE_W` for the rest of the measured step."""
    name = lanes.name + "".join(f", rank {rank} at {speed:g}" for rank, speed in enumerate(speeds) if speed != 1)
    words = (f"emulated.speeds=[{','.join(map(str, speeds))}]",) if speeds else ()
    return Scenario(
        name, lanes.gpt, {}, step_and_sample, notes=_clock_notes, reference=FIXED, prepare=_with_caps, repeats=2,
        words=(*lanes.words, *words, f"steps={STEPS}", f"power.idle_w={IDLE_W:g}"),
    )  # fmt: skip


def step_and_sample(run: Recording) -> Figures:
    """Milliseconds of a `step` and joules of a `sample`."""
    lines = run.metrics[SKIPPED:]
    return {"step": _median(lines), "sample": _median(lines, "energy_per_token_j")}


def _with_caps(scenario: Scenario, fixed: Recording) -> Scenario:
    """Plan once under the cap that all ranks draw at nominal clocks, and once under the least cap by which the plan
    promises a step as short as the fixed one."""
    cap_w, plan = NOMINAL.watts * scenario.gpt.ranks, fixed.plans[0]
    sides, comparisons = {"fixed": FIXED}, list[Comparison]()
    for side, watts in (("capped", cap_w), ("equal", _least_cap_w(plan, cap_w))):
        sides[side], name = _clocks(POINTS, watts), f"{{case}}, {watts:g} W"
        comparisons += [
            Comparison(f"{name}: a step", "step", "step", target=SAME_STEP, side=side, rival="fixed"),
            Comparison(f"{name}: a sample", "sample", "sample", "J", side=side, rival="fixed"),
        ]
    return replace(scenario, sides=sides, comparisons=comparisons)


def _least_cap_w(fixed: Plan, cap_w: float) -> float:
    """The least cap by which the same layout has a step as short as `fixed`, to `CAP_STEP`."""
    limit_s = fixed.predicted.step_s * (1 + ROUNDING)
    least_w = len(fixed.ranks) * Power(POINTS).least_w
    while (lower_w := round(cap_w * (1 - CAP_STEP))) > least_w:
        topology = replace(fixed.topology, power=Power(POINTS, lower_w, IDLE_W))
        if with_clocks(replace(fixed, topology=topology)).predicted.step_s > limit_s:
            break
        cap_w = lower_w
    return cap_w


def _clock_notes(scenario: Scenario, runs: Runs) -> Iterator[str]:
    yield from ("", f"{scenario.name}: {scenario.gpt.text()}")
    for name in scenario.sides:
        yield f"  {name}: {'; '.join(clock_words(runs[name][0].plans[0]))}"


def _median(lines: Sequence[Mapping[str, Any]], name: str = "step_ms") -> float:
    return statistics.median(line[name] for line in lines) if lines else float("nan")


CLOCK_TABLE = Table(
    rows=[
        clocked(EmulatedLanes(2, 4, 16, layers=4, step_s=1.0)),
        clocked(EmulatedLanes(2, 4, 4, layers=4, step_s=1.0)),
        clocked(EmulatedLanes(2, 4, 16, layers=6, step_s=1.0), speeds=(1, 1, 0.7, 1, 1, 1, 1, 1)),
    ],  # units of so few layers need not divide evenly
    tiny=[clocked(EmulatedLanes(1, 2, 2, layers=3, step_s=0.2))],
)

# --- slow: one of eight ranks at half of its speed, from a step on, and again at its whole; and a busy machine

RANKS, VICTIM, SPEED = 8, 3, 0.5
MOST_STEPS = 20.0
"""The target: until a plan has another share for the rank."""

SLOW_NOTES = (
    "",
    f"proportional: the undisturbed step of the same run, times {RANKS} over {RANKS - 1 + SPEED:g}",
    "steps until less work: from the first slow step to the first one of the new plan; until its share again: from the",
    "first step at the old speed; left out where the run ended before",
)


def slow_rank(before: int, slow: int, after: int) -> Scenario:
    """Data parallel, 24 granules a lane, so that shares of half of one can be met. A step is as short as many are
    here."""
    lanes = EmulatedLanes(RANKS, 1, 6, layers=2, step_s=0.3)
    fault = f"{{step: {before}, rank: {VICTIM}, kind: slow, speed: {SPEED}, steps: {slow}}}"
    comparisons = (
        Comparison("steps until less work", "until less", "most", "steps", 1.0, brief=True),
        Comparison("a step with less work: proportional", "shared", "proportional", target=0.95, brief=True),
        Comparison("a step with less work: as it was before", "shared", "held up", brief=True),
        Comparison("steps until its share again", "until again", "most", "steps", 1.0, brief=True),
    )
    words = (*lanes.words, f"steps={before + slow + after}", f"faults=[{fault}]")
    figures = partial(around_a_slow_rank, before, before + slow)
    return Scenario("a slow rank", lanes.gpt, {"ours": Side()}, figures, comparisons, words=words)


def around_a_slow_rank(before: int, until: int, run: Recording) -> Figures:
    """Steps until a plan has less work for the rank, and until it has its share again; and what a step takes
    meanwhile. The rank is slow from step `before` on, `until` another one."""
    lines = run.metrics
    first = {line["epoch"]: line["step"] for line in reversed(lines)}
    changes = [first[event["epoch"]] for event in run.events_of("slowed")]
    if not changes:
        raise BenchFailed(f"slow: no plan had less work for rank {VICTIM} in {until - before} steps")
    less, *again = changes
    return {
        "most": MOST_STEPS,
        "until less": float(max(1, less - before)),
        "proportional": _median(lines[2:before]) * RANKS / (RANKS - 1 + SPEED),
        "held up": _median(lines[before + 1 : less]),
        "shared": [line["step_ms"] for line in lines[less + 1 : until]],
        "until again": [float(max(1, step - until)) for step in again[:1]],
    }


def busy(steps: int) -> Scenario:
    """Two ranks that compute beside as many processes that spin as there are cores: no plan may change."""
    name = f"plans of {steps} steps of {{step_ms:.3g}} ms on a busy machine"
    return Scenario(
        "a busy machine", tiny(COMPUTE_BOUND), {"ours": Side()}, plans_made,
        (Comparison(name, "plans", "first", "plans", 1.0, brief=True),), words=(f"steps={steps}",), beside=_spinning,
    )  # fmt: skip


def plans_made(run: Recording) -> Figures:
    """The `first` plan, and all `plans`."""
    return {"first": 1.0, "plans": 1.0 + len(run.events_of("slowed")), "step_ms": _median(run.metrics)}


@contextmanager
def _spinning() -> Iterator[None]:
    """Processes that do nothing else, one for each core."""
    spin = [sys.executable, "-c", "while True:\n    pass"]
    processes = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


SLOW_TABLE = Table([slow_rank(20, 60, 40), busy(5000)], [slow_rank(6, 30, 4), busy(20)], SLOW_NOTES)
