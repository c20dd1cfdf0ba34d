"""What planned stops cost: by how much a step across which the epoch changes is longer than those after it.

In: the steps of a job as its first rank commits them. Out: seconds for each epoch that has begun meanwhile.

    steps = [next_step(job) for _ in range(100)]
    stops(steps)  ->  {1: 0.028, 2: 0.011}
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.bench.own_job import OwnJob
from tools.bench.processes import TEST_TIMEOUT_S


@dataclass(frozen=True)
class Step:
    """A step as the first rank has committed it. `at_s`: when, by the clock of all processes."""

    at_s: float
    epoch: int
    ranks: int


def next_step(job: OwnJob) -> Step:
    """The next one that the first rank reports. Raises `BenchFailed` when none comes."""
    while True:
        said = job.hear("step", TEST_TIMEOUT_S)
        if said["rank"] == 0:
            return Step(said["at_s"], said["epoch"], said["ranks"])


def normal_s(steps: Sequence[Step], epoch: int) -> float:
    """The median step of an epoch, after its first."""
    return statistics.median(b.at_s - a.at_s for a, b in pairwise(steps) if a.epoch == b.epoch == epoch)


def stops(steps: Sequence[Step]) -> dict[int, float]:
    """For each epoch after the first, by how many seconds its first step came later than a normal one of its own. Of an
    epoch of a single step nothing is known, and it is left out."""
    counts = {step.epoch: sum(other.epoch == step.epoch for other in steps) for step in steps}
    return {
        step.epoch: max(0.0, step.at_s - last.at_s - normal_s(steps, step.epoch))
        for last, step in pairwise(steps)
        if step.epoch != last.epoch and counts[step.epoch] > 1
    }
