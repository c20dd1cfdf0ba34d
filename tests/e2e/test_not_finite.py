"""A step whose gradient is not finite updates nothing on any rank, and says so."""

import json
from pathlib import Path

import pytest
import torch

from tests.runs import run_job, small_config


def test_a_gradient_that_is_not_finite_is_skipped_and_reported(tmp_path: Path) -> None:
    def config(steps: int, lr: str) -> tuple[str, ...]:
        return (f"steps={steps}", f"optimizer.lr={lr}", "parallel.dp=2", "parallel.pp=2", "clip_norm=null")

    run = run_job(small_config("two_tower", *config(6, "1e30")), tmp_path / "diverged")
    assert run.code == 0
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    skipped = [event["step"] for event in events if event["kind"] == "skipped_update"]
    assert skipped and min(skipped) > 0
    assert skipped == list(range(min(skipped), 6))
    assert all(torch.isfinite(tensor).all() for tensor in run.tensors.values() if tensor.is_floating_point())


def test_a_run_that_learns_nothing_ends_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("steps=500", "optimizer.lr=1e30", "optimizer.max_skipped=5", "parallel.dp=2", "checkpoint.every=1000")
    run = run_job(small_config("two_tower", *words, "schedule=constant", "clip_norm=null"), tmp_path)
    assert run.code == 1
    summary = run.summary
    assert summary["outcome"] == "failed" and summary["steps"] < 100
    assert summary["reason"].endswith(
        "5 updates in a row were skipped (optimizer.max_skipped=5), because the gradient is not finite"
    )
    assert capfd.readouterr().err.splitlines()[-1] == f"error: {summary['reason']}"
    assert (run.folder / "model.safetensors").is_file()
    assert (run.folder / "checkpoints" / f"step-{summary['steps']}").is_dir()


def test_a_run_in_which_nothing_counts_ends_too(tmp_path: Path) -> None:
    run = run_job(
        small_config("two_tower", "steps=50", "optimizer.max_skipped=3", "model._target_=tests.e2e.counting.Uncounted"),
        tmp_path,
    )
    assert run.code == 1
    assert run.summary["reason"].endswith("because no target counts: the model returned a count of 0")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("Uncounted", "no target counts: the model returned a count of 0"),
        ("Flat", "the gradient is zero: the loss does not depend on any parameter"),
    ],
)
def test_a_run_without_an_update_fails_however_short_it_is(model: str, why: str, tmp_path: Path) -> None:
    run = run_job(small_config("two_tower", "steps=2", f"model._target_=tests.e2e.counting.{model}"), tmp_path)
    assert run.code == 1
    assert run.summary["reason"] == f"none of the 2 steps has changed a parameter: in the last one {why}"
    assert (run.folder / "model.safetensors").is_file()


def test_a_negative_count_is_refused(tmp_path: Path) -> None:
    run = run_job(small_config("two_tower", "steps=5", "model._target_=tests.e2e.counting.Negative"), tmp_path)
    assert run.code == 1
    assert "the model returned a negative count of targets" in run.summary["reason"]
