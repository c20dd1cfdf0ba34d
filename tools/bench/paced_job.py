"""Jobs of ours that live side by side, of which one at a time takes steps, so that the machine's noise hits all alike.

    with PacedJob(gpt, Variant(("exact=true",))) as job:
        job.take(3)   ->  Turn(wall_s=0.41, cpu_s={0: 0.39, 1: 0.40}), seconds of a step
        job.lose(2)   # the next steps are the others'

Ranks wait before each step until they are let on; the coordinator, the launcher and all threads of theirs live on.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_fx.plan.plan import Plan
from tools.bench.gpt_job import GptJob
from tools.bench.own_job import OwnJob, Variant, work_of
from tools.bench.processes import BenchFailed


@dataclass(frozen=True)
class Turn:
    """Seconds of a step, means over a turn: of the wall clock, as the first rank sees it, and of the processor by rank,
    user and system, all threads."""

    wall_s: float
    cpu_s: Mapping[int, float]

    @property
    def all_cpu_s(self) -> float:
        """Seconds of the processor of all ranks."""
        return math.fsum(self.cpu_s.values())


class PacedJob:
    """A job that waits before its first step, and before each later one."""

    def __init__(self, gpt: GptJob, variant: Variant) -> None:
        self.ranks = set(range(gpt.ranks))
        self._gates = [os.pipe() for _ in self.ranks]
        self._committed = 0  # steps
        self._pids: dict[int, int] = {}
        self._epoch = 0
        self._job = OwnJob(gpt.config(*variant.words), work_of(variant, self._wait))

    def __enter__(self) -> PacedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.__exit__()
        for end in (end for gate in self._gates for end in gate):
            os.close(end)

    def _wait(self, rank: int) -> None:
        """Called in the rank."""
        os.read(self._gates[rank][0], 1)

    def await_ready(self) -> None:
        """Return when all ranks stand before the first step. Raises BenchFailed."""
        for _ in self.ranks:
            self._job.hear("ready")

    def take(self, steps: int) -> Turn:
        """Take a step that does not count, and so many that do. Raises BenchFailed."""
        for rank in self.ranks:
            os.write(self._gates[rank][1], b"." * (steps + 1))
        first, last = self._committed, self._committed + steps
        found: dict[tuple[int, int], Mapping[str, Any]] = {}
        while not all((rank, last) in found for rank in self.ranks):
            report = self._job.hear("step")
            if report["step"] >= first and report["rank"] in self.ranks:
                found[report["rank"], report["step"]] = report
                self._pids[report["rank"]], self._epoch = report["pid"], report["epoch"]
        self._committed = last + 1
        taken = {(report["ranks"], report["epoch"]) for report in found.values()}
        if taken != {(len(self.ranks), self._epoch)}:
            raise BenchFailed(f"bench: {len(self.ranks)} ranks were to take steps, and (ranks, epoch) {taken} did")
        one = min(self.ranks)
        return Turn(
            (found[one, last]["at_s"] - found[one, first]["at_s"]) / steps,
            {rank: (found[rank, last]["cpu_s"] - found[rank, first]["cpu_s"]) / steps for rank in self.ranks},
        )

    def lose(self, rank: int) -> None:
        """Kill a rank between two steps."""
        os.kill(self._pids[rank], signal.SIGKILL)
        self.ranks.remove(rank)

    def plan(self) -> Plan:
        """The plan of the last steps that were taken. Raises BenchFailed."""
        return Plan.from_json(self._job.read(f"plan-{self._epoch}.json"))
