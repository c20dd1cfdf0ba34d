"""A replica whose bytes change in memory is found, before it can do harm."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.types import Certificate
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.worker.loop import Training
from tests.runs import Run, run_job, small_config
from tests.waiting import await_true

WORDS = ("parallel.dp=2", "parallel.pp=2", "steps=10")
BAD_STEP = 4


def config(*overrides: str) -> Any:
    return small_config("gpt_stdlib", *WORDS, *overrides)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def damage(training: Training) -> int:
    """Changes the first box that this rank holds a little; returns its owner."""
    worker = training._worker
    number, box = next((n, box) for n, box in numbered(worker.plan.boxes) if worker.rank in box.holders)
    replica = worker.engine.native.read(number)
    assert replica is not None
    replica.master.add_(1e-3)
    return box.owner


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_job(config(), tmp_path_factory.mktemp("undisturbed"))
    assert run.code == 0
    return run


def test_a_replica_that_differs_is_synced_again(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Training._take_step

    def step_and_damage(training: Training, what: do.TakeStep) -> Certificate:
        if what.step == BAD_STEP and training._worker.rank == 2 and training._worker.plan.epoch == 0:
            damage(training)
        return step(training, what)

    monkeypatch.setattr(Training, "_take_step", step_and_damage)
    run = run_job(config(), tmp_path)
    assert run.code == 0
    # The same ranks and tiles make the same bits: nothing that was computed with the wrong replica is left.
    assert run.losses == undisturbed.losses
    assert run.summary["params_digest"] == undisturbed.summary["params_digest"]
    assert [
        (event["rank"], "differ from their owners'" in event["cause"]) for event in events(run, "copy_differs")
    ] == [(2, True)]
    assert [event["members"] for event in events(run, "agreed")][:1] == [[0, 1, 2, 3]]
    assert "rolled_back_to" not in json.dumps(events(run, "agreed"))


def damaged_before_its_owner_dies(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Rank 2 has a damaged replica of what rank 0 owns, and rank 0 dies before the next update would show it.

    Rank 0 may enter the step while rank 2 still commits the one before, so it waits for the damage.
    """
    step = Training._take_step
    damaged = folder / "damaged"

    def step_and_damage(training: Training, what: do.TakeStep) -> Certificate:
        if what.step == BAD_STEP and training._worker.plan.epoch == 0:
            if training._worker.rank == 2:
                assert damage(training) == 0
                damaged.touch()
            if training._worker.rank == 0:
                await_true(damaged.exists, "rank 2 has the damaged replica")
                os.kill(os.getpid(), signal.SIGKILL)
        return step(training, what)

    monkeypatch.setattr(Training, "_take_step", step_and_damage)


def test_a_damaged_replica_does_not_become_the_truth(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No right replica is left: the run goes back, as it may here, and says so."""
    damaged_before_its_owner_dies(monkeypatch, tmp_path)
    run = run_job(config("recovery.allow_rollback=true"), tmp_path)
    assert run.code == 0
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert "were damaged in memory" in events(run, "copy_differs")[0]["cause"]
    assert [event["rolled_back_to"] for event in events(run, "agreed") if "rolled_back_to" in event] == [0]


def test_another_replica_takes_the_place_of_a_damaged_one(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_before_its_owner_dies(monkeypatch, tmp_path)
    run = run_job(config("copies.count=2"), tmp_path)
    assert run.code == 0
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert len(events(run, "copy_differs")) == 1
    assert "rolled_back_to" not in json.dumps(events(run, "agreed"))
