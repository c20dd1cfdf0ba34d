"""Agents, coordinator and store as processes: killed, stopped, doubled, cut off; boxes and ledger stay right."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.control.protocol import failure_detector
from elaswave_fx.control.store.ledger import covers_once
from tests.control.toy_job import UNITS, WAIT_S, ToyJob, value_at
from tests.control.toy_planner import BATCH


def check(job: ToyJob, results: dict[int, dict[str, Any]], survivors: set[int]) -> None:
    """The survivors did all steps together, every box is what so many updates make of it, and the ledger is whole."""
    done = {rank for rank, result in results.items() if result["end"] == "done"}
    assert done == survivors, (results, job.logs())
    for rank in done:
        result = results[rank]
        assert result["version"] == job.steps and result["redone"] == 0
        assert all(box == [value_at(int(name), job.steps), job.steps] for name, box in result["boxes"].items())
    assert {int(box) for rank in done for box in results[rank]["boxes"]} == set(range(job.world))
    assert covers_once(job.ledger(), UNITS, BATCH, 0, job.steps) is None


def test_a_job_without_trouble(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=60) as job:
        results = job.wait()
        check(job, results, {0, 1, 2})
        assert job.store.read().epoch == 0 and job.events("detected") == []


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("tells", [True, False], ids=["launcher tells", "links tell"])
def test_a_killed_rank(tmp_path: Path, victim: int, tells: bool) -> None:
    with ToyJob(tmp_path, world=4, steps=300, tells=tells) as job:
        job.until_committed(20)
        job.signal(victim, signal.SIGKILL)
        results = job.wait()
        check(job, results, {0, 1, 2, 3} - {victim})
        (detected, *_) = job.events("detected")
        assert detected["rank"] == victim and detected["epoch"] == 0
        agreed = job.events("agreed")
        assert agreed[0]["members"] == sorted({0, 1, 2, 3} - {victim}) and agreed[0]["steps_redone"] in (0, 1)
        assert job.events("planned")[0]["lines"] == ["moved"]
        assert (tmp_path / "plan-1.json").exists()


def test_a_killed_rank_is_left_out_by_its_connections_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells, and no deadline would pass while the test lasts: all connections of the rank have closed."""
    for floor in ("SILENT_FLOOR_S", "ACCUSED_FLOOR_S", "STALLED_FLOOR_S"):
        monkeypatch.setattr(failure_detector, floor, 10 * WAIT_S)
    with ToyJob(tmp_path, world=4, steps=300, tells=False) as job:
        job.until_committed(20)
        job.signal(2, signal.SIGKILL)
        check(job, job.wait(), {0, 1, 3})
        assert "all connections of rank 2 are broken" in job.logs()


def test_the_coordinator_dies_and_nobody_notices(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=300) as job:
        job.until_committed(20)
        job.kill_coordinator()
        job.start_coordinator()
        check(job, job.wait(), {0, 1, 2})
        register = job.store.read()
        assert (register.epoch, register.term) == (0, 2)


def test_steps_go_on_without_a_coordinator(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, steps=100, pause_s=0.01) as job:
        job.until_committed(5)
        job.kill_coordinator()
        job.until(lambda: all("end" in where for where in job.places()), "all steps, without a coordinator")
        job.start_coordinator()
        check(job, job.wait(), {0, 1})


def test_the_rank_that_writes_the_ledger_dies_at_the_end(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=100, pause_s=0.01) as job:
        job.until_committed(5)
        job.kill_coordinator()
        job.until(lambda: all("end" in where for where in job.places()), "all steps, without a coordinator")
        job.signal(0, signal.SIGKILL)
        job.start_coordinator()
        check(job, job.wait(), {1, 2})


def test_the_coordinator_and_a_rank_die_together(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=4, steps=300) as job:
        job.until_committed(20)
        job.kill_coordinator()
        job.signal(1, signal.SIGKILL)
        job.start_coordinator()
        check(job, job.wait(), {0, 2, 3})


def test_losses_one_after_the_other(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=4, steps=500) as job:
        job.until_committed(5)
        for victim, epoch in ((3, 1), (0, 2), (1, 3)):
            job.until(job.settled, "all boxes have their copies")
            job.signal(victim, signal.SIGKILL)
            job.until(lambda epoch=epoch: job.store.read().epoch >= epoch, f"epoch {epoch}")
        check(job, job.wait(), {2})


def test_a_stopped_rank_is_left_out_and_leaves_when_it_wakes(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=4, steps=900) as job:
        job.until_committed(20)
        job.signal(2, signal.SIGSTOP)
        job.until(lambda: 2 not in job.store.read().members, "rank 2 is left out")
        version = job.store.read().committed.version
        job.until_committed(version + 20)
        job.signal(2, signal.SIGCONT)
        results = job.wait()
        check(job, results, {0, 1, 3})
        assert results[2] == {"end": "excluded", "reason": "the job went on without rank 2"}


def test_of_two_coordinators_the_later_waits_for_the_address(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=300) as job:
        job.until_committed(10)
        job.start_coordinator()
        job.until_committed(30)
        assert job.store.read().term == 1
        job.coordinators.reverse()
        job.kill_coordinator()
        job.until(lambda: job.store.read().term == 2, "the second one takes over")
        check(job, job.wait(), {0, 1, 2})


def test_too_few_ranks_end_the_job_for_all(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=2000, least=3) as job:
        job.until_committed(10)
        job.signal(1, signal.SIGKILL)
        results = job.wait()
        assert results == {rank: {"end": "over", "reason": "2 ranks are too few; 3 would do"} for rank in (0, 2)}
        assert job.events("over")[0]["reason"] == "2 ranks are too few; 3 would do"


def test_a_store_out_of_reach_delays_the_next_epoch(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=400) as job:
        job.until_committed(20)
        lock = open(job.store.folder / "lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        job.signal(0, signal.SIGKILL)
        job.until(lambda: "store: not reached" in job.logs(), "a swap that fails")
        assert job.store.read().epoch == 0
        lock.close()
        check(job, job.wait(), {1, 2})


def test_the_service_needs_no_torch() -> None:
    code = (
        "import sys, elaswave_fx.control.coordinator.service, elaswave_fx.control.coordinator.plan_cache; "
        "import elaswave_fx.coordinator, elaswave_fx.plan.replan; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
