"""A job that runs gets one more rank, or another layout: `join`, `switch` and `migration`.

Requests are those of users; replicas sync behind the steps. What counts is by how much the steps across which an epoch
changes are longer than those after them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.make.planner import are_uniform
from tools.bench.gpt_job import FOUR_COLUMNS, EmulatedLanes, GptJob, tiny
from tools.bench.lost_ranks import MODES
from tools.bench.namespaces import missing
from tools.bench.own_job import OwnJob
from tools.bench.processes import BenchFailed
from tools.bench.recording import QUIET, Layout, LiveRun, Recording, normal_s, seconds, stops
from tools.bench.scenarios import Comparison, Figures, Runs, Scenario, Side, Table

BEFORE = 8
"""Steps before the first request."""

# --- join: one more rank, from its command to its share of the work, and what the others wait

AFTER_JOIN = 24
"""So many steps in one epoch after a join say that no stop follows."""

MARKS = {
    "process and number": "gets ready to join",
    "torch, data, program, tensors": "has program and initial tensors",
    "links": "is ready, and asks",
    "until the others stop": "is a member",
}
"""The parts of the time from the command to the first step of which the joiner is a member, but for that step, and the
words in the logs at their ends."""


def joined(ranks: int, is_tiny: bool = False) -> Scenario:
    """All stops together are to be shorter than a step: the one at which the joiner becomes a member, and those that
    follow when its replicas are there. The joiner is the command of users, in a process of its own."""
    lanes = EmulatedLanes(ranks, 1, 4, layers=2, step_s=0.05 if is_tiny else 0.25)
    compared = (Comparison("{case}: all stops against a step", "stops", "step", target=1.0, brief=True),)
    sides = {"ours": Side(script=join)}
    return Scenario(f"{ranks} ranks", lanes.gpt, sides, stops_of_a_join, compared, _join_notes, lanes.words)


def join(live: LiveRun) -> None:
    """Start one more rank. Its parts are noted in seconds."""
    ranks, folder = live.take(BEFORE).ranks, live.job.folder
    command = [sys.executable, "-m", "elaswave_fx.worker", str(folder)]
    joiner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)
    moments_s = [time.monotonic()]
    try:
        while live.steps[-1].ranks == ranks or len({step.epoch for step in live.steps[-AFTER_JOIN:]}) > 1:
            live.take()
            if joiner.poll() is not None and joiner.stdout is not None:
                raise BenchFailed(f"join: the joiner ended: {joiner.stdout.read().decode()}")
    finally:
        joiner.kill()
        joiner.wait()
    logs = [(folder / "logs" / name).read_text() for name in ("coordinator.log", f"rank-{ranks}.log")]
    lines = [line.split(maxsplit=1) for log in logs for line in log.splitlines()]
    moments_s += [next(float(at) for at, words in lines if mark in words) for mark in MARKS.values()]
    moments_s.append(next(step.at_s for step in live.steps if step.ranks > ranks))
    parts_s = (end - begin for begin, end in pairwise(moments_s))
    live.noted |= zip((*MARKS, "first step"), parts_s, strict=True)


def stops_of_a_join(run: Recording) -> Figures:
    """Milliseconds of all `stops`, and of a `step` before."""
    parts = {f"stops/epoch {epoch}": 1e3 * taken for epoch, taken in stops(run.steps).items()}
    return {"stops": sum(parts.values()), **parts, "step": 1e3 * normal_s(run.steps, run.steps[0].epoch)}


def _join_notes(scenario: Scenario, runs: Runs) -> Iterator[str]:
    """The time from the command to membership, and what was planned between the last report and the epoch."""
    run = runs["ours"][0]
    until, parts = f"the first step with {scenario.gpt.ranks + 1}", run.noted.items()
    words = ", ".join(f"{name} {taken:.2f}" for name, taken in parts)
    yield f"{scenario.name}: from the command to {until}: {sum(run.noted.values()):.2f} s ({words})"
    planned = (event for event in run.events_of("planned") if "plan_ms" in event)
    words = ", ".join(f"epoch {event['epoch']} {event['plan_ms']:.2f} ms" for event in planned)
    yield f"{scenario.name}: planned within the stops: {words}"


JOIN_TABLE = Table([joined(4), joined(16)], [joined(2, is_tiny=True)], ("",), of_ranks=joined)

# --- switch: other layouts, one after another, against checkpoint and restart


def switched(name: str, gpt: GptJob, layouts: Sequence[Layout], words: tuple[str, ...] = ()) -> Scenario:
    """The job begins with the first layout, has the others twice, as a pause is as long as the machine lets it be just
    then, and the first one at the end. Wanted: a pause takes half a step, and a restart 100 times as long."""
    first, other = ((f"parallel.dp={dp}", f"parallel.pp={pp}") for dp, pp in layouts[:2])
    sides = {
        "ours": Side(first, partial(reshape, [*layouts[1:], *layouts, layouts[0]])),
        "restart": Side((*other, f"steps={BEFORE}", f"checkpoint.every={BEFORE}"), partial(restart, first)),
    }
    comparisons = (
        Comparison("{case}: pause against half a step", "pause", "half a step", target=1.0),
        Comparison("{case}: pause against a restart", "each", "restart", target=100.0, rival="restart", brief=True),
    )
    figures, notes = partial(pauses, layouts[0]), partial(_switch_notes, layouts[0])
    return Scenario(name, gpt, sides, figures, comparisons, notes, words)


def reshape(layouts: Sequence[Layout], live: LiveRun) -> None:
    """Give the job each layout."""
    live.take(BEFORE)
    for layout in layouts:
        live.reshape(layout)


def restart(words: Sequence[str], live: LiveRun) -> None:
    """Note the time from the last step of a job, which saves, to the first step of another one that resumes from it
    with overrides: torch is loaded and the program in the cache."""
    last = live.take(BEFORE)
    live.job.events(until="finished")
    overrides = (*live.words, *words, f"resume={live.job.folder}", f"steps={2 * BEFORE}", "checkpoint.every=0")
    with OwnJob(live.gpt.config(*overrides)) as again:
        live.noted["restart"] = LiveRun(again, live.gpt).take().at_s - last.at_s


class Switch(NamedTuple):
    """A layout that was reached. `pause_s`: of the stop at which the job got it; `whole_s`: from the request to the
    first step with it; `step_s`: a normal step then."""

    name: str
    pause_s: float
    whole_s: float
    step_s: float


def switches(first: Layout, run: Recording) -> Iterator[Switch]:
    """One for each request, from the layout that the job began with."""
    layouts = pairwise((first, *(request.layout for request in run.reshapes)))
    ends = (*(request.steps for request in run.reshapes[1:]), None)
    for request, end, ((dp, pp), after) in zip(run.reshapes, ends, layouts, strict=True):
        steps = run.steps[request.steps - 1 : end]
        reached = {epoch: s for epoch, s in stops(steps).items() if are_uniform(run.plans[epoch].lanes, *after)}
        epoch = min(reached)
        begin_s = next(step.at_s for step in steps if step.epoch == epoch)
        name = f"{dp}x{pp} to {after[0]}x{after[1]}"
        yield Switch(name, reached[epoch], begin_s - request.at_s, normal_s(steps, epoch))


def pauses(first: Layout, run: Recording) -> Figures:
    """Milliseconds of each `pause`, by layouts too, and of `half a step`; or of the `restart`."""
    if not run.reshapes:
        return {"restart": 1e3 * run.noted["restart"]}
    found = list(switches(first, run))
    by_layouts = {each.name: [1e3 * s.pause_s for s in found if s.name == each.name] for each in found}
    pauses_ms = [1e3 * each.pause_s for each in found]
    half_ms = 500 * statistics.median(each.step_s for each in found)
    return {"pause": pauses_ms, "each": pauses_ms, "half a step": half_ms} | {
        f"pause/{name}": each for name, each in by_layouts.items()
    }


def _switch_notes(first: Layout, scenario: Scenario, runs: Runs) -> Iterator[str]:
    for each in switches(first, runs["ours"][0]):
        words = f"a reshape {each.whole_s:.2f} s, a step then {1e3 * each.step_s:.0f} ms"
        yield f"{scenario.name}, {each.name}: {words}"


SIXTEEN = EmulatedLanes(16, 1, 4, layers=8, step_s=0.25)
SWITCH_TABLE = Table(
    rows=[
        switched("4 ranks", FOUR_COLUMNS, ((4, 1), (2, 2), (1, 4), (3, 1), (1, 3), (2, 1))),
        switched("16 emulated ranks", SIXTEEN.gpt, ((16, 1), (8, 2), (4, 4), (2, 8), (5, 3), (3, 5)), SIXTEEN.words),
    ],
    tiny=[switched("2 ranks", tiny(FOUR_COLUMNS), ((2, 1), (1, 2)))],
    header=("", "a reshape: from the request to the step that has the lanes; training goes on meanwhile"),
)

# --- migration: what a change of the layout costs over slow links between hosts, in the background or not

CABLE_BYTES_PER_S = 31.25e6
"""Of each rank: 250 Mbit/s."""

LONGEST = 2.0
"""Wanted: no step takes so many times as long as a normal one of its layout."""


def migrated(
    gpt: GptJob, before: Layout, after: Layout, unit_ms: float, bytes_per_s: float = CABLE_BYTES_PER_S
) -> Scenario:
    """Each rank is a process in a network namespace; all hang on one switch, by cables that `tc tbf` slows down. Ranks
    are emulated, so that their messages have the two cores for themselves; boxes, records and parameters are real. The
    first layout leaves one rank nothing to do. Wanted: 80 % less stall in the background."""
    (dp, pp), (next_dp, next_pp) = before, after
    name = f"{dp}x{pp} to {next_dp}x{next_pp}, width {gpt.width}"
    words = ("device=emulated", f"emulated.unit_ms={unit_ms}", "parallel.schedule=1f1b")
    script, (own, rival) = partial(migrate, before, after, bytes_per_s), MODES[:2]
    sides = {mode: Side((f"lab.goals={mode}",), script) for mode in (own, rival)}
    stalls = f"{{case}}: exposed stall, {own} against {rival}"
    longest = f"{{case}}: the longest step against {LONGEST:g} normal ones"
    comparisons = (
        Comparison(stalls, "stall", "stall", target=5.0, side=own, rival=rival),
        Comparison(longest, "longest", "most", "x", 1.0, side=own),
    )
    return Scenario(name, gpt, sides, migration, comparisons, _migration_notes, words, bytes_per_s=bytes_per_s)


def migrate(before: Layout, after: Layout, bytes_per_s: float, live: LiveRun) -> None:
    """Give the job one layout, then the other. How much of a cable the fullest one carries in between is noted."""
    live.settle(lambda plan: plan.epoch == 0)
    live.reshape(before)
    sent, begin_s = [host.bytes_sent() for host in live.machines], live.steps[-1].at_s
    taken_s = live.take(QUIET).at_s - begin_s
    most = max(host.bytes_sent() - sooner for host, sooner in zip(live.machines, sent, strict=True))
    live.noted["load"] = most / taken_s / bytes_per_s
    live.reshape(after)


def _over(run: Recording) -> tuple[list[tuple[int, float, float]], float, float]:
    """Steps from the last request to the last stop: the epoch of each step, its seconds, and those of a normal one of
    its layout; and seconds of a normal step before and after."""
    request, steps = run.reshapes[-1], seconds(run.steps)
    begin = request.steps - 1
    before_s, after_s = map(_median_s, (steps[begin - QUIET + 1 : begin], steps[1 - QUIET :]))
    later = (plan for epoch, plan in run.plans.items() if epoch > run.steps[begin].epoch)
    changed = next(plan.epoch for plan in later if are_uniform(plan.lanes, *request.layout))
    return [(e, s, before_s if e < changed else after_s) for e, s in steps[begin : 1 - QUIET]], before_s, after_s


def _median_s(steps: Sequence[tuple[int, float]]) -> float:
    return statistics.median(taken for _, taken in steps)


def migration(run: Recording) -> Figures:
    """Milliseconds of the `stall`, which is all time beyond normal steps, and the `longest` step in normal ones."""
    steps, _, _ = _over(run)
    stall_ms = 1e3 * sum(taken - normal for _, taken, normal in steps)
    return {"stall": stall_ms, "longest": max(taken / normal for _, taken, normal in steps), "most": LONGEST}


def _migration_notes(scenario: Scenario, runs: Runs) -> Iterator[str]:
    """What moved when, and how long each step took."""
    for mode, run in ((mode, run) for mode, found in runs.items() for run in found):
        steps, before_s, after_s = _over(run)
        moved = [e for e in run.events_of("transferred") if e["epoch"] > run.steps[run.reshapes[-1].steps - 1].epoch]
        in_stops, behind = (sum(event[name] for event in moved) / 1e6 for name in ("bytes", "bytes_behind"))
        yield (
            f"{scenario.name}, {mode}: {in_stops:.3g} MB in stops, {behind:.3g} MB behind steps; steps of "
            f"{before_s:.2f} s before, with {run.noted['load']:.0%} of the fullest cable, {after_s:.2f} s after; "
            f"longest {migration(run)['longest']:.2f}x; {' '.join(f'{epoch}:{taken:.2f}' for epoch, taken, _ in steps)}"
        )


def _check_hosts() -> None:
    lacking = missing(("ip", "tc"))
    if lacking is not None:
        raise ConfigError(f"migration: {lacking}")


LANES = GptJob(layers=4, width=352, heads=8, seq_len=16, global_batch=12, ranks=4, micro_batch=4, clip_norm=None)
STAGES = replace(LANES, layers=6, width=480)
MIGRATION_TABLE = Table(
    rows=[
        migrated(LANES, (3, 1), (4, 1), unit_ms=72.0),  # a lane more, whose rank gets all parameters
        migrated(STAGES, (1, 3), (1, 4), unit_ms=20.0),  # a stage more, for which units move at every border
        migrated(replace(STAGES, width=680), (1, 3), (1, 4), unit_ms=40.0),  # twice the parameters, twice the work
    ],
    tiny=[migrated(tiny(LANES), (3, 1), (4, 1), unit_ms=2.0, bytes_per_s=1e7)],
    header=("",),
    check=_check_hosts,
)
