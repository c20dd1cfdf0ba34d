"""Ranks that are asked to leave, whoever has started them and whoever tells them; and those that cannot."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.marks import slow
from tests.recovery.harness import Finished, Job, finish, job_config
from tests.recovery.joining import Joining
from tests.recovery.leaves import assert_left, left_as_told
from tests.slow_job import slow_config
from tests.waiting import await_true

STEPS = "steps=400"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = finish(job_config((1, 1), STEPS), tmp_path_factory.mktemp("alone"))
    assert run.code == 0, run.console
    return run


@contextmanager
def running(folder: Path, layout: tuple[int, int], *words: str) -> Iterator[Job]:
    with Job(slow_config(folder / "hurry", layout, STEPS, *words), folder / "run") as job:
        job.await_step(2)
        yield job


def end_of(job: Job) -> Finished:
    """At full speed."""
    (job.folder.parent / "hurry").touch()
    return job.wait()


def test_a_fault_tells_a_rank_to_leave(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1), "faults=[{step: 3, rank: 1, kind: leave}]") as job:
        await_true(lambda: left_as_told(job) == [1] or job.ended, "it leaves")
        run = end_of(job)
    assert_left(run, alone, [1], set())
    (fault,) = run.of_kind("fault")
    assert (fault["rank"], fault["step"], fault["fault"]) == (1, 3, "leave")


@pytest.mark.parametrize("numbers", [slow(()), (signal.SIGUSR1, signal.SIGXCPU)], ids=["told", "warned"])
def test_a_rank_that_joined_leaves(alone: Finished, tmp_path: Path, numbers: tuple[signal.Signals, ...]) -> None:
    """Its scheduler may be another one than the job's, so that it leaves alone; a second warning is no second order."""
    with running(tmp_path, (2, 1)) as job, Joining(job) as joining:
        joiner = joining.start()
        job.await_event("joined")
        joiner.tell_to_leave(*numbers)
        code = joiner.process.wait(timeout=60)
        await_true(lambda: left_as_told(job) == [2] or job.ended, "it is told that it left")
        run = end_of(job)
    assert code == 0, joiner.said
    assert joiner.said.rstrip().endswith("rank 2 was asked to leave, and has left")
    assert run.code == 0 and not run.orphans, run.console
    assert run.losses == alone.losses and run.summary["params_digest"] == alone.summary["params_digest"]
    assert run.summary["recoveries"] == [] and [entry["rank"] for entry in run.summary["left"]] == [2]
    assert run.of_kind("agreed")[-1]["members"] == [0, 1]


def test_the_last_rank_cannot_leave_and_ends_the_job_as_ctrl_c_does(tmp_path: Path) -> None:
    with running(tmp_path, (1, 1), "launch.grace_s=0.5", "checkpoint.every=1000") as job:
        assert job.signal_rank(0, signal.SIGTERM)
        run = job.wait()
    why = "rank 0 was asked to leave, and cannot: it is the last rank of the job"
    assert run.code == 1 and run.summary["outcome"] == "failed" and run.summary["reason"] == why, run.console
    assert run.console.rstrip().endswith(f"error: {why}") and why in run.console.rstrip()[: -len(why)]
    assert [event["reason"] for event in run.of_kind("must_stay")] == ["it is the last rank of the job"]
    assert (run.folder / "model.safetensors").exists()
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [f"step-{len(run.metrics)}"]


def test_of_two_ranks_that_are_told_one_leaves_and_the_other_ends_the_job(tmp_path: Path) -> None:
    with running(tmp_path, (2, 1), "launch.grace_s=3") as job:
        for rank in (0, 1):
            assert job.signal_rank(rank, signal.SIGTERM)
        run = job.wait()
    assert run.code == 1 and "it is the last rank of the job" in run.summary["reason"], run.console
    assert len(run.summary["left"]) == 1 and run.summary["recoveries"] == []


def test_who_is_told_twice_is_lost(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1)) as job:
        assert job.signal_rank(1, signal.SIGTERM)
        await_true(lambda: job.events("stopping") or job.ended, "it is heard")
        assert job.signal_rank(1, signal.SIGTERM)
        job.await_event("detected")
        run = end_of(job)
    assert run.code == 0 and run.losses == alone.losses, run.console
    assert [recovery["ranks"] for recovery in run.summary["recoveries"]] == [[1]] and run.summary["left"] == []
    assert run.of_kind("agreed")[-1]["members"] == [0]
    assert "was asked to leave a second time: it ends at once" in (run.folder / "logs" / "rank-1.log").read_text()
