"""Last replicas that cannot be reached are waited for as long as the user has patience, and no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.messages import Exited, Saved
from elaswave_fx.control.protocol.types import Replica, Stamp, Version
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.test_coordinator import TIMEOUTS, Driver

PATIENCE_S = 20.0


def waiting_for_rank_3() -> Driver:
    """It was left out with the only replica of something, and nobody knows whether it lives."""
    job = Driver()
    job.state = replace(job.state, patience_s=PATIENCE_S)
    job.beats(0, 1, 2)
    for rank in range(3):
        job.prepared(rank, suspect=Rank(3), broken=frozenset({Rank(3)}))
    job.later(1.1 * TIMEOUTS.connect_s)
    assert job.register.members == (0, 1, 2)
    boxes = job.register.activation.assignment.boxes
    lost = boxes[3].owner
    left = tuple(rank for rank in job.register.members if rank != lost)
    job.beats(*left)
    job.feed(Exited(lost))
    report(job)
    assert [act.ranks for act in job.did if isinstance(act, events.Waiting)] == [(3,)]
    return job


def stamp_of(job: Driver) -> Stamp:
    return job.register.committed


def report(job: Driver) -> None:
    """Those who were asked, and have not answered, do."""
    boxes = job.register.activation.assignment.boxes
    for rank in set(job.state.targets) - set(job.state.reports):
        has = {box_id: Replica(stamp_of(job), 1) for box_id, box in numbered(boxes) if rank in box.local_materializers}
        job.prepared(rank, copies=has)


def wait(job: Driver, seconds: float) -> None:
    until_s = job.now_s + seconds
    while job.now_s + 0.2 <= until_s:
        job.beats(*job.state.targets)
        job.later(0.2)
        report(job)


def test_the_job_ends_with_the_reason_when_patience_does() -> None:
    job = waiting_for_rank_3()
    wait(job, PATIENCE_S - 1.0)
    assert job.register.epoch == 1
    with pytest.raises(PlanError, match="which cannot be reached") as ended:
        wait(job, 2.0)
    said = str(ended.value)
    assert said.startswith("waited 20 s (recovery.patience_s) for rank 3, which cannot be reached and may have the ")
    assert "no checkpoint was written (checkpoint.every), so that a new run begins again from its seed" in said


def test_with_a_checkpoint_the_reason_names_its_step() -> None:
    job = waiting_for_rank_3()
    job.register = replace(job.register, checkpoint=Stamp(Version(40), Epoch(0)))
    job.state = replace(job.state, register=job.register)
    with pytest.raises(PlanError, match="the last checkpoint is of step 40, from where resume=auto goes on"):
        wait(job, PATIENCE_S + 1.0)


def test_who_comes_back_in_time_is_not_too_late() -> None:
    job = waiting_for_rank_3()
    wait(job, PATIENCE_S - 2.0)
    everything = {box_id: Replica(stamp_of(job), 1) for box_id, _ in numbered(job.register.activation.assignment.boxes)}
    job.heartbeat(3, epoch=Epoch(0), phase="stopped")
    job.later(0.01)
    job.later(1.1 * TIMEOUTS.spread_s)
    job.prepared(3, epoch=Epoch(0), copies=everything, broken=frozenset(job.register.members))
    assert job.register.epoch == 2 and 3 in job.register.members
    job.beats(*job.register.members)
    job.later(0.1)
    job.feed(Saved(Stamp(Version(0), Epoch(0))))
    wait(job, PATIENCE_S + 1.0)
    assert job.state.waiting is None, "the next wait begins anew"


def test_a_rank_that_is_known_to_be_dead_is_not_waited_for() -> None:
    job = waiting_for_rank_3()
    wait(job, 1.0)
    job.feed(Exited(Rank(3)))
    with pytest.raises(PlanError, match="all replicas of"):
        job.later(0.1)
