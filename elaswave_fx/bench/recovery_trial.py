"""One loss: wait until a job is in step, do something to a rank at a point of the step, time the rest's next commit.

In: a job, ours or TorchFT's, that tells of every commit. Out: `Loss`. The same function and the same clock serve both.

    with TorchFTJob(workload, Settings()) as job:
        lose(job, ranks=4, victim=2, phase=0.4)   ->  Loss(recovery_s=0.47, normal_s=0.05, phase=0.41)

The clock begins when the harness calls `kill` and ends with the commit, as the first survivor to make it reads the same
monotonic clock right after it. Steps committed after the signal with the victim's part in them do not count.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from elaswave_fx.bench.links import cut_links
from elaswave_fx.bench.processes import BenchFailed

WARM_UP, NORMAL_STEPS = 5, 10
"""Steps that do not count, and those before a loss that say how long one takes."""

LIMIT_S = 30.0
"""A job that has not gone on by then has failed."""


@dataclass(frozen=True)
class Loss:
    """From the signal to the first step that a survivor committed without the victim, less `normal_s`, the median of
    ten steps before. `phase`: where in a step the signal came, in parts of a step since the last commit. `parts`:
    seconds of what it consisted of, and `why`: what was waited for last, where they are known.
    """

    recovery_s: float
    normal_s: float
    phase: float
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
"""What is done to a process, given the processes of the other ranks."""


def kill(pid: int, others: Sequence[int]) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, others: Sequence[int]) -> None:
    """SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)


def cut(pid: int, others: Sequence[int]) -> None:
    """All links to the other ranks go down; the process lives."""
    cut_links(pid, others)


def phases(points: int) -> list[float]:
    """Spread evenly over a step."""
    return [(point + 0.5) / points for point in range(points)]


def lose(job: Job, ranks: int, victim: int, phase: float, inject_fault: Fault = kill) -> Loss:
    """`phase` of a normal step after a commit. Raises BenchFailed when the job does not get into step, or not on."""
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
            return Loss(report["at_s"] - fault_s - normal, normal, (fault_s - last_s) / normal)
    raise BenchFailed(f"recovery: no step was committed without rank {victim} within {LIMIT_S:g} s")


def parts_of(folder: Path, loss: Loss) -> dict[str, float]:
    """Of a run of ours, by `events.jsonl`. Its clock is set by the first commit, whose moment is known on both. Empty
    where the job stayed as it was."""
    events = _events(folder / "events.jsonl", until="resumed")
    found = {line["kind"]: line for line in events if line["epoch"] == 1}
    detected = next((line for line in events if line["kind"] == "detected"), None)
    if detected is None or "resumed" not in found or "stopped" not in found:
        return {}
    whole_ms = 1e3 * (loss.recovery_s + loss.normal_s)
    plan_ms, edit_ms, transfer_ms = found["planned"]["plan_ms"], found["edited"]["ms"], found["transferred"]["ms"]
    detect_ms = detected["t_ms"] - (found["resumed"]["t_ms"] - whole_ms)
    abort_ms = found["stopped"]["t_ms"] - detected["t_ms"]
    agree_ms = found["agreed"]["t_ms"] - found["stopped"]["t_ms"] - plan_ms
    known = (detect_ms, abort_ms, agree_ms, plan_ms, edit_ms, transfer_ms)
    parts = (*known, 1e3 * loss.recovery_s - sum(known))
    return dict(zip(PARTS, (part / 1e3 for part in parts), strict=True))


def _events(path: Path, until: str) -> list[dict[str, Any]]:
    """The launcher writes them a little later than they happen."""
    end = time.monotonic() + LIMIT_S
    while True:
        lines = path.read_text().split("\n")[:-1]
        events = [json.loads(line) for line in lines]
        if any(event["kind"] == until for event in events) or time.monotonic() > end:
            return events
        time.sleep(0.01)
