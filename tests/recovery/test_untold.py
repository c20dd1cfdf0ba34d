"""Losses that the launcher does not tell of, found by connections alone: as on another machine, or without it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elaswave_fx.control.protocol import failure_detector
from tests.recovery.harness import Job, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.references import References
from tests.waiting import WAIT_S


def without_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """All deadlines are longer than the test."""
    for floor in ("SILENT_FLOOR_S", "ACCUSED_FLOOR_S", "STALLED_FLOOR_S", "UNHEARD_S"):
        monkeypatch.setattr(failure_detector, floor, 10 * WAIT_S)


@pytest.mark.parametrize("per_host", [1, 2])
def test_a_killed_rank_is_left_out_without_a_deadline(
    per_host: int, tmp_path: Path, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only closed connections can tell. Links over TCP and shared memory."""
    without_deadlines(monkeypatch)
    config = job_config((2, 2), "steps=240", f"parallel.ranks_per_host={per_host}", "lab.exit_words=false")
    with Job(config, tmp_path) as job:
        job.await_step(8)
        assert job.signal_rank(2, signal.SIGKILL)
        run = job.wait()
    assert_survived(run, references.of(config), {2})
    assert "all connections of rank 2 are broken" in (tmp_path / "logs" / "coordinator.log").read_text()


def test_a_rank_killed_with_the_coordinator_is_left_out_by_the_next_one(
    tmp_path: Path, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next coordinator has never had a connection of the rank, which is dead before it begins to listen."""
    without_deadlines(monkeypatch)
    config = job_config((2, 2), "steps=240", "lab.exit_words=false")
    with Job(config, tmp_path) as job:
        job.await_step(8)
        assert job.signal_coordinator(signal.SIGKILL)
        assert job.signal_rank(2, signal.SIGKILL)
        run = job.wait()
    assert_survived(run, references.of(config), {2})
    assert "all connections of rank 2 are broken" in (tmp_path / "logs" / "coordinator.log").read_text()
