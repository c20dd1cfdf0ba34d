"""A slow disk: who goes on after a loss does not wait for it; and one that needs longer than a rank may stand still
holds the run up, and costs nobody its place."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.checkpoint import saver
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.checkpoint.manifest import check_files, read_manifest
from elaswave_fx.checkpoint.storage import ShardFiles, Written
from elaswave_fx.control.protocol import failure_detector
from elaswave_fx.worker import model_file, recovery
from tests.recovery.harness import Finished, Job, job_config
from tests.recovery.invariants import assert_every_step_once, assert_survived
from tests.recovery.references import References
from tests.slow_job import slow_config

STALLED_S, OVER_STEP = 4.0, 5.0  # Disk work shows another text once a second.
SLOW_S = 12.0
LAYOUT = (2, 2)


@pytest.mark.slow
def test_a_loss_while_a_disk_takes_long(
    tmp_path: Path, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's write waits until the others have agreed to go on without the one that was lost. What was given up
    appears nowhere, and the checkpoints that follow are whole."""
    goes_on, write = tmp_path / "goes_on", ShardFiles.write

    def write_late(self: ShardFiles, *told: Any) -> Written:
        while not goes_on.exists():
            time.sleep(0.01)
        return write(self, *told)

    monkeypatch.setattr(ShardFiles, "write", write_late)  # Ranks are forked, and have it too.
    config = slow_config(
        tmp_path / "hurry", (3, 2), "steps=30", "checkpoint.every=6", "checkpoint.keep=9", may_end=True
    )
    with Job(config, tmp_path / "run") as job:
        job.await_step(8)
        assert job.signal_rank(2, signal.SIGKILL)
        job.await_event("agreed")  # By then it was given up; who has just taken step 12 waits until it has ended.
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


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a step of a quarter of a second, which a first one may take, it is still shorter than the disk is slow."""
    monkeypatch.setattr(failure_detector, "STALLED_FLOOR_S", STALLED_S)
    monkeypatch.setattr(failure_detector, "STALLED_OVER_STEP", OVER_STEP)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, short_patience: None) -> Callable[..., None]:
    """`slow(module, name, when)`: from now on that function takes long where `when(*arguments)`."""

    def make(module: Any, name: str, when: Callable[..., bool]) -> None:
        quick = getattr(module, name)

        def slowly(*arguments: Any) -> Any:
            if when(*arguments):
                time.sleep(SLOW_S)
            return quick(*arguments)

        monkeypatch.setattr(module, name, slowly)

    return make


def assert_nobody_left(run: Finished) -> None:
    assert run.code == 0, run.console[-3000:]
    assert run.of_kind("detected") == [] and run.of_kind("left") == []


@pytest.mark.slow
def test_the_model_is_written_slowly(slow: Callable[..., None], tmp_path: Path) -> None:
    slow(model_file, "save_file", lambda *_: True)
    with Job(job_config(LAYOUT, "steps=30"), tmp_path) as job:
        assert_nobody_left(job.wait())


@pytest.mark.slow
def test_a_checkpoint_is_written_slowly(slow: Callable[..., None], tmp_path: Path) -> None:
    """The next one waits for it, and the end for the last one."""
    slow(saver, "_write_own", lambda *words: words[-1] == 1)
    with Job(job_config(LAYOUT, "steps=8", "checkpoint.every=4"), tmp_path) as job:
        run = job.wait()
    assert_nobody_left(run)
    assert [event.get("failed") for event in run.of_kind("checkpoint")] == [None, None]


def test_a_loss_while_a_checkpoint_is_waited_for_is_recovered_from_at_once(
    slow: Callable[..., None], tmp_path: Path, references: References
) -> None:
    slow(saver, "_write_own", lambda *words: words[-1] == 1)
    config = job_config(LAYOUT, "steps=10", "checkpoint.every=4")
    with Job(config, tmp_path) as job:
        job.await_step(8)
        job.signal_rank(3, signal.SIGKILL)
        run = job.wait()
    assert_survived(run, references.of(job_config(LAYOUT, "steps=10")), {3})
    (loss,) = run.summary["recoveries"]
    assert loss["agree_ms"] < 1e3 * SLOW_S / 4, "nobody waits for a disk when the ranks change"


@pytest.mark.slow
def test_a_checkpoint_is_read_slowly_to_go_back_to_it(slow: Callable[..., None], tmp_path: Path) -> None:
    slow(recovery, "restore", lambda *words: words[3] == 1)
    with Job(job_config(LAYOUT, "steps=60", "copies.count=0", "checkpoint.every=10"), tmp_path) as job:
        job.await_event("checkpoint")
        job.signal_rank(3, signal.SIGKILL)
        run = job.wait()
    assert run.code == 0, run.console[-3000:]
    assert [event["rank"] for event in run.of_kind("left")] == [3]
    assert_every_step_once(run, 60)
