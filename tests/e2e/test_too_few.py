"""Fewer ranks than the model fits into: the run ends with a checkpoint, and says how many would do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.checkpoint.folder import complete, sweep
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.next import replan
from elaswave_fx.worker import checkpoints
from tests.runs import run_job, small_config

WHY = "replan: does not fit into the memory of 3 ranks; the smallest number that would do is 4"


@pytest.mark.parametrize("first_is_late", [False, True], ids=["", "the first rank is late"])
def test_the_ranks_that_are_left_save_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], first_is_late: bool
) -> None:
    words = ("parallel.dp=2", "parallel.pp=2", "steps=12", "checkpoint.every=100", "resume=auto")
    undisturbed = run_job(small_config("resnet_digits", *words), tmp_path / "undisturbed")

    def too_few(*_: Any) -> None:
        raise PlanError(WHY)

    def late_sweep(folder: Path) -> None:
        time.sleep(0.3)
        sweep(folder)

    with monkeypatch.context() as patched:  # the coordinator is forked from here
        patched.setattr(replan, "replan_like", too_few)
        if first_is_late:
            patched.setattr(checkpoints, "sweep", late_sweep)
        fault = "faults=[{step: 7, rank: 1, kind: kill, phase: backward}]"
        run = run_job(small_config("resnet_digits", *words, fault), tmp_path / "run")
    assert run.code == 1
    assert WHY in capfd.readouterr().err
    assert run.summary["outcome"] == "failed"
    assert WHY in run.summary["reason"]
    assert sorted(complete(tmp_path / "run" / "checkpoints")) == [7]

    again = run_job(small_config("resnet_digits", *words), tmp_path / "run")
    assert again.code == 0
    assert again.losses == pytest.approx(undisturbed.losses, rel=1e-5)
