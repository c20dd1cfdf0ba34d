"""Storms: several blows from outside, of kinds, to processes and at moments that a seed draws, some before the last was
recovered from. A run whose last copy of something is gone goes back to a checkpoint. Every run that comes to its end
has the bits of one rank that nothing ever happened to.

    storm(seed=7).check(folder, references)
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.recovery.fault_matrix import LAYOUTS, name_of, ranks_of
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.kinds import KINDS
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario, assert_survived_or_lost

STEPS = 60
MOST_PAUSE_S = 0.4
STOPPED_S = 0.1
"""Too short for anybody to be taken for dead."""

_KINDS = ("gpt", "gpt-bf16", "gpt-sgd", "two-tower", "resnet")


def storm(seed: int) -> Scenario:
    """One storm: kills of ranks until one or more are left, kills of the coordinator, short stops of anybody."""
    draw = random.Random(seed)
    layout, kind = LAYOUTS[seed % len(LAYOUTS)], _KINDS[seed % len(_KINDS) - seed // len(LAYOUTS) % len(_KINDS)]
    ranks = list(ranks_of(layout))
    blows: list[tuple[str, int | None]] = [
        ("kill", rank) for rank in draw.sample(ranks, draw.randint(1, len(ranks) - 1))
    ]
    blows += [("kill", None)] * draw.randint(0, 2) + [("stop", draw.choice(ranks)) for _ in range(draw.randint(0, 2))]
    draw.shuffle(blows)

    def check(folder: Path, references: References) -> Finished:
        recipe, *words = KINDS[kind]
        config = job_config(layout, *words, f"steps={STEPS}", "checkpoint.every=4", recipe=recipe)
        lost: set[int] = set()
        with Job(config, folder) as job:
            job.await_step(draw.randint(2, 12))
            for blow, rank in blows:
                if job.ended or job.steps > STEPS - 10:
                    break  # A slow machine: the storm comes too late.
                if _strike(job, blow, rank):
                    lost.add(rank)  # type: ignore[arg-type]
                time.sleep(draw.uniform(0.0, MOST_PAUSE_S) * draw.choice((0.0, 1.0)))
            run = job.wait()
        if run.code != 0:  # All copies of something were lost before there was a checkpoint.
            assert_survived_or_lost(run, run, lost)
            return run
        went_back = any("rolled_back_to" in event for event in run.of_kind("agreed"))
        assert_survived(run, references.of(config), lost, rolled_back=went_back)
        return run

    return Scenario("storm", f"{seed}-{kind}-{name_of(layout)}", check)


def _strike(job: Job, blow: str, rank: int | None) -> bool:
    """Whether a rank was killed. None stands for the coordinator."""
    if rank is None:
        job.signal_coordinator(signal.SIGKILL)
        return False
    if blow == "kill":
        return job.signal_rank(rank, signal.SIGKILL)
    if job.signal_rank(rank, signal.SIGSTOP):
        time.sleep(STOPPED_S)
        job.signal_rank(rank, signal.SIGCONT)
    return False
