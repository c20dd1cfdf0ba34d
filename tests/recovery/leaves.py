"""Ranks that are asked to leave, by SIGTERM, alone or while something else goes wrong. What they had to do and to keep
moves to the others first, so nothing is done again for them, and they are no losses.

    leaving((2, 2), (1,), seed=1)                   told while the job trains
    leaving((2, 2), (1,), seed=1, kill=3)           another rank dies meanwhile
    leaving((2, 2), (1,), seed=1, coordinator=True)
    leaving_in(Loss((2, 2), 1, "backward"))         told in that phase of a step
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.recovery import fault_matrix as cases
from tests.recovery.fault_matrix import FIRST_STEP, Layout, Loss
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario
from tests.slow_job import slow_config
from tests.waiting import await_true

STEPS = "steps=400"
MEANWHILE_S = 3.0
"""About as long as a drain takes here: what happens meanwhile may come before it has begun, and after its end."""


def leaving(
    layout: Layout, ranks: Sequence[int], seed: int, kill: int | None = None, coordinator: bool = False
) -> Scenario:
    """The ranks get SIGTERM; `kill`: another one that dies up to `MEANWHILE_S` later, or the `coordinator` does."""

    def check(folder: Path, references: References) -> Finished:
        draw, hurry = random.Random(seed), folder / "hurry"
        with Job(slow_config(hurry, layout, STEPS), folder) as job:
            job.await_step(draw.randint(2, 5))
            for rank in ranks:
                assert job.signal_rank(rank, signal.SIGTERM)
            if kill is not None or coordinator:
                time.sleep(draw.uniform(0.0, MEANWHILE_S))
            if kill is not None:
                assert job.signal_rank(kill, signal.SIGKILL)
                job.await_event("resumed")
            if coordinator:
                assert job.signal_coordinator(signal.SIGKILL)
            await_true(lambda: len(left_as_told(job)) == len(ranks) or job.ended, f"{ranks} leave, in {folder}")
            hurry.touch()
            run = job.wait()
        assert_left(run, references.of(job_config(layout, STEPS)), ranks, set() if kill is None else {kill})
        return run

    end = "" if kill is None else f"-while-{kill}-dies"
    end += "-while-the-coordinator-dies" if coordinator else ""
    return Scenario("leave", f"{cases.name_of(layout)}-rank{'-'.join(map(str, ranks))}{end}-seed{seed}", check)


def leaving_in(loss: Loss) -> Scenario:
    """The rank is asked to leave in that phase of a step."""
    fault = f"faults=[{{step: {FIRST_STEP}, rank: {loss.rank}, kind: leave, phase: {loss.phase}}}]"

    def check(folder: Path, references: References) -> Finished:
        hurry = folder / "hurry"
        with Job(slow_config(hurry, loss.layout, STEPS, fault), folder) as job:
            await_true(lambda: left_as_told(job) == [loss.rank] or job.ended, f"rank {loss.rank} leaves, in {folder}")
            hurry.touch()
            run = job.wait()
        (told,) = run.of_kind("fault")
        assert (told["rank"], told["step"], told["phase"]) == (loss.rank, FIRST_STEP, loss.phase), run.folder
        assert_left(run, references.of(job_config(loss.layout, STEPS)), [loss.rank], set())
        return run

    return Scenario("leave-inside", loss.name, check)


def left_as_told(job: Job) -> list[int]:
    """The ranks that have said so."""
    return [event["rank"] for event in job.events("left") if event.get("asked")]


def assert_left(run: Finished, undisturbed: Finished, ranks: Sequence[int], lost: set[int]) -> None:
    """All that a loss has to show of those that were lost, and of those that left that nothing was done again."""
    assert_survived(run, undisturbed, lost, left=ranks)
    assert sorted(entry["rank"] for entry in run.summary["left"]) == sorted(ranks), run.folder
    if not lost and not run.of_kind("coordinator"):  # A new one does not know that a stop was planned.
        assert run.summary["recoveries"] == [], run.folder
    agreed = run.of_kind("agreed")
    for event in (event for event in agreed if event.get("left")):
        assert event["steps_redone"] == 0 and not event["lost"], f"{event}, in {run.folder}"
    for entry in run.summary["left"]:
        words = f"rank {entry['rank']} was asked to leave, and left after step {entry['step']}"
        left = rf"ranks? [\d, -]*\b{entry['rank']}\b[\d, ]* left as asked; resumes at step "
        assert entry["cause"] == words and re.search(left, run.console), run.folder
