"""What one rank knows of the step protocol, and questions asked of it; the transitions are in `step_commit.py`.

In: the assignment of the epoch. Out: `RankState`, and pure answers: which update is due, may it vote, what to report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elaswave_fx.control.protocol.messages import Frame, Heartbeat, Instruction
from elaswave_fx.control.protocol.types import (
    NO_BALLOT,
    SEED,
    STOPPED,
    Activation,
    Assignment,
    Ballot,
    BoxId,
    Certificate,
    Copy,
    Record,
    Report,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.plan.box import Box, Span, numbered
from elaswave_fx.plan.topology import Epoch, Rank

APPLY, GATHER, COMPUTE, REDUCE, VOTED = "apply", "gather", "compute", "reduce", "voted"
"""Phases of a step: bring copies to the committed version, get parameters, compute, get records, wait for votes."""

LINES_PER_BEAT = 256
"""Ledger lines that one heartbeat carries at most."""

NO_EPOCH = Epoch(-1)
"""The epoch of a process that has never been a member."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds, derived by the caller from measured waits. A tick gap above `paused_s` means: I was stopped.

    A rank that has not seen the store for `lease_s` pauses at its next vote.
    """

    paused_s: float
    lease_s: float


@dataclass(frozen=True, slots=True)
class View:
    """An assignment as one rank sees it; `kept` are the boxes it owns or holds.

    `made`: those whose parameters it makes from its copy; `senders`: the owners who send it the others'.
    """

    owned: Mapping[BoxId, Box]
    kept: Mapping[BoxId, Box]
    made: frozenset[BoxId]
    owners: frozenset[Rank]
    senders: frozenset[Rank]
    others: tuple[Rank, ...]
    units: Span
    samples: Span

    @staticmethod
    def of(assignment: Assignment, rank: Rank) -> View:
        """The view of a member."""
        tile = next(tile for tile in assignment.tiles if tile.rank == rank)
        return View(
            owned={box_id: box for box_id, box in numbered(assignment.boxes) if box.owner == rank},
            kept={box_id: box for box_id, box in numbered(assignment.boxes) if rank in box.replica_ranks},
            made=frozenset(box_id for box_id, box in numbered(assignment.boxes) if rank in box.local_materializers),
            owners=frozenset(box.owner for box in assignment.boxes),
            senders=frozenset(box.owner for box in assignment.boxes if rank not in box.local_materializers),
            others=tuple(r for r in assignment.members if r != rank),
            units=tile.units,
            samples=tile.samples,
        )


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank. Dictionaries are never changed in place. `records` are pending, oldest first, one per box as a rule.

    `complete`: boxes whose base has been in step since; they must stay so for this rank to vote.
    `owed`: copies still to be sent to holders that have none. `answer`: a report is owed to the coordinator.
    `finished`: there are no more steps to take.
    """

    rank: Rank
    deadlines: Deadlines
    ballot: Ballot = NO_BALLOT
    epoch: Epoch = NO_EPOCH
    assignment: Assignment | None = None
    view: View | None = None
    phase: str = STOPPED
    joining: bool = True
    committed: Stamp = SEED
    certificates: tuple[Certificate, ...] = ()
    copies: dict[BoxId, Copy] = field(default_factory=dict)
    records: dict[BoxId, tuple[Record, ...]] = field(default_factory=dict)
    complete: frozenset[BoxId] = frozenset()
    fetching: frozenset[BoxId] = frozenset()
    gradients: dict[tuple[Version, Rank], Span] = field(default_factory=dict)
    params: dict[tuple[Version, Rank], tuple[tuple[BoxId, int], ...]] = field(default_factory=dict)
    votes: dict[tuple[Version, Rank], Vote] = field(default_factory=dict)
    held: tuple[tuple[Rank, Frame], ...] = ()
    running: Instruction | None = None
    serial: int = 0
    loads: tuple[BoxId, ...] = ()
    owed: tuple[tuple[BoxId, Rank], ...] = ()
    suspect: Rank | None = None
    broken: frozenset[Rank] = frozenset()
    stop_after: Version | None = None
    answer: bool = False
    store_seen_s: float = 0.0
    tick_s: float = 0.0
    quiet: bool = False
    finished: bool = False

    @property
    def next_version(self) -> Version:
        """The version of the step in flight."""
        return Version(self.committed.version + 1)

    @property
    def members(self) -> tuple[Rank, ...]:
        """The members of the rank's epoch."""
        return self.assignment.members if self.assignment else ()


def is_stale(state: RankState, epoch: Epoch) -> bool:
    """Whether a frame of `epoch` belongs to an older generation."""
    return epoch < state.epoch


def owned_boxes(state: RankState) -> Mapping[BoxId, Box]:
    """The boxes this rank owns."""
    return state.view.owned if state.view else {}


def is_committed(state: RankState) -> bool:
    """Whether every member's yes to the step in flight has arrived."""
    votes, version = state.votes, state.next_version
    return all((version, rank) in votes for rank in state.members)


