"""Agents, coordinator and store as processes: killed, stopped, doubled, cut off; boxes and ledger stay right."""

from __future__ import annotations

import fcntl
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.control.agent import agent
from elaswave_fx.control.agent.ask_to_join import ask_to_join
from elaswave_fx.control.protocol import failure_detector
from elaswave_fx.control.protocol.messages import Ended, Heartbeat, RankReport, Refused
from elaswave_fx.control.protocol.types import Certificate, Stamp, Version
from elaswave_fx.control.store.ledger import covers_once
from elaswave_fx.control.wire import Message, RankSocket
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.member_infos import info_of
from tests.control.toy_job import UNITS, WAIT_S, ToyJob, value_at
from tests.control.toy_planner import BATCH


def check(job: ToyJob, results: dict[int, dict[str, Any]], survivors: set[int]) -> None:
    """The survivors did all steps together, every box is what so many updates make of it, and the ledger is whole."""
    done = {rank for rank, result in results.items() if result["end"] == "done"}
    assert done == survivors, (results, job.logs())
    for rank in done:
        result = results[rank]
        assert result["version"] == job.steps
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
        # One that was paused itself accuses nobody, and may be the first to report.
        assert victim in [event["rank"] for event in job.events("detected") if event["epoch"] == 0]
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
    with ToyJob(tmp_path, world=3, steps=300, pause_s=0.01) as job:
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
            job.until(job.settled, "all boxes have their replicas")
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


def test_ranks_pause_while_the_store_is_out_of_reach_and_go_on_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have it from the coordinator, which has it from the store."""
    monkeypatch.setattr(agent, "LIMITS", replace(agent.LIMITS, lease_s=0.6))
    with ToyJob(tmp_path, world=3, steps=400) as job:
        job.until_committed(20)
        away = job.store.folder.with_name(job.store.folder.name + "-away")
        registers = [job.store.folder / name for name in ("register.json", "committed.json")]
        away.mkdir()
        for path in registers:
            path.rename(away / path.name)
        job.until(lambda: "store: not reached" in job.logs(), "the coordinator looks in vain")
        job.until(lambda: job.logs().count("waits for the store") >= 3, "all ranks pause")
        assert "end" not in job.places()
        for path in reversed(registers):
            (away / path.name).rename(path)
        away.rmdir()
        check(job, job.wait(), {0, 1, 2})


def test_a_store_that_is_gone_for_good_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "LIMITS", replace(agent.LIMITS, lease_s=0.6))
    with ToyJob(tmp_path, world=2, steps=100_000) as job:
        job.until_committed(5)
        shutil.rmtree(job.store.folder)
        reason = f"{job.store.folder} was removed, without which no job can go on"
        assert job.wait() == {rank: {"end": "over", "reason": reason} for rank in (0, 1)}


def test_who_is_refused_hears_why_and_the_job_does_not_notice(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, steps=300) as job:
        job.until_committed(10)
        cases = {
            "it has torch 1.0, the job torch of no version": replace(info_of(1), versions={"torch": "1.0"}),
            "rank 1 is another process already, that of 127.0.0.1 port 9001": replace(info_of(1), port=1),
            "no rank of the job has the number 2, they go from 0 to 1": info_of(2),
        }
        for reason, info in cases.items():
            stranger = RankSocket(job.address, info)
            said: list[Message] = []

            def is_told(stranger: RankSocket = stranger, said: list[Message] = said) -> bool:
                stranger.connect(time.monotonic())
                said += stranger.receive()
                return bool(said)

            job.until(is_told, "an answer")
            assert said == [Refused(reason)]
            line = f"refused: rank {info.number} of 127.0.0.1 port {info.port}: {reason}"
            job.until(partial(lambda line: line in job.logs(), line), "its line in the log")
            stranger.close()
        check(job, job.wait(), {0, 1})
        assert job.store.read().epoch == 0 and job.events("detected") == []


def test_a_rank_that_says_what_cannot_be_is_cut_off_and_the_job_does_not_notice(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, steps=600) as job:
        job.until_committed(10)
        number = ask_to_join(job.address, {}, WAIT_S).number
        beat = Heartbeat(number, Epoch(-1), Version(0), "starting", None, None, True, True, ())
        nonsense: list[Message] = [
            RankReport(number, "step", {"step": 3}),
            RankReport(number, "event", {"event": "agreed", "epoch": 0, "at_s": None}),
            RankReport(number, "done", {}),
            replace(beat, epoch=Epoch(7)),
            replace(beat, version=Version(1 << 60)),
            replace(beat, awaited=Rank(99)),
            replace(beat, step_s=math.nan),
            replace(beat, lines=(Certificate(Stamp(Version(5), Epoch(0)), ()),)),
            Ended(number),
            Ended(Rank(0)),
        ]
        for count, message in enumerate(nonsense, 1):
            rank = RankSocket(job.address, info_of(number))

            def is_cut_off(rank: RankSocket = rank, message: Message = message) -> bool:
                is_open = rank.connect(time.monotonic()) is None
                rank.send(message)
                rank.receive()
                return is_open and not rank.is_open

            job.until(is_cut_off, f"an end of the stream after message {count}")
            rank.close()
        job.until(lambda: f"rank {number} says what cannot be" in job.logs(), "its line in the log")
        check(job, job.wait(), {0, 1})
        assert job.store.read().epoch == 0 and job.events("detected") == []
        assert all(said != "told" for said, _ in job.said)


def test_numbers_that_were_given_outlive_every_coordinator(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, steps=300) as job:
        job.until_committed(10)
        job.signal(2, signal.SIGKILL)
        job.kill_coordinator()
        job.start_coordinator()
        check(job, job.wait(), {0, 1})
        assert job.store.read().numbers == 3


def test_the_service_needs_no_torch() -> None:
    code = (
        "import sys, elaswave_fx.control.coordinator.service, elaswave_fx.control.coordinator.plan_cache; "
        "import elaswave_fx.coordinator, elaswave_fx.plan.next.replan; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
