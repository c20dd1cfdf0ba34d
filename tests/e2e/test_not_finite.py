"""A step whose gradient is not finite updates nothing on any rank, and says so."""

import json
from pathlib import Path

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
