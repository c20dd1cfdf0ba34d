"""Ranks come and go, one after the other, in one run: those that stay keep no memory of those that went.

coming_and_going((2, 1), 50)   ->  a scenario that prints what the ranks that stay held at first and at last
"""

from __future__ import annotations

import math
from pathlib import Path

import psutil

from tests.recovery import fault_matrix as cases
from tests.recovery.fault_matrix import Layout
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.joining import Joining
from tests.recovery.leaves import left_as_told
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario
from tests.slow_job import slow_config
from tests.waiting import WAIT_S, await_true

MOST_MORE_MIB = 64.0
"""What a rank that stays may hold more after all have come and gone than before the first came."""

STEP_S = 0.15
STEPS_A_ROUND = 200
"""In which one comes and goes, on a busy machine too: steps are as slow as that until all have gone."""


def coming_and_going(layout: Layout, rounds: int) -> Scenario:
    """So many processes join and are asked to leave when they have joined."""
    words = (f"steps={STEPS_A_ROUND * rounds}",)

    def check(folder: Path, references: References) -> Finished:
        plain, hurry = job_config(layout, *words), folder / "hurry"
        sample_s = STEP_S / math.ceil(plain.global_batch / layout[0])
        config = slow_config(hurry, layout, *words, f"data.transform.sample_s={sample_s}", may_end=True)
        with Job(config, folder) as job, Joining(job) as joining:
            job.await_step(10)
            held = [_resident_mib(job)]
            for number in range(rounds):
                _come_and_go(job, joining, number)
                held.append(_resident_mib(job))
            hurry.touch()
            run = job.wait(2 * WAIT_S + rounds * STEPS_A_ROUND * STEP_S)
            joining.await_ends()
        for rank, first in held[0].items():
            one, all_gone = held[1][rank], held[-1][rank]
            told = f"rank {rank}: resident {first:.1f} MiB, {one:.1f} after one, {all_gone:.1f} after {rounds}"
            print(f"      {told}", flush=True)
            assert all_gone < first + MOST_MORE_MIB, f"{told}, in {folder}"
        left = [event["rank"] for event in run.of_kind("left")]
        assert left == [event["rank"] for event in run.of_kind("joined")] and len(left) == rounds, (
            f"{left}, in {folder}"
        )
        assert_survived(run, references.of(plain), set(), left=left)
        return run

    return Scenario("churn", f"{cases.name_of(layout)}-{rounds}-come-and-go", check)


def _come_and_go(job: Job, joining: Joining, number: int) -> None:
    """The next one joins, has replicas, and leaves."""
    joiner = joining.start()
    where = f"number {number}, in {job.folder}"
    await_true(lambda: job.ended or joiner.has_ended or joiner.rank in joining.members(), f"it joins: {where}")
    steps = job.steps
    job.await_step(steps + 3)
    joiner.tell_to_leave()
    await_true(lambda: job.ended or joiner.rank in left_as_told(job), f"it leaves: {where}")
    assert joiner.rank in left_as_told(job), f"it has not left: {where}:\n{joiner.said}"
    assert joiner.process.wait(timeout=WAIT_S) == 0, f"{where}:\n{joiner.said}"


def _resident_mib(job: Job) -> dict[int, float]:
    """What each rank that was started has in memory, what it shares with others included."""
    return {rank: psutil.Process(pid).memory_info().rss / 2**20 for rank, pid in job.pids.items()}
