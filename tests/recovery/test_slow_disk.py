"""A checkpoint that a disk takes long for: who goes on after a loss does not wait for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.checkpoint.storage import ShardFiles, Written
from tests.recovery.harness import Job
from tests.recovery.references import References
from tests.recovery.scenarios import assert_survived
from tests.slow_job import slow_config


def test_a_loss_while_a_disk_takes_long(
    tmp_path: Path, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's write waits until the run goes on without the one that was lost. What was given up appears nowhere,
    and the checkpoints that follow are whole."""
    goes_on, write = tmp_path / "goes_on", ShardFiles.write

    def write_late(self: ShardFiles, tensor_of: Callable[[str, int], torch.Tensor]) -> Written:
        while not goes_on.exists():
            time.sleep(0.01)
        return write(self, tensor_of)

    monkeypatch.setattr(ShardFiles, "write", write_late)  # Ranks are forked, and have it too.
    config = slow_config(tmp_path / "hurry", (3, 2), "steps=30", "checkpoint.every=6", "checkpoint.keep=9")
    with Job(config, tmp_path / "run") as job:
        job.await_step(8)
        assert job.signal_rank(2, signal.SIGKILL)
        job.await_event("resumed")
        goes_on.touch()
        (tmp_path / "hurry").touch()
        run = job.wait()
    assert_survived(run, references.of(config), {2})
    failed = [(event["step"], event["failed"]) for event in run.of_kind("checkpoint") if "failed" in event]
    assert failed == [(6, "it was being written when the ranks changed")]
    found = complete(run.folder / "checkpoints")
    assert list(found) == [12, 18, 24, 30]
    for path in found.values():
        check_files(path, read_manifest(path))
    assert not list((run.folder / "checkpoints").glob("*.partial"))
