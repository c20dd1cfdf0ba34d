"""One more rank joins a run of each layout, while nothing else happens, or while it, a member, or the coordinator dies
at a point of the join. What a joiner costs before it is a member is nothing, and after that what a loss costs.

    joining((2, 2), "preparing", "joiner", seed=1)    it has a number, and gets ready
    joining((2, 2), "member", "coordinator", seed=1)    it has joined, and its replicas sync
    joining((2, 2), "settled", "member", seed=1)        its replicas are there, and owners have moved if they were to
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.recovery import fault_matrix as cases
from tests.recovery.fault_matrix import Layout, ranks_of
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.joining import Joiner, Joining
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario
from tests.recovery.storms import Struck, assert_weathered
from tests.slow_job import slow_config
from tests.waiting import WAIT_S, await_true

POINTS = ("preparing", "member", "settled")
VICTIMS = ("nobody", "joiner", "member", "coordinator")
STEPS = "steps=400"
SETTLED_STEPS = 30
"""So many steps after it has joined nothing more comes of that, where no next epoch has come."""

SOON_S = 0.3
"""Whoever dies does so at most so long after the point has been reached."""


def joining(layout: Layout, point: str, victim: str, seed: int) -> Scenario:
    """The victim dies once the joiner has come to that point."""

    def check(folder: Path, references: References) -> Finished:
        draw, hurry, struck = random.Random(seed), folder / "hurry", Struck()
        with Job(slow_config(hurry, layout, STEPS), folder) as job, Joining(job) as come:
            job.await_step(draw.randint(2, 5))
            joiner = come.start()
            await_true(lambda: job.ended or _has_come_to(point, job, come, joiner), f"{point}, in {folder}")
            time.sleep(draw.uniform(0.0, SOON_S))
            _kill(victim, draw.choice(ranks_of(layout)), job, joiner, struck)
            await_true(lambda: job.ended or _is_over(job, come, joiner, struck), f"all is over, in {folder}")
            hurry.touch()
            run = job.wait(2 * WAIT_S)
            come.await_ends()
        assert run.code == 0, f"exit code {run.code}, in {run.folder}:\n{run.console[-3000:]}"
        assert_weathered(run, references.of(job_config(layout, STEPS)), struck)
        if victim != "joiner":
            assert joiner.rank in run.of_kind("agreed")[-1]["members"], f"it has no part at the end, in {run.folder}"
        if victim == "nobody":
            assert all(event["steps_redone"] == 0 for event in run.of_kind("agreed")), run.folder
        return run

    return Scenario("join", f"{cases.name_of(layout)}-{point}-{victim}-dies-seed{seed}", check)


def _has_come_to(point: str, job: Job, come: Joining, joiner: Joiner) -> bool:
    if point == "preparing":
        return joiner.rank is not None
    if joiner.rank not in come.members():
        return False
    joined = next(event for event in job.events("joined") if event["rank"] == joiner.rank)
    is_settled = job.steps > joined["step"] + SETTLED_STEPS
    return point == "member" or is_settled or any(event["epoch"] > joined["epoch"] for event in job.events("resumed"))


def _kill(victim: str, member: int, job: Job, joiner: Joiner, struck: Struck) -> None:
    if victim == "joiner":
        assert joiner.rank is not None
        joiner.kill()
        struck.lost.add(joiner.rank)
    elif victim == "member":
        assert job.signal_rank(member, signal.SIGKILL)
        struck.lost.add(member)
    elif victim == "coordinator":
        assert job.signal_coordinator(signal.SIGKILL)


def _is_over(job: Job, come: Joining, joiner: Joiner, struck: Struck) -> bool:
    """Whether the joiner is a member or dead, and the others go on without who has died."""
    if not joiner.was_killed and joiner.rank not in come.members():
        return False
    agreed, resumed = job.events("agreed"), job.events("resumed")
    lost = struck.lost & set(ranks_of_started(job))
    return all(lost.isdisjoint(event["members"]) for event in agreed[-1:]) and (
        not lost or (bool(agreed) and bool(resumed) and resumed[-1]["epoch"] >= agreed[-1]["epoch"])
    )


def ranks_of_started(job: Job) -> list[int]:
    """Those that the launcher has started."""
    return [int(rank) for rank in job.events("started")[0]["pids"]]
