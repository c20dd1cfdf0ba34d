"""switch: a job that runs is given other lanes, six layouts one after the other, against checkpoint and restart.

The job is one of `train`, and is asked as `python -m elaswave_fx.reshape` asks it. Copies go where they are needed
behind the steps; what counts is the stop at which the new lanes are taken: by how much its step is longer than those
after it. The peer is the same runtime, which ends with a checkpoint, and goes on from it with other lanes: from its
last step to its first one, torch loaded and the program in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from elaswave_fx.control.agent.ask_to_reshape import ask_to_reshape
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.plan.next.replan_request import ReshapeRequest
from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import FOUR_COLUMNS, EmulatedLanes, GptJob, tiny
from tools.bench.own_job import FOREVER, OwnJob, Variant
from tools.bench.planned_stops import Step, next_step, normal_s, stops
from tools.bench.processes import BenchFailed
from tools.bench.results import Entry, Options, Outcome

FOUR = ((4, 1), (2, 2), (1, 4), (3, 1), (1, 3), (2, 1))
SIXTEEN = ((16, 1), (8, 2), (4, 4), (2, 8), (5, 3), (3, 5))
"""Layouts, dp x pp; the first one is what the job begins with, and comes back at the end."""

ROUNDS = 2
"""So often a job goes through its layouts: a pause is as long as the machine lets it be just then."""

STEP_S = 0.25
"""Of emulated ranks."""

BEFORE, QUIET, MOST = 8, 12, 400
"""Steps before the first reshape; steps with its lanes after which no stop follows; steps that may pass until then."""

ANSWER_S = 60.0
PAUSE, RESTARTS = 0.5, 100.0
"""Wanted: at most so much of a step; a restart takes so many times as long."""


@dataclass(frozen=True)
class Case:
    """A job, and the layouts that it is given. `words`: overrides."""

    name: str
    gpt: GptJob
    layouts: tuple[tuple[int, int], ...]
    words: tuple[str, ...] = ()

    def words_of(self, layout: tuple[int, int]) -> tuple[str, ...]:
        """Overrides of a job that begins with a layout."""
        return (*self.words, f"parallel.dp={layout[0]}", f"parallel.pp={layout[1]}")


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Four ranks, which compute, and sixteen emulated ones."""
    entries: list[Entry] = []
    notes = ["", "a reshape: from the request to the step that has the lanes; training goes on meanwhile"]
    for case in _cases(options.tiny):
        progress(f"{case.name}: {len(case.layouts)} layouts")
        switches = list(_switches(case))
        progress(f"{case.name}: checkpoint and restart")
        restart_s = _restart_s(case)
        pauses_ms = [1e3 * each.pause_s for each in switches]
        step_ms = 1e3 * statistics.median(each.step_s for each in switches)
        pause_ms = statistics.median(pauses_ms)
        names = dict.fromkeys(each.name for each in switches)
        parts = {name: statistics.median(1e3 * s.pause_s for s in switches if s.name == name) for name in names}
        half_ms, count = PAUSE * step_ms, len(switches)
        entries += [
            Entry(
                f"{case.name}: pause against half a step", half_ms / pause_ms, pause_ms, half_ms, "ms", count,
                ours_p95=max(pauses_ms), target=1.0, parts=parts,
            ),
            Entry(
                f"{case.name}: pause against a restart", 1e3 * restart_s / pause_ms, pause_ms, 1e3 * restart_s, "ms",
                count, target=RESTARTS,
            ),
        ]  # fmt: skip
        for each in switches:
            words = f"a reshape {each.whole_s:.2f} s, a step then {1e3 * each.step_s:.0f} ms"
            notes.append(f"{case.name}, {each.name}: {words}")
    return Outcome(entries, notes)


def _cases(is_tiny: bool) -> Iterator[Case]:
    if is_tiny:
        yield Case("2 ranks", tiny(FOUR_COLUMNS), ((2, 1), (1, 2)))
        return
    yield Case("4 ranks", FOUR_COLUMNS, FOUR)
    lanes = EmulatedLanes(16, 1, 4, layers=8, step_s=STEP_S)
    yield Case("16 emulated ranks", lanes.gpt, SIXTEEN, lanes.words)


@dataclass(frozen=True)
class Switch:
    """A reshape that was carried out. `pause_s`: of the stop at which its lanes were taken; `whole_s`: from the request
    to the first step with them; `step_s`: a normal one of these."""

    name: str
    pause_s: float
    whole_s: float
    step_s: float


def _switches(case: Case) -> Iterator[Switch]:
    """Each layout after the other, and the first one again, `ROUNDS` times."""
    with OwnJob(case.gpt, Variant(words=case.words_of(case.layouts[0])), FOREVER) as job:
        for _ in range(BEFORE):
            next_step(job)
        address = JobFile.read(job.folder).address()
        for before, after in pairwise((*(case.layouts * ROUNDS), case.layouts[0])):
            asked_s = time.monotonic()
            with ThreadPoolExecutor(1) as asking:  # ranks report to us meanwhile, and wait when nobody listens
                answer = asking.submit(ask_to_reshape, address, ReshapeRequest(*after), ANSWER_S)
                steps, epoch = _until_reached(job, after, answer)
            taken = next(step for step in steps if step.epoch == epoch)
            name = f"{before[0]}x{before[1]} to {after[0]}x{after[1]}"
            yield Switch(name, stops(steps)[epoch], taken.at_s - asked_s, normal_s(steps, epoch))


def _until_reached(job: OwnJob, layout: tuple[int, int], answer: Future[str]) -> tuple[list[Step], int]:
    """The steps until the lanes have been there for a while, and the epoch with which they came. Raises what comes of
    the question, and `BenchFailed` when they do not come."""
    steps: list[Step] = []
    reached: dict[int, bool] = {}
    left = MOST
    while left:
        steps.append(next_step(job))
        if answer.done():
            answer.result()
            left -= 1
        epoch = steps[-1].epoch
        if epoch not in reached:
            plan = Plan.from_json(job.read(f"plan-{epoch}.json"))
            reached[epoch] = [len(lane.stages) for lane in plan.lanes] == [layout[1]] * layout[0]
        if len(steps) > QUIET and reached[epoch] and steps[-QUIET].epoch == epoch:
            first = next(each for each in reached if reached[each])
            if sum(step.epoch == first for step in steps) > 1:
                return steps, first
    raise BenchFailed(f"switch: {MOST} steps after it was granted, the job has no {layout[0]} lanes of {layout[1]}")


def _restart_s(case: Case) -> float:
    """From the last step of a job, which saves, to the first one of another that goes on from it with other lanes."""
    one, other = case.words_of(case.layouts[1]), case.words_of(case.layouts[0])
    with OwnJob(case.gpt, Variant(words=(*one, f"checkpoint.every={BEFORE}")), BEFORE) as job:
        last = [next_step(job) for _ in range(BEFORE)][-1]
        job.events(until="finished")
        with OwnJob(case.gpt, Variant(words=(*other, f"resume={job.folder}")), 2 * BEFORE) as again:
            return next_step(again).at_s - last.at_s
