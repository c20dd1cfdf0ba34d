"""What a rank does around its steps, and in which order: a generator that yields what to do, and is sent what came of
it. It touches nothing: the worker does what it says on engine, disk and links, the simulator on digests and a network.

    loop = training(state)
    next(loop)                              ->  Begin()
    loop.send(None)                         ->  AwaitOthers(), and so on to TakeStep(7), whose certificate is sent
    loop.throw(StepFailed(Rank(2), "…"))    ->  LeaveStep(), Report(holdings, suspect=2), whose decision is sent,
                                                OpenLinks(…), …, Install(go), GatherParameters(…), SendCopies(…)

A failure at any of these is the same again: every part of the way into an epoch either has happened on this rank or is
done anew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.coming_copies import ComingCopies
from elaswave_fx.control.protocol.epoch_start import (
    anew,
    copies_due,
    has_missed,
    holdings,
    is_elsewhere,
    promoted,
    resolve,
    unchecked_buckets,
)
from elaswave_fx.control.protocol.rank_state import Excluded, Go, Left, Over
from elaswave_fx.control.protocol.types import BoxId, Certificate, Stamp
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.topology import Epoch, Rank


class StepFailed(Exception):
    """What is under way cannot be finished now; `suspect` is to blame, or nobody. `damage`: a copy differs from its
    owner's, which the others do not know yet."""

    def __init__(self, suspect: Rank | None, why: str, damage: bool = False) -> None:
        super().__init__(why)
        self.suspect, self.damage = suspect, damage


@dataclass
class LoopState:
    """Where a rank stands. The loop alone changes it.

    `epoch`, `members`, `boxes`: of the epoch that it is in. `committed`: the newest step that is known to be committed.
    `started`: the state that the run begins with is in place. `pending`: a step was left after the own vote.
    `stale`: buckets whose working copy is not whole. `coming`: copies that do not count yet. `damaged`: boxes found to
    have other bytes than were written.
    """

    rank: Rank
    epoch: Epoch
    members: tuple[Rank, ...]
    boxes: tuple[Box, ...]
    committed: Stamp
    started: bool = False
    pending: bool = False
    stale: set[int] = field(default_factory=set)
    coming: ComingCopies = field(default_factory=ComingCopies)
    damaged: set[BoxId] = field(default_factory=set)


Do = Generator[Any, Any, None]
"""Yields what `do.py` has."""

T = TypeVar("T")

Ended = Excluded | Left | Over
"""Why a rank ends before its run does."""


def perform(loop: Generator[Any, Any, T], performer: Callable[[Any], Any]) -> T:
    """Follow a loop to its end. `performer` returns what came of what the loop has said, or raises StepFailed."""
    answer: Any = None
    failed: StepFailed | None = None
    while True:
        try:
            said = loop.send(answer) if failed is None else loop.throw(failed)
        except StopIteration as end:
            return end.value
        answer = failed = None
        try:
            answer = performer(said)
        except StepFailed as error:
            failed = error


# --- The order --------------------------------------------------------------------------------------------------------


def training(state: LoopState, entering: Go | None = None) -> Generator[Any, Any, Ended | None]:
    """To the end of the run, or until this rank is to end before. `entering`: the epoch in which a rank that joins
    becomes a member. What is thrown in as `StepFailed` leads back to where the job stands."""
    failed: StepFailed | None = None
    while True:
        try:
            if entering is not None:
                go, entering = entering, None
                yield from enter(state, go)
            elif failed is not None:
                ended = yield from recover(state, failed)
                if ended is not None:
                    return ended
            failed = None
            yield from begin(state)
            yield from _steps(state)
            yield do.Finish()
            return None
        except StepFailed as error:
            failed = error


def begin(state: LoopState) -> Do:
    """Take the state that the run begins with, unless that has been done."""
    if state.started:
        return
    yield do.Begin()
    state.started = True
    yield do.AwaitOthers()


