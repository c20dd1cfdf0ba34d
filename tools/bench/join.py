"""join: one more rank in a job of emulated ranks, from its command to its share of the work, and what the others wait.

The job is one of `train`. The joiner is the command that users give, in a process of its own. What counts is by how
much the steps across which an epoch changes are longer than those after them, all such stops together: the one at which
the joiner becomes a member, and those that follow when its copies are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tools.bench.gpt_job import EmulatedLanes
from tools.bench.own_job import FOREVER, OwnJob, Variant
from tools.bench.planned_stops import Step, next_step, normal_s, stops
from tools.bench.processes import BenchFailed
from tools.bench.results import Entry, Options, Outcome

STEP_S = 0.25
RANKS, TINY_RANKS = (4, 16), (2,)
BEFORE, QUIET = 8, 24
"""Steps before the joiner's command; and so many in one epoch after its join say that no stop follows."""

PARTS = ("process and number", "torch, data, program, tensors", "links", "until the others stop", "first step")
"""Of the time from the command to the first step of which the joiner is a member."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """Every number of ranks."""
    entries: list[Entry] = []
    notes = [""]
    for ranks in options.ranks or (TINY_RANKS if options.tiny else RANKS):
        progress(f"one more to {ranks} ranks")
        found = _join(ranks, step_s=0.05 if options.tiny else STEP_S)
        entries.append(found.entry(ranks))
        notes += found.notes(ranks)
    return Outcome(entries, notes)


@dataclass(frozen=True)
class Joined:
    """A join that was watched. `said_s`: seconds from its command until it has a number, has the job's files, is ready,
    and is a member; `plan_ms`: for each epoch that it brought, how long the coordinator planned within the stop."""

    asked_s: float
    said_s: Sequence[float]
    steps: Sequence[Step]
    plan_ms: Mapping[int, float] = field(default_factory=dict)

    def entry(self, ranks: int) -> Entry:
        """All stops together against a step before the join."""
        before_ms = 1e3 * normal_s(self.steps, self.steps[0].epoch)
        found = stops(self.steps)
        stops_ms = 1e3 * sum(found.values())
        return Entry(
            f"{ranks} ranks: all stops against a step", before_ms / stops_ms, stops_ms, before_ms, "ms", 1, target=1.0,
            parts={f"epoch {epoch}": 1e3 * seconds for epoch, seconds in found.items()},
        )  # fmt: skip

    def notes(self, ranks: int) -> Iterator[str]:
        """The time from the command to membership, by parts, and what was planned within stops."""
        first = next(step for step in self.steps if step.ranks > ranks)
        ends = (*self.said_s, first.at_s - self.asked_s)
        parts = [end - begin for begin, end in pairwise((0.0, *ends))]
        words = ", ".join(f"{name} {seconds:.2f}" for name, seconds in zip(PARTS, parts, strict=True))
        yield f"{ranks} ranks: from the command to the first step with {ranks + 1}: {ends[-1]:.2f} s ({words})"
        planned = ", ".join(f"epoch {epoch} {ms:.2f} ms" for epoch, ms in self.plan_ms.items())
        yield f"{ranks} ranks: planned within the stops: {planned}"


def _join(ranks: int, step_s: float) -> Joined:
    lanes = EmulatedLanes(ranks, 1, 4, layers=2, step_s=step_s)
    with OwnJob(lanes.gpt, Variant(words=lanes.words), FOREVER) as job:
        steps = [next_step(job) for _ in range(BEFORE)]
        words = [sys.executable, "-m", "elaswave_fx.worker", str(job.folder)]
        joiner = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ)
        asked_s = time.monotonic()
        try:
            while not _is_quiet(steps, ranks):
                steps.append(next_step(job))
                if joiner.poll() is not None and joiner.stdout is not None:
                    raise BenchFailed(f"join: the joiner ended: {joiner.stdout.read().decode()}")
        finally:
            joiner.kill()
            joiner.wait()
        logs = [(job.folder / "logs" / name).read_text() for name in ("coordinator.log", f"rank-{ranks}.log")]
        events = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
    return Joined(asked_s, _said(logs, asked_s), steps, _planned(events))


def _is_quiet(steps: Sequence[Step], ranks: int) -> bool:
    last = steps[-QUIET:]
    return last[0].ranks > ranks and last[0].epoch == last[-1].epoch


def _said(logs: Sequence[str], asked_s: float) -> list[float]:
    """Seconds from the command to the joiner's number, to the moment at which it has program and initial tensors, to
    that at which it is ready, and to its first epoch."""
    lines = [line.split(maxsplit=1) for log in logs for line in log.splitlines()]
    marks = ("gets ready to join", "has program and initial tensors", "is ready, and asks", "is a member")
    return [next(float(at) for at, words in lines if mark in words) - asked_s for mark in marks]


def _planned(events: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Epoch -> milliseconds of planning between the last report and the epoch."""
    return {event["epoch"]: event["plan_ms"] for event in events if event["kind"] == "planned" and "plan_ms" in event}
