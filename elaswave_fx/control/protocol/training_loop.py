"""The training loop of a rank, as a generator: it yields requests (`do.py`) and is sent their results. It has no
effects of its own, so that the worker and the simulator run the same order.

    loop = training(state)
    next(loop)                              ->  Begin()
    loop.send(None)                         ->  Barrier(), ..., TakeStep(7), which is sent the certificate of step 7
    loop.throw(StepFailed(Rank(2), "..."))  ->  AbortStep(), Report(holdings, suspect=2), which is sent a decision,
                                                OpenLinks(...), ..., InstallPlan(go), ..., SyncReplicas(...)

A failure of any request while entering an epoch starts the same sequence again: completed parts are kept, others are
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.epoch_start import (
    anew,
    has_missed,
    holdings,
    is_elsewhere,
    promoted,
    replica_transfers,
    resolve,
    unchecked_buckets,
)
from elaswave_fx.control.protocol.rank_state import Excluded, Go, Left, Over
from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.control.protocol.types import BoxId, Certificate, Stamp
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.topology import Epoch, Rank


class StepFailed(Exception):
    """A request failed because of other ranks; `suspect`: the one to blame, if known. `mismatch`: a replica differs
    from its owner's box, which the other ranks do not know yet."""

    def __init__(self, suspect: Rank | None, why: str, mismatch: bool = False) -> None:
        super().__init__(why)
        self.suspect, self.mismatch = suspect, mismatch


@dataclass
class LoopState:
    """The state of a rank's training loop, which alone changes it.

    `epoch`, `members`, `boxes`: of the current epoch. `committed`: the newest commit known here. `started`: the state
    of `committed` has been loaded. `pending`: a step was aborted after the own vote. `stale`: buckets whose parameters
    are not complete. `sync`: replicas that are not in sync. `damaged`: boxes that differ from the digest of their
    last update.
    """

    rank: Rank
    epoch: Epoch
    members: tuple[Rank, ...]
    boxes: tuple[Box, ...]
    committed: Stamp
    started: bool = False
    pending: bool = False
    stale: set[int] = field(default_factory=set)
    sync: ReplicaSync = field(default_factory=ReplicaSync)
    damaged: set[BoxId] = field(default_factory=set)


Do = Generator[Any, Any, None]
"""Yields requests of `do.py`."""

T = TypeVar("T")

Ended = Excluded | Left | Over
"""Why a rank ends before its run does."""


def perform(loop: Generator[Any, Any, T], performer: Callable[[Any], Any]) -> T:
    """Run a loop to its end. `performer` carries out a request and returns its result, or raises StepFailed."""
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
    """Train to the end of the run. Returns None, or why this rank ends before. `entering`: the first epoch of a rank
    that joins. A `StepFailed` that is thrown in starts recovery."""
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
    """Load the initial state, unless it is loaded."""
    if state.started:
        return
    yield do.Begin()
    state.started = True
    yield do.Barrier()


def _steps(state: LoopState) -> Do:
    while True:
        yield from _await_permission(state)
        if not (yield do.BetweenSteps(state.committed.version)):
            return
        certificate = yield do.TakeStep(state.committed.version)
        yield from _commit(state, certificate)
        if state.sync.syncing:
            syncing, lagging = yield do.ReadSyncState()
            sync = state.sync.after_step(syncing, lagging)
            if sync != state.sync:
                state.sync = sync
                yield do.ReportSyncState(sync)


def _await_permission(state: LoopState) -> Do:
    """Wait until the rank may step. Raises StepFailed if the epoch has ended for it."""
    while True:
        if (yield do.MustLeave()):
            yield do.FlushSends()
            raise StepFailed(None, f"rank {state.rank}: called off before step {state.committed.version}")
        if (yield do.MayStep()):
            return


def _commit(state: LoopState, certificate: Certificate) -> Do:
    state.committed = certificate.stamp
    yield do.ReportCommit(certificate)


def recover(state: LoopState, failed: StepFailed) -> Generator[Any, Any, Ended | None]:
    """Abort the step, report, and enter the next epoch; or return why this rank ends."""
    if failed.mismatch:
        yield do.ReportMismatch(str(failed), failed.suspect)
    left: do.Inventory = yield do.AbortStep(failed.suspect)
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
    """Enter the epoch of `go`. Raises StepFailed at the next failure."""
    activation, boxes = go.activation, go.activation.assignment.boxes
    members, resume = activation.assignment.members, activation.resume
    was, before = state.epoch, state.boxes
    restart = is_elsewhere(state.committed, was, activation)
    # Links come first: other ranks wait for them, and the rest takes each rank a different time.
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
    if (yield do.MustLeave()):  # its abort preceded the links' new epoch
        raise StepFailed(None, f"rank {state.rank}: epoch {activation.epoch} is over already")
    # Replicas were compared in the previous epoch, which this rank may have missed.
    agree = activation.copies_agree and not has_missed(was, activation.epoch)
    state.stale |= unchecked_buckets(state.rank, before, boxes, agree, state.damaged)
    if restart:
        state.started, state.committed = False, resume
        state.damaged.clear()
    state.stale |= yield do.InstallPlan(go, restart)
    state.epoch, state.members, state.boxes = activation.epoch, members, boxes
    if activation.rollback:
        yield do.Restore(resume)
    state.started = True
    state.stale &= {box.bucket for box in boxes if state.rank in box.readers}
    yield do.GatherParameters(frozenset(state.stale))
    state.stale.clear()
    syncing = yield do.SyncReplicas(tuple(replica_transfers(boxes)))
    state.sync = state.sync.next_epoch(syncing)
    state.damaged.clear()  # dropped, or being replaced
    yield do.EpochBegun(activation, restart)


def _check_promoted(state: LoopState, boxes: tuple[Box, ...]) -> Do:
    """Verify replicas that this rank comes to own or to compute with: no later check could detect damage."""
    found = yield do.VerifyReplicas(tuple(promoted(state.rank, state.boxes, boxes)))
    state.damaged |= found
    if found:
        why = f"rank {state.rank}: replicas of boxes {sorted(found)} were damaged in memory"
        raise StepFailed(None, why, mismatch=True)
