"""A rank dies before its agent runs, when those of all others do: they go on without it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_fx.config.keys import Config
from elaswave_fx.control.agent.agent import Agent
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.worker import worker
from tests.recovery.harness import Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.references import References
from tests.waiting import WAIT_S, await_true

LATE = 2


def hold_up_the_late_one(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Its agent never starts; each of the others leaves a file when it has detached."""
    start, detach = worker.start_agent, WorkerContext.detach

    def start_or_wait(
        config: Config, context: WorkerContext, has: worker.Equipment, say: Callable[[str], None]
    ) -> Agent:
        if context.rank == LATE:
            time.sleep(10 * WAIT_S)
        return start(config, context, has, say)

    def detach_and_tell(self: WorkerContext, job_time: Callable[[float], float]) -> None:
        detach(self, job_time)
        (folder / f"detached-{self.rank}").touch()

    monkeypatch.setattr(worker, "start_agent", start_or_wait)
    monkeypatch.setattr(WorkerContext, "detach", detach_and_tell)


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_the_others_go_on_without_a_rank_that_was_late(
    told: bool, tmp_path: Path, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job_config((2, 2), "steps=20", f"lab.exit_words={str(told).lower()}")
    hold_up_the_late_one(monkeypatch, tmp_path)
    with Job(config, tmp_path) as job:
        await_true(lambda: len(list(tmp_path.glob("detached-*"))) == 3, "the others have detached")
        assert job.signal_rank(LATE, signal.SIGKILL)
        run = job.wait()
    assert_survived(run, references.of(config), {LATE})