def due_update(state: RankState) -> BoxId | None:
    """The first box whose base lags behind the committed version although its next record is here."""
    if state.view is None:
        return None
    for box_id in state.view.kept:
        pending = state.records.get(box_id)
        if pending and box_id in state.copies:
            version = state.copies[box_id].stamp.version
            if pending[0].stamp.version == version + 1 <= state.committed.version:
                return box_id
    return None


def ready_boxes(state: RankState) -> frozenset[BoxId]:
    """Boxes with the right base and the record of the step in flight: these a yes vouches for."""
    found = []
    for box_id in state.view.kept if state.view else ():
        copy, pending = state.copies.get(box_id), state.records.get(box_id)
        if copy is None or not pending or copy.stamp != state.committed:
            continue
        record = pending[0]
        if record.stamp.version == state.next_version and record.base_digest == copy.digest:
            found.append(box_id)
    return frozenset(found)


def may_vote(state: RankState) -> bool:
    """Whether all boxes that this rank has vouched for before, or owns, are ready again."""
    ready = ready_boxes(state)
    return state.complete <= ready and ready.issuperset(owned_boxes(state))


def wrong_boxes(state: RankState) -> tuple[BoxId, ...]:
    """Held boxes whose digest differs from the owner's at the same version, or that fell behind."""
    found = []
    for box_id, box in state.view.kept.items() if state.view else ():
        copy, pending = state.copies.get(box_id), state.records.get(box_id)
        if box.owner == state.rank or box_id in state.fetching or not pending or copy is None:
            continue
        record = pending[0]
        differs = record.stamp.version == copy.stamp.version + 1 and record.base_digest != copy.digest
        if differs or record.stamp.version > copy.stamp.version + 1:
            found.append(box_id)
    return tuple(found)


def computed_with(state: RankState, boxes: tuple[BoxId, ...]) -> bool:
    """Whether any of these copies is one that parameters are made from."""
    return state.view is not None and not state.view.made.isdisjoint(boxes)


def awaited(state: RankState) -> Rank | None:
    """The rank whose next frame this one cannot do without; None while it works itself."""
    version, view = state.next_version, state.view
    if view is None:
        return None
    if state.phase == GATHER:
        missing = [r for r in view.senders if (state.committed.version, r) not in state.params]
        return min(missing, default=None)
    if state.phase == VOTED:
        return next((r for r in state.members if (version, r) not in state.votes), None)
    if state.phase == REDUCE:
        for box_id, box in view.kept.items():
            if box.owner != state.rank:
                if not state.records.get(box_id) or box_id in state.fetching:
                    return box.owner
            elif not state.records.get(box_id):
                return next((r for r in box.readers if (version, r) not in state.gradients), None)
    return None


def heartbeat(state: RankState) -> Heartbeat:
    """The heartbeat. The lowest member repeats ledger lines until they are acknowledged; at the end everybody does,
    for nobody takes the place of one that is lost then."""
    writes = bool(state.members) and not state.joining and (state.finished or state.rank == state.members[0])
    return Heartbeat(
        state.rank,
        state.epoch,
        state.committed.version,
        state.phase,
        awaited(state),
        state.suspect,
        state.joining,
        state.view is not None and state.complete.issuperset(state.view.kept),
        state.certificates[:LINES_PER_BEAT] if writes else (),
    )


def report(state: RankState) -> Report:
    """All that a decision about the step in flight may need."""
    version = state.next_version
    return Report(
        state.rank,
        state.epoch,
        state.committed,
        state.copies,
        state.records,
        tuple(vote for (v, _), vote in state.votes.items() if v == version),
        state.certificates,
        state.broken,
        state.suspect,
    )


def install(state: RankState, activation: Activation) -> RankState:
    """The state at the start of an epoch: of the old one only copies and records that lead to `resume` remain.

    The ledger has every line up to `resume`, since both came with one swap.
    """
    assignment, resume = activation.assignment, activation.resume
    view = View.of(assignment, state.rank)
    copies, records = {}, {}
    for box, copy in state.copies.items():
        pending = state.records.get(box, ())
        if box not in view.kept or activation.rollback:
            continue
        if copy.stamp == resume:
            copies[box] = copy
        elif copy.stamp == activation.previous and pending and pending[0].stamp == resume:
            copies[box], records[box] = copy, pending[:1]
    return replace(
        state,
        epoch=activation.epoch,
        assignment=assignment,
        view=view,
        phase=APPLY,
        joining=False,
        committed=resume,
        certificates=(),
        copies=copies,
        records=records,
        complete=frozenset(view.kept if activation.rollback else copies),
        fetching=frozenset(),
        gradients={},
        params={},
        votes={},
        running=None,
        loads=tuple(sorted(view.kept)) if activation.rollback else (),
        owed=tuple((box_id, rank) for box_id, box in view.owned.items() for rank in box.catching_up),
        suspect=None,
        stop_after=None,
        answer=False,
    )
