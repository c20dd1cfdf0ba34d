"""Other lanes for a job that trains, as a user asks for them: nothing is done again, and no bit changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaswave_fx.entry import run_command
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition_memory import transition_memory
from elaswave_fx.reshape import main
from tests.recovery.harness import Finished, Job, finish
from tests.slow_job import slow_config
from tests.waiting import await_true

STEPS = "steps=400"


@contextmanager
def running(folder: Path, layout: tuple[int, int], *words: str) -> Iterator[tuple[Job, Path]]:
    hurry = folder / "hurry"
    with Job(slow_config(hurry, layout, STEPS, *words), folder / "run") as job:
        job.await_step(2)
        yield job, hurry


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "hurry").touch()
    return finish(slow_config(folder / "hurry", (1, 1), STEPS), folder / "run")


def plan_now(job: Job) -> Plan:
    agreed = job.events("agreed")
    path = job.folder / f"plan-{agreed[-1]['epoch'] if agreed else 0}.json"
    await_true(path.exists, f"{path} is written")
    return Plan.from_json(path.read_text())


def depths(plan: Plan) -> list[int]:
    return [len(lane.stages) for lane in plan.lanes]


def ask(job: Job, *words: str) -> int:
    return run_command(lambda: main([str(job.folder), *words]))


def test_lanes_change_while_a_job_trains(alone: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, (2, 2)) as (job, hurry):
        for dp, pp in ((4, 1), (1, 4), (2, 2), (1, 2)):
            assert ask(job, f"parallel.dp={dp}", f"parallel.pp={pp}") == 0, capsys.readouterr().err
            assert "the same ranks" in capsys.readouterr().out
            await_true(lambda want=[pp] * dp: job.ended or depths(plan_now(job)) == want, f"{dp} lanes of {pp}")
        assert ask(job, "parallel.dp=1", "parallel.pp=2") == 2
        assert "parallel.dp=1 parallel.pp=2: the job has these lanes" in capsys.readouterr().err
        assert ask(job, "best") == 0
        hurry.touch()
        run = job.wait()
    assert run.code == 0 and run.losses == alone.losses, run.console
    assert run.summary["params_digest"] == alone.summary["params_digest"] and run.summary["recoveries"] == []
    assert all(event["steps_redone"] == 0 for event in run.of_kind("agreed")), run.folder
    assert all(event["members"] == [0, 1, 2, 3] for event in run.of_kind("agreed"))
    assert run_command(lambda: main([str(run.folder), "best"])) == 2
    assert "holds no job that runs" in capsys.readouterr().err


def test_a_reshape_outlives_the_coordinator_and_ends_with_a_loss(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 2)) as (job, hurry):
        words = [sys.executable, "-m", "elaswave_fx.reshape", str(job.folder), "parallel.dp=4", "parallel.pp=1"]
        asking = subprocess.Popen(words, cwd=Path(__file__).parents[2], env=dict(os.environ), stdout=subprocess.PIPE)
        job.signal_coordinator(signal.SIGKILL)
        said, _ = asking.communicate(timeout=60)
        assert asking.returncode == 0 and b"as it was asked for" in said
        await_true(lambda: job.ended or depths(plan_now(job)) == [1] * 4, "4 lanes of 1")
        job.signal_rank(2, signal.SIGKILL)
        await_true(lambda: job.ended or 2 not in job.events("agreed")[-1]["members"], "a plan without rank 2")
        assert not plan_now(job).is_asked
        hurry.touch()
        run = job.wait()
    assert run.code == 0 and run.losses == alone.losses, run.console
    assert [entry["ranks"] for entry in run.summary["recoveries"]] == [[2]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("parallel.dp=3", "parallel.pp=2"), "parallel.dp=3 parallel.pp=2: takes 6 ranks, and the job has 4"),
        (
            ("parallel.dp=1", "parallel.pp=0"),
            "parallel.pp=0: must be a number of at least 1; nearest valid: parallel.pp=1",
        ),
        (("parallel.dp=2",), "parallel.pp: is not given; nearest valid: parallel.pp=1"),
        (("worst",), "worst: is not known here; nearest valid: parallel.dp=2 parallel.pp=2, or best"),
    ],
)
def test_what_cannot_be_is_refused(
    words: tuple[str, ...], why: str, refusing: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(refusing, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.rstrip().endswith(why) and error.count("\n") == 1
    assert refusing.events("agreed") == [] and not refusing.ended


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("refusing"), (2, 2)) as (job, _):
        yield job


def test_a_bound_on_memory_makes_replicas_in_waves(alone: Finished, tmp_path: Path) -> None:
    bound_mb = 0.5
    with running(tmp_path, (2, 2), f"switch.memory={bound_mb}") as (job, hurry):
        assert ask(job, "parallel.dp=4", "parallel.pp=1") == 0
        await_true(lambda: job.ended or depths(plan_now(job)) == [1] * 4, "4 lanes of 1", 120)
        await_true(
            lambda: job.ended or not any(box.catching_up for box in plan_now(job).boxes), "replicas are there", 120
        )
        hurry.touch()
        run = job.wait()
    assert run.code == 0 and run.losses == alone.losses, run.console
    assert run.summary["params_digest"] == alone.summary["params_digest"] and run.summary["recoveries"] == []
    plans = [Plan.from_json((run.folder / f"plan-{epoch}.json").read_text()) for epoch in range(plans_of(run))]
    waves = [plan for plan in plans if plan.target is not None]
    assert len(waves) >= 2 and all(any(box.catching_up for box in plan.boxes) for plan in waves)
    counted = {plan.epoch: transition_memory(plan) for plan in plans}
    assert all(need.sync_bytes <= bound_mb * 2**20 for needs in counted.values() for need in needs.values())
    taken = run.of_kind("caught_up")
    assert {event["epoch"] for event in taken} >= {plan.epoch for plan in waves}
    for event in taken:
        need = counted[event["epoch"]][event["rank"]]
        assert need.replicas <= event["bytes"] <= need.replicas + need.records, event


def plans_of(run: Finished) -> int:
    return 1 + max(event["epoch"] for event in run.of_kind("agreed"))


def test_a_reshape_for_which_no_box_has_room_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, (2, 2), "switch.memory=0.125") as (job, _):
        assert ask(job, "parallel.dp=4", "parallel.pp=1") == 2
        error = capsys.readouterr().err
        assert "a replica of box " in error and " bytes short" in error and error.count("\n") == 1
        assert job.events("agreed") == [] and not job.ended
