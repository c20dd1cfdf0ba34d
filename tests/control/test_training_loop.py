"""The training loop as a generator: what a rank does, in which order, and what a failure at each point leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.rank_state import Go, Left
from elaswave_fx.control.protocol.training_loop import LoopState, StepFailed, perform, training
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Assignment,
    BoxId,
    Certificate,
    Replica,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.plan.work.topology import Epoch, Rank
from tools.sim.job import first_plan

FIRST: Assignment = first_plan(3, 1).assignment
SECOND = replace(first_plan(2, 1).assignment, plan_hash=2)
"""Of ranks 0 and 1, when rank 2 has gone."""

ENTERS = [
    do.OpenLinks, do.VerifyReplicas, do.DropStep, do.AdvanceLinks, do.MustLeave, do.InstallPlan, do.GatherParameters,
    do.SyncReplicas, do.EpochBegun,
]  # fmt: skip
STEP = [do.MustLeave, do.MayStep, do.BetweenSteps, do.TakeStep, do.ReportCommit]


class Follower:
    """Does nothing, keeps what was said, and fails where it is told to."""

    def __init__(self, decisions: Iterator[Any], steps: int = 3, fails: dict[int, StepFailed] | None = None) -> None:
        self.state = LoopState(Rank(0), Epoch(0), FIRST.members, FIRST.boxes, SEED)
        self.said: list[Any] = []
        self.answers: dict[type, Any] = {
            do.MustLeave: False, do.MayStep: True, do.VerifyReplicas: set(), do.InstallPlan: frozenset(),
            do.SyncReplicas: frozenset(), do.AbortStep: do.Inventory(None, {BoxId(0): 7}, (), None),
        }  # fmt: skip
        self._decisions, self._steps, self._fails = decisions, steps, fails or {}

    def __call__(self, said: Any) -> Any:
        self.said.append(said)
        if (failed := self._fails.pop(len(self.said), None)) is not None:
            raise failed
        if isinstance(said, do.BetweenSteps):
            return said.done < self._steps
        if isinstance(said, do.TakeStep):
            return Certificate(Stamp(Version(said.step + 1), self.state.epoch), ())
        if isinstance(said, do.Report):
            return next(self._decisions)
        return self.answers.get(type(said))

    @property
    def kinds(self) -> list[type]:
        return [type(each) for each in self.said]

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.said if isinstance(each, kind)]

    def run(self) -> Any:
        return perform(training(self.state), self)


def go(resume: Stamp, epoch: int = 1, previous: Stamp = SEED, rollback: bool = False) -> Go:
    certificate = Certificate(resume, ()) if resume != previous else None
    return Go(Activation(Epoch(epoch), SECOND, resume, previous, certificate, rollback=rollback), "")


def test_without_failures_steps_follow_each_other_to_the_end() -> None:
    follower = Follower(iter(()))
    assert follower.run() is None
    assert follower.kinds == [do.Begin, do.Barrier, *STEP * 3, *STEP[:3], do.Finish]
    assert [each.step for each in follower.of(do.TakeStep)] == [0, 1, 2]
    assert follower.state.committed == Stamp(Version(3), Epoch(0)) and follower.state.started


def test_a_failure_in_a_step_leads_to_the_epoch_that_is_decided() -> None:
    after_one = Stamp(Version(1), Epoch(0))
    follower = Follower(iter([go(after_one, previous=after_one)]), fails={11: StepFailed(Rank(2), "lost")})
    assert follower.run() is None
    assert follower.kinds[10:23] == [do.TakeStep, do.AbortStep, do.Report, *ENTERS, do.MustLeave]
    (report,) = follower.of(do.Report)
    assert report.suspect == 2 and report.holdings.committed == after_one
    assert report.holdings.replicas == {BoxId(0): Replica(after_one, 7)}
    assert [each.step for each in follower.of(do.TakeStep)] == [0, 1, 1, 2]
    assert follower.state.members == SECOND.members and follower.state.epoch == 1


def test_a_step_that_others_have_committed_is_finished_and_one_that_nobody_has_is_dropped() -> None:
    first = Stamp(Version(1), Epoch(0))
    votes = (Vote(first, Rank(0), ()),)
    for resume, kind in ((first, do.FinishStep), (SEED, do.DropStep)):
        follower = Follower(iter([go(resume)]), fails={6: StepFailed(None, "lost")})
        follower.answers[do.AbortStep] = do.Inventory(None, {}, (), votes)
        assert follower.run() is None
        assert [each for each in follower.kinds if each in (do.FinishStep, do.DropStep)] == [kind]
        assert [each.step for each in follower.of(do.TakeStep)] == (
            [0, 1, 2] if kind is do.FinishStep else [0, 0, 1, 2]
        )


def test_a_step_that_was_committed_before_it_failed_is_reported_first() -> None:
    first = Stamp(Version(1), Epoch(0))
    follower = Follower(iter([go(first, previous=first)]), fails={6: StepFailed(None, "lost")})
    follower.answers[do.AbortStep] = do.Inventory(Certificate(first, ()), {}, (), None)
    assert follower.run() is None
    assert follower.kinds[5:9] == [do.TakeStep, do.AbortStep, do.ReportCommit, do.Report]
    assert [each.step for each in follower.of(do.TakeStep)] == [0, 1, 2]


@pytest.mark.parametrize("place", range(len(ENTERS)))
def test_a_second_failure_anywhere_on_the_way_is_the_same_again(place: int) -> None:
    first = Stamp(Version(1), Epoch(0))
    again = [go(first, previous=first), go(first, epoch=2, previous=first)]
    fails = {11: StepFailed(Rank(2), "lost"), 14 + place: StepFailed(None, "again")}
    follower = Follower(iter(again), fails=fails)
    assert follower.run() is None
    assert follower.kinds[11:13] == [do.AbortStep, do.Report] and follower.kinds[13 : 14 + place] == ENTERS[: place + 1]
    assert follower.kinds[14 + place : 16 + place + len(ENTERS)] == [do.AbortStep, do.Report, *ENTERS]
    assert [each.step for each in follower.of(do.TakeStep)] == [0, 1, 1, 2] and follower.state.epoch == 2


def test_who_goes_back_takes_the_state_and_has_it_from_then_on() -> None:
    """What fails after that finds the replicas that have been read."""
    fails = {6: StepFailed(None, "lost"), 15: StepFailed(None, "again")}
    follower = Follower(iter([go(SEED, rollback=True), go(SEED, epoch=2)]), fails=fails)
    assert follower.run() is None
    back = [do.OpenLinks, do.DropStep, do.AdvanceLinks, do.MustLeave, do.InstallPlan, do.Restore, do.GatherParameters]
    assert follower.kinds[6:17] == [do.AbortStep, do.Report, *back, do.AbortStep, do.Report]
    assert follower.of(do.InstallPlan)[0].restart and not follower.of(do.InstallPlan)[1].restart
    assert [len(each.holdings.replicas) for each in follower.of(do.Report)] == [1, 1]


def test_before_the_state_is_in_place_there_are_no_replicas() -> None:
    follower = Follower(iter([go(SEED, rollback=True)]), fails={1: StepFailed(None, "lost at the start")})
    assert follower.run() is None
    assert follower.kinds[:3] == [do.Begin, do.AbortStep, do.Report]
    assert follower.of(do.Report)[0].holdings.replicas == {}
    assert follower.kinds.count(do.Begin) == 1, "it has gone back to the beginning"


def test_damaged_replicas_that_were_promoted_are_told_and_not_reported() -> None:
    first = Stamp(Version(1), Epoch(0))
    follower = Follower(
        iter([go(first, previous=first), go(first, epoch=2, previous=first)]), fails={11: StepFailed(Rank(2), "lost")}
    )
    damaged = iter([{BoxId(0)}, set()])
    answers = follower.answers

    def performer(said: Any) -> Any:
        answer = follower(said)
        return next(damaged) if isinstance(said, do.VerifyReplicas) else answer

    assert perform(training(follower.state), performer) is None and answers[do.VerifyReplicas] == set()
    assert follower.kinds[11:18] == [
        do.AbortStep,
        do.Report,
        do.OpenLinks,
        do.VerifyReplicas,
        do.ReportMismatch,
        do.AbortStep,
        do.Report,
    ]
    assert [len(each.holdings.replicas) for each in follower.of(do.Report)] == [1, 0]
    assert follower.state.damaged == set()


def test_an_epoch_that_is_over_is_not_entered() -> None:
    first = Stamp(Version(1), Epoch(0))
    follower = Follower(
        iter([go(first, previous=first), go(first, epoch=2, previous=first)]), fails={11: StepFailed(Rank(2), "lost")}
    )
    over = iter([False, False, True])

    def performer(said: Any) -> Any:
        answer = follower(said)
        return next(over, False) if isinstance(said, do.MustLeave) else answer

    assert perform(training(follower.state), performer) is None
    assert len(follower.of(do.InstallPlan)) == 1 and len(follower.of(do.Report)) == 2


def test_who_is_told_to_go_ends_with_the_reason() -> None:
    follower = Follower(iter([Left("rank 0 was asked to leave")]), fails={6: StepFailed(None, "called off")})
    ended = follower.run()
    assert isinstance(ended, Left) and ended.reason == "rank 0 was asked to leave"
    assert follower.kinds[-2:] == [do.AbortStep, do.Report]


def test_syncing_replicas_are_reported_when_that_changes() -> None:
    first = Stamp(Version(1), Epoch(0))
    follower = Follower(iter([go(first, previous=first)]), steps=4, fails={11: StepFailed(Rank(2), "lost")})
    follower.answers[do.SyncReplicas] = frozenset({BoxId(0)})
    looks = iter(
        [(frozenset({BoxId(0)}), frozenset()), (frozenset({BoxId(0)}), frozenset()), (frozenset(), frozenset())]
    )

    def performer(said: Any) -> Any:
        answer = follower(said)
        return next(looks) if isinstance(said, do.ReadSyncState) else answer

    assert perform(training(follower.state), performer) is None
    assert [(len(each.sync.syncing), len(each.sync.lagging)) for each in follower.of(do.ReportSyncState)] == [
        (1, 0),
        (0, 0),
    ]
