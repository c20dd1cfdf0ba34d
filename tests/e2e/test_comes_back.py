"""Processes that a job's launcher starts while it runs: as `faults` says, and for a rank that was taken for dead."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elaswave_fx.control.protocol.failure_detector import SILENT_FLOOR_S
from elaswave_fx.plan.plan import Plan
from tests.e2e.test_leaves import STEPS, end_of, running
from tests.marks import slow
from tests.recovery.harness import Finished, Job, finish, job_config
from tests.recovery.joining import Joining
from tests.waiting import await_true


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = finish(job_config((1, 1), STEPS), tmp_path_factory.mktemp("alone"))
    assert run.code == 0, run.console
    return run


def assert_same_bits(run: Finished, alone: Finished) -> None:
    assert run.code == 0 and not run.orphans, run.console
    assert run.losses == alone.losses and run.summary["params_digest"] == alone.summary["params_digest"]


def members(job: Job) -> list[int]:
    agreed = job.events("agreed")
    return agreed[-1]["members"] if agreed else []


def test_a_fault_starts_a_process_that_joins(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1), "faults=[{step: 3, rank: 2, kind: join}]") as job:
        job.await_event("joined")
        job.await_event("resumed")
        run = end_of(job)
    assert_same_bits(run, alone)
    (fault,) = run.of_kind("fault")
    assert (fault["rank"], fault["fault"]) == (2, "join")
    assert [event["rank"] for event in run.of_kind("joined")] == [2] and run.summary["recoveries"] == []
    assert run.of_kind("agreed")[-1]["members"] == [0, 1, 2]


def test_a_rank_that_was_stopped_and_wakes_comes_back_as_another(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1)) as job:
        assert job.signal_rank(1, signal.SIGSTOP)
        job.await_event("resumed")
        assert job.signal_rank(1, signal.SIGCONT)
        job.await_event("joined")
        await_true(lambda: members(job) == [0, 2] or job.ended, "it is a member")
        run = end_of(job)
    assert_same_bits(run, alone)
    assert [event["rank"] for event in run.of_kind("left")] == [1]
    assert run.ledger[-1]["tiles"].keys() == {"0", "2"}, "it computes"
    assert [recovery["ranks"] for recovery in run.summary["recoveries"]] == [[1]]
    assert "rank 1 lives: a new process joins the job in its place" in run.console


def test_the_last_replicas_may_be_those_of_a_rank_that_was_left_out(alone: Finished, tmp_path: Path) -> None:
    """Nothing is committed between the two: the rank comes back as it is, and brings what nobody else has."""
    with running(tmp_path, (2, 1), "data.transform.sample_s=0.2") as job:
        assert job.signal_rank(1, signal.SIGSTOP)
        job.await_event("agreed")
        assert job.signal_rank(0, signal.SIGKILL)
        job.await_event("detected", 2)
        assert job.signal_rank(1, signal.SIGCONT)
        job.await_event("agreed", 2)
        run = end_of(job)
    assert_same_bits(run, alone)
    first, second = run.of_kind("agreed")
    assert (first["members"], second["members"]) == ([0], [1])
    assert second["back"] == [1] and "rolled_back_to" not in second and second["step"] == first["step"]
    assert "rank 1 rejoined with the state that they had; resumes at step" in run.console and not run.of_kind("joined")


def test_who_comes_back_has_links_to_those_that_went_on(alone: Finished, tmp_path: Path) -> None:
    """These ended theirs when they went on without it, and what it has was lost with another rank."""
    stopped = 0
    with running(tmp_path, (3, 1), "data.transform.sample_s=0.2") as job:
        boxes = Plan.from_json((job.folder / "plan-0.json").read_text()).boxes
        shared = next(box for box in boxes if stopped in box.replica_ranks)
        (lost,) = set(shared.replica_ranks) - {stopped}
        assert job.signal_rank(stopped, signal.SIGSTOP)
        job.await_event("agreed")
        assert job.signal_rank(lost, signal.SIGKILL)
        job.await_event("detected", 2)
        assert job.signal_rank(stopped, signal.SIGCONT)
        job.await_event("agreed", 2)
        run = end_of(job)
    assert_same_bits(run, alone)
    first, second = run.of_kind("agreed")[:2]
    assert (first["members"], second["members"]) == (*(sorted({0, 1, 2} - {gone}) for gone in (stopped, lost)),)
    assert second["back"] == [stopped] and "rolled_back_to" not in second and second["step"] == first["step"]


@pytest.mark.parametrize("seconds", [0.5, slow(6.0)])
def test_a_rank_that_is_cut_off_for_a_while(alone: Finished, tmp_path: Path, seconds: float) -> None:
    """Half a second is nothing to anybody; after more than the deadline of silence it comes back as another rank."""
    with running(tmp_path, (2, 1), f"faults=[{{step: 3, rank: 1, kind: cut, seconds: {seconds}}}]") as job:
        job.await_event("fault")
        if seconds > SILENT_FLOOR_S:
            job.await_event("joined")
            await_true(lambda: members(job) == [0, 2] or job.ended, "it is a member")
        else:
            job.await_step(job.steps + 20)
        run = end_of(job)
    assert_same_bits(run, alone)
    lost = [recovery["ranks"] for recovery in run.summary["recoveries"]]
    assert lost == ([[1]] if seconds > SILENT_FLOOR_S else [])
    assert "injected fault: cut of rank 1 in step 3, phase any" in run.console


@pytest.mark.slow
def test_a_rank_that_joined_and_was_stopped_comes_back_too(alone: Finished, tmp_path: Path) -> None:
    with running(tmp_path, (2, 1)) as job, Joining(job) as joining:
        joiner = joining.start()
        job.await_event("joined")
        job.await_event("resumed")
        joiner.process.send_signal(signal.SIGSTOP)
        await_true(lambda: members(job) == [0, 1] or job.ended, "it is left out")
        joiner.process.send_signal(signal.SIGCONT)
        job.await_event("joined", 2)
        await_true(lambda: members(job) == [0, 1, 3] or job.ended, "it is a member again")
        run = end_of(job)
        code = joiner.process.wait(timeout=60)
    assert_same_bits(run, alone)
    assert code == 0 and "it joins anew, as another rank" in joiner.said, joiner.said
    assert "rank 3 has finished" in joiner.said


def test_the_end_of_a_job_ends_who_still_gets_ready(tmp_path: Path) -> None:
    with running(tmp_path, (2, 1), "faults=[{step: 3, rank: 2, kind: join}]") as job:
        job.await_event("fault")
        run = end_of(job)
    assert run.code == 0 and not run.orphans, run.console
