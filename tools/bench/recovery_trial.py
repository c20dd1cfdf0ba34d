"""One loss: wait until a job is in step, do something to a rank at a point of the step, time the rest's next commit.

In: a job, ours or TorchFT's, that tells of every commit. Out: `Loss`. The same function and the same clock serve both.

    with TorchFTJob(gpt, Settings()) as job:
        lose(job, ranks=4, victim=2, phase=0.4)   ->  Loss(recovery_s=0.47, normal_s=0.05, phase=0.41)

The clock begins when the harness calls `kill` and ends with the commit, as the first survivor to make it reads the same
monotonic clock right after it. Steps committed after the signal with the victim's part in them do not count.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from tools.bench.connection_resets import cut_links
from tools.bench.processes import BenchFailed

WARM_UP, NORMAL_STEPS = 5, 10
"""The first steps do not count; those right before a loss say how long one takes."""

LIMIT_S = 30.0
"""A job that has not gone on by then has failed."""


@dataclass(frozen=True)
class Loss:
    """`recovery_s` runs from the signal to the first step that a survivor committed without the victim, less
    `normal_s`, the median of ten steps before. `signal_s` is the signal's moment, `phase` its place in a step, in parts
    of a step since the last commit. `parts`: seconds of what the time consisted of, and `why`: what was waited for
    last, where they are known.
    """

    recovery_s: float
    normal_s: float
    phase: float
    signal_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


class Job(Protocol):
    """A job that runs. A `step` report has: rank, pid, at_s, ranks (that took part), epoch (0 before the loss)."""

    def hear(self, kind: str, timeout_s: float = ...) -> Mapping[str, Any]:
        """The next report of a rank; BenchFailed when none comes."""
        ...


PARTS = ("detect", "abort", "agree", "plan", "edit", "transfer", "redo")
"""Of ours: signal -> the coordinator knows -> all survivors have left the step and said so -> the epoch is in the
store, less the planning -> planning, edit and transfer as they are reported -> the rest until the first commit: news to
the ranks, and the step that is done again, less a normal one. Plans for the loss of one rank are made ahead: what is
left of planning is to look one up."""

Fault = Callable[[int, Sequence[int]], None]
"""Does something to a process, given the processes of the other ranks."""


def kill(pid: int, others: Sequence[int]) -> None:
    """Send SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, others: Sequence[int]) -> None:
    """Send SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)


def cut(pid: int, others: Sequence[int]) -> None:
    """Take all links to the other ranks down; the process lives."""
    cut_links(pid, others)


def phases(points: int) -> list[float]:
    """Return points that are spread evenly over a step."""
    return [(point + 0.5) / points for point in range(points)]


def lose(job: Job, ranks: int, victim: int, phase: float, inject_fault: Fault = kill) -> Loss:
    """Lose `victim`, `phase` of a normal step after a commit. Raises BenchFailed when the job does not get into step,
    or not on."""
    pids: dict[int, int] = {}
    commits: list[float] = []
    while len(commits) <= WARM_UP + NORMAL_STEPS or len(pids) < ranks:
        report = job.hear("step")
        pids[report["rank"]] = report["pid"]
        if report["rank"] == (victim + 1) % ranks:
            commits = [*commits, report["at_s"]] if report["ranks"] == ranks else []
    normal = statistics.median(later - sooner for sooner, later in pairwise(commits[-NORMAL_STEPS - 1 :]))
    time.sleep(max(0.0, commits[-1] + phase * normal - time.monotonic()))
    fault_s, last_s = time.monotonic(), commits[-1]
    inject_fault(pids.pop(victim), list(pids.values()))
    while (left_s := fault_s + LIMIT_S - time.monotonic()) > 0:
        report = job.hear("step", left_s)
        if report["at_s"] <= fault_s:
            last_s = max(last_s, report["at_s"])
        elif report["rank"] != victim and (report["ranks"] < ranks or report["epoch"] > 0):
            return Loss(report["at_s"] - fault_s - normal, normal, (fault_s - last_s) / normal, fault_s)
    raise BenchFailed(f"recovery: no step was committed without rank {victim} within {LIMIT_S:g} s")


def parts_of(events: Sequence[Mapping[str, Any]], loss: Loss) -> dict[str, float]:
    """The parts of a loss of ours in seconds, by the events of its run (`OwnJob.events`), which have the clock that the
    loss was timed by. Empty where the job stayed as it was.
    """
    found = {event["kind"]: event for event in events if event["epoch"] == 1}
    detected = next((event for event in events if event["kind"] == "detected"), None)
    if detected is None or "resumed" not in found or "stopped" not in found:
        return {}
    plan_s = found["planned"]["plan_ms"] / 1e3
    known = (
        detected["at_s"] - loss.signal_s,
        found["stopped"]["at_s"] - detected["at_s"],
        found["agreed"]["at_s"] - found["stopped"]["at_s"] - plan_s,
        plan_s,
        found["edited"]["ms"] / 1e3,
        found["transferred"]["ms"] / 1e3,
    )
    return dict(zip(PARTS, (*known, loss.recovery_s - sum(known)), strict=True))
