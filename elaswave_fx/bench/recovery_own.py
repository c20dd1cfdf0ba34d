"""One loss in a real run of ours: `train` in a child, a rank struck from outside, its events read.

In: a workload. Out: `OwnLoss`: seconds from the blow to the first step committed without the victim, and its parts.
That commit counts when its line is in `metrics.jsonl`, which the launcher writes after the ranks have gone on.

    with Runs(workload) as runs:
        runs.lose(victim=2, phase=0.4)   ->  OwnLoss(recovery_s=0.09, normal_s=0.08, parts={"detect": 0.01, …})
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.bench.links import cut_links
from elaswave_fx.bench.processes import TEST_TIMEOUT_S, BenchFailed, Processes
from elaswave_fx.bench.torch_job import NORMAL_STEPS
from elaswave_fx.bench.workload import Workload
from elaswave_fx.config.compose import Job
from elaswave_fx.launch.channel import Channel
from elaswave_fx.train import train

PARTS = ("detect", "abort", "agree", "plan", "edit", "transfer", "redo")
"""blow -> the coordinator knows -> all survivors have left the step and said so -> the epoch is in the store, less the
planning -> planning, edit and transfer as they are reported -> the rest until the first commit: news to the ranks, and
the step that is done again, less a normal one. Plans for the loss of one rank are made ahead: what is left of planning
is to look one up."""

Strike = Callable[[int, Sequence[int]], None]
"""Does something to a process, given the other ranks' processes."""

_POLL_S = 0.001
_WARM_UP = 3


def kill(pid: int, others: Sequence[int]) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, others: Sequence[int]) -> None:
    """SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)


def cut(pid: int, others: Sequence[int]) -> None:
    """All links to the other ranks go down; the process lives."""
    cut_links(pid, others)


@dataclass(frozen=True)
class OwnLoss:
    """`normal_s`: the median of ten steps before; it is taken off `recovery_s` and off `redo`."""

    recovery_s: float
    normal_s: float
    parts: dict[str, float]


class Runs:
    """Runs one after the other; the program is cached between them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def lose(self, victim: int, phase: float, strike: Strike = kill) -> OwnLoss:
        """Strike `victim` in a run of its own, `phase` of a normal step after a commit. Raises BenchFailed."""
        # The ranks get on for as long as it takes; the run is ended once it has told what is wanted.
        config = self._workload.config("steps=100000")
        with Processes() as processes:
            folder = processes.folder / "run"
            folder.mkdir()

            def body(channel: Channel) -> None:
                train(Job(config, folder, {}, ()))

            processes.fork("train", body)
            loss, pid = _lose(processes, folder, victim, phase, strike)
            _end(processes, pid if strike is stop else None)
            return loss


def _lose(processes: Processes, folder: Path, victim: int, phase: float, strike: Strike) -> tuple[OwnLoss, int]:
    metrics, events = _Lines(folder / "metrics.jsonl"), _Lines(folder / "events.jsonl")
    _until(processes, lambda: len(metrics.read()) >= NORMAL_STEPS + _WARM_UP)
    normal = statistics.median(line["step_ms"] for line in metrics.read()[-NORMAL_STEPS:]) / 1e3
    started = next(line for line in events.read() if line["kind"] == "started")
    time.sleep(phase * normal)
    at_s, pids = time.monotonic(), {int(rank): pid for rank, pid in started["pids"].items()}
    pid = pids.pop(victim)
    strike(pid, list(pids.values()))
    _until(processes, lambda: metrics.read()[-1]["epoch"] > 0)
    committed_s = time.monotonic()
    _until(processes, lambda: any(line["kind"] == "resumed" for line in events.read()))
    whole = committed_s - at_s
    return OwnLoss(whole - normal, normal, _parts(events.read(), whole, normal)), pid


def _parts(events: list[dict[str, Any]], whole_s: float, normal_s: float) -> dict[str, float]:
    """From the events of epoch 1; their clock is set by the first commit, whose moment is known on both."""
    found = {line["kind"]: line for line in events if line["epoch"] == 1}
    detected = next(line for line in events if line["kind"] == "detected")
    signalled_ms = found["resumed"]["t_ms"] - 1e3 * whole_s
    plan_ms, edit_ms, transfer_ms = found["planned"]["plan_ms"], found["edited"]["ms"], found["transferred"]["ms"]
    detect_ms = detected["t_ms"] - signalled_ms
    abort_ms = found["stopped"]["t_ms"] - detected["t_ms"]
    agree_ms = found["agreed"]["t_ms"] - found["stopped"]["t_ms"] - plan_ms
    known = detect_ms + abort_ms + agree_ms + plan_ms + edit_ms + transfer_ms
    parts = (detect_ms, abort_ms, agree_ms, plan_ms, edit_ms, transfer_ms, 1e3 * (whole_s - normal_s) - known)
    return dict(zip(PARTS, (part / 1e3 for part in parts), strict=True))


class _Lines:
    """The whole lines of a file that grows; read only from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._lines = path, 0, []

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return self._lines
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines


def _until(processes: Processes, happened: Any) -> None:
    end = time.monotonic() + TEST_TIMEOUT_S
    while not happened():
        if time.monotonic() > end or processes["train"].channel.closed:
            raise BenchFailed(f"bench: the run did not get on\n{processes['train'].log.read_text()[-2000:]}")
        time.sleep(_POLL_S)


def _end(processes: Processes, stopped: int | None) -> None:
    """As a user ends a run: all processes of it are gone then. `stopped`: a pid that has to die first."""
    if stopped is not None:
        os.kill(stopped, signal.SIGKILL)
    child = processes["train"]
    child.signal(signal.SIGTERM)
    if not select.select([child.pidfd], [], [], TEST_TIMEOUT_S)[0]:
        raise BenchFailed(f"bench: the run did not end\n{child.log.read_text()[-2000:]}")