def _steps(state: LoopState) -> Do:
    while True:
        yield from _await_permission(state)
        if not (yield do.BetweenSteps(state.committed.version)):
            return
        certificate = yield do.TakeStep(state.committed.version)
        yield from _commit(state, certificate)
        if state.coming.behind:
            behind, far = yield do.LookAtCopies()
            coming = state.coming.seen(behind, far)
            if coming != state.coming:
                state.coming = coming
                yield do.ReportCopies(coming)


def _await_permission(state: LoopState) -> Do:
    """Until the rank may step. Raises StepFailed if it is to leave its epoch."""
    while True:
        if (yield do.IsCalledOff()):
            yield do.FinishSending()
            raise StepFailed(None, f"rank {state.rank}: called off before step {state.committed.version}")
        if (yield do.MayStep()):
            return


def _commit(state: LoopState, certificate: Certificate) -> Do:
    state.committed = certificate.stamp
    yield do.ReportCommit(certificate)


def recover(state: LoopState, failed: StepFailed) -> Generator[Any, Any, Ended | None]:
    """Stop, report, and go on by what is decided; or return why this rank ends."""
    if failed.damage:
        yield do.ReportDamage(str(failed), failed.suspect)
    left: do.Inventory = yield do.LeaveStep(failed.suspect)
    if left.certificate is not None:
        yield from _commit(state, left.certificate)
    state.pending = left.votes is not None
    digests = {box: digest for box, digest in left.digests.items() if state.started and box not in state.damaged}
    held = holdings(state.committed, state.epoch, digests, left.recorded, left.votes)
    decision = yield do.Report(held, failed.suspect)
    if not isinstance(decision, Go):
        return decision
    yield from enter(state, decision)
    return None


def enter(state: LoopState, go: Go) -> Do:
    """Take over the epoch of `go`. Raises StepFailed when something else fails meanwhile."""
    activation, boxes = go.activation, go.activation.assignment.boxes
    members, resume = activation.assignment.members, activation.resume
    was, before = state.epoch, state.boxes
    restart = is_elsewhere(state.committed, was, activation)
    # First, for the others wait for the same links: what comes next takes ranks different times.
    yield do.OpenLinks(go, anew(state.members, was, members, activation.epoch))
    if not restart:
        yield from _check_promoted(state, boxes)
    certificate = resolve(state.rank, activation, state.committed, was, state.pending)
    if certificate is not None:
        yield do.FinishStep(certificate)
        state.committed = resume
    else:
        yield do.DropStep()
    state.pending = False
    yield do.AdvanceLinks(activation.epoch, frozenset(state.members).difference(members))
    if (yield do.IsCalledOff()):  # before the epoch was entered: the abort that told of it is over by now
        raise StepFailed(None, f"rank {state.rank}: epoch {activation.epoch} is over already")
    # Copies were compared that the epoch before this one had, which need not be the one that this rank was in.
    agree = activation.copies_agree and not has_missed(was, activation.epoch)
    state.stale |= unchecked_buckets(state.rank, before, boxes, agree, state.damaged)
    if restart:  # what is here is of no use
        state.started, state.committed = False, resume
        state.damaged.clear()
    state.stale |= yield do.Install(go, restart)
    state.epoch, state.members, state.boxes = activation.epoch, members, boxes
    if activation.rollback:
        yield do.GoBack(resume)
    state.started = True
    state.stale &= {box.bucket for box in boxes if state.rank in box.readers}
    yield do.GatherParameters(frozenset(state.stale))
    state.stale.clear()
    behind = yield do.SendCopies(tuple(copies_due(boxes)))
    state.coming = state.coming.anew(behind)
    state.damaged.clear()  # by now dropped, or to be replaced by what is on its way
    yield do.Enter(activation, restart)


def _check_promoted(state: LoopState, boxes: tuple[Box, ...]) -> Do:
    """A copy that becomes the truth is read once more."""
    found = yield do.CheckCopies(tuple(promoted(state.rank, state.boxes, boxes)))
    state.damaged |= found
    if found:
        why = f"rank {state.rank}: copies of boxes {sorted(found)} were damaged in memory"
        raise StepFailed(None, why, damage=True)
