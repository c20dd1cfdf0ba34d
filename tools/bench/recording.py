"""A run under way, its steps as the first rank commits them, and what is known of it once it has been recorded.

    with OwnJob(gpt.config()) as job:
        live = LiveRun(job, gpt)
        live.take(8)
        live.reshape((2, 2))          until the job has 2 lanes of 2 stages, and all replicas are in sync
        live.recording()              ->  Recording(steps=(Step(at_s=…, epoch=0, ranks=4), …), plans={0: …, 1: …}, …)
    stops(recording.steps)            ->  {1: 0.028, 2: 0.011}

A planned reconfiguration costs by how much the step across which the epoch changes is longer than those after it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elaswave_fx.control.agent.ask_to_reshape import ask_to_reshape
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.plan.make.planner import are_uniform
from elaswave_fx.plan.next.replan_request import ReshapeRequest
from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import GptJob
from tools.bench.namespaces import Host
from tools.bench.own_job import OwnJob
from tools.bench.processes import TEST_TIMEOUT_S, BenchFailed

QUIET, MOST = 8, 400
"""So many steps with one plan, all replicas in sync, say that no stop follows; so many may pass until then."""

Layout = tuple[int, int]
"""dp x pp."""


@dataclass(frozen=True)
class Step:
    """A step as the first rank has committed it. `at_s`: when, by the clock of all processes."""

    at_s: float
    epoch: int
    ranks: int


@dataclass(frozen=True)
class Reshape:
    """A request for a layout at `at_s`, after so many steps."""

    layout: Layout
    at_s: float
    steps: int


@dataclass(frozen=True)
class Recording:
    """A run: its steps, the lines of metrics.jsonl and events.jsonl, its plans by epoch, the layouts that were
    requested, and what was `noted` while it ran."""

    steps: Sequence[Step]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    plans: Mapping[int, Plan]
    reshapes: Sequence[Reshape]
    noted: Mapping[str, float]

    def events_of(self, kind: str) -> list[Mapping[str, Any]]:
        """All of a kind, in order."""
        return [event for event in self.events if event["kind"] == kind]


class LiveRun:
    """A job whose steps are watched. `words`: the overrides that it was started with. `machines`: the hosts of its
    ranks, where they have hosts of their own."""

    def __init__(self, job: OwnJob, gpt: GptJob, words: Sequence[str] = (), machines: Sequence[Host] = ()) -> None:
        self.job, self.gpt, self.words, self.machines = job, gpt, words, machines
        self.steps: list[Step] = []
        self.noted: dict[str, float] = {}
        self._reshapes: list[Reshape] = []
        self._plans: dict[int, Plan] = {}

    def take(self, steps: int = 1) -> Step:
        """The last of so many further steps. Raises `BenchFailed` when they do not come."""
        for _ in range(steps):
            while (said := self.job.hear("step"))["rank"] != 0:
                pass
            self.steps.append(Step(said["at_s"], said["epoch"], said["ranks"]))
        return self.steps[-1]

    def settle(self, reached: Callable[[Plan], bool], answer: Future[str] | None = None) -> None:
        """Take steps until a plan with that property has been there for a while, with all its replicas. Raises
        `BenchFailed` when it does not come within `MOST` steps after the answer, and what the answer raises."""
        quiet, left = 0, MOST
        while left:
            if answer is None or (answer.done() and answer.result()):
                left -= 1
            self.take()
            same = len({step.epoch for step in self.steps[-2:]}) == 1
            quiet = quiet + 1 if same and reached(self._plan()) and (quiet or self._is_in_sync()) else 0
            if quiet > QUIET:
                return
        raise BenchFailed(f"bench: {MOST} steps after it was granted, the job has no such plan")

    def reshape(self, layout: Layout) -> None:
        """Request a layout as `python -m elaswave_fx.reshape` does, and take steps until the job has settled in it."""
        address = JobFile.read(self.job.folder).address()
        enter = self.machines[0].enter if self.machines else None
        self._reshapes.append(Reshape(layout, time.monotonic(), len(self.steps)))
        with ThreadPoolExecutor(1, initializer=enter) as asking:  # ranks report to us meanwhile
            answer = asking.submit(ask_to_reshape, address, ReshapeRequest(*layout), TEST_TIMEOUT_S)
            self.settle(lambda plan: are_uniform(plan.lanes, *layout), answer)

    def recording(self) -> Recording:
        """All that is known by now."""
        plans = [Plan.from_json(path.read_text()) for path in self.job.folder.glob("plan-*.json")]
        by_epoch = {int(plan.epoch): plan for plan in sorted(plans, key=lambda plan: plan.epoch)}
        metrics, events = self.job.lines("metrics.jsonl"), self.job.lines("events.jsonl")
        return Recording(self.steps, metrics, events, by_epoch, self._reshapes, self.noted)

    def _plan(self) -> Plan:
        """The plan of the last step."""
        epoch = self.steps[-1].epoch
        if epoch not in self._plans:
            self._plans[epoch] = Plan.from_json(self.job.read(f"plan-{epoch}.json"))
        return self._plans[epoch]

    def _is_in_sync(self) -> bool:
        """Whether all replicas of the last step's plan are in sync."""
        plan = self._plan()
        awaited = {rank for box in plan.boxes for rank in box.catching_up}
        events = self.job.lines("events.jsonl") if awaited else ()
        return awaited <= {e["rank"] for e in events if e["kind"] == "caught_up" and e["epoch"] == plan.epoch}


def seconds(steps: Sequence[Step]) -> list[tuple[int, float]]:
    """The epoch of each step but the first, and its seconds."""
    return [(b.epoch, b.at_s - a.at_s) for a, b in pairwise(steps)]


def normal_s(steps: Sequence[Step], epoch: int) -> float:
    """The median step of an epoch, after its first."""
    return statistics.median(b.at_s - a.at_s for a, b in pairwise(steps) if a.epoch == b.epoch == epoch)


def stops(steps: Sequence[Step]) -> dict[int, float]:
    """Seconds, for each epoch after the first, by which its first step came later than a normal one of its own. An
    epoch of a single step says nothing, and is left out."""
    counts = Counter(step.epoch for step in steps)
    return {
        step.epoch: max(0.0, step.at_s - last.at_s - normal_s(steps, step.epoch))
        for last, step in pairwise(steps)
        if step.epoch != last.epoch and counts[step.epoch] > 1
    }
