"""The invariants, checked from outside after every event; knows nothing of how the protocol keeps them.

In: the actions of a rank with its state, swaps of the store, crashes. Out: nothing, or `Violation` that says in words
which promise was broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elaswave_fx.control.protocol.messages import (
    Action,
    Committed,
    Compute,
    Load,
    Params,
    Prepared,
    Send,
    Update,
    VoteCast,
)
from elaswave_fx.control.protocol.rank_state import RankState
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import (
    SEED,
    BoxId,
    Certificate,
    Copy,
    Part,
    Record,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.plan.box import Box, Span, numbered
from elaswave_fx.plan.topology import Epoch, Rank
from elaswave_fx.sim.cluster import BATCH


class Violation(Exception):
    """A broken invariant, in words."""


def covers(spans: Iterable[Span]) -> bool:
    """Whether the spans cover the samples of a step exactly once."""
    at = 0
    for span in sorted(spans):
        if span.lo != at:
            return False
        at = span.hi
    return at == BATCH


def seed_digest(box: BoxId) -> int:
    """The digest of a box at version 0."""
    return hash((box, 0))


def updated_digest(copy: Copy, record: Record) -> int:
    """The update: a function of the base and the summed gradient alone."""
    return hash((copy.digest, record.stamp, tuple((p.rank, p.samples.lo, p.samples.hi) for p in record.parts)))


@dataclass
class Checker:
    """What an all-knowing observer has seen so far. `living` gives the states of processes that have memory."""

    living: Callable[[], Iterable[RankState]]
    register: Register
    truth: dict[tuple[BoxId, Stamp], int] = field(default_factory=dict)
    parts: dict[tuple[BoxId, Stamp], tuple[Part, ...]] = field(default_factory=dict)
    computed: dict[tuple[Epoch, Version, Rank], Span] = field(default_factory=dict)
    tainted: set[tuple[Epoch, Version, Rank]] = field(default_factory=set)
    newest: dict[Epoch, int] = field(default_factory=dict)
    voted: set[tuple[Stamp, Rank]] = field(default_factory=set)
    acted: dict[tuple[Epoch, Version, BoxId], Rank] = field(default_factory=dict)
    members: dict[Epoch, tuple[Rank, ...]] = field(default_factory=dict)
    boxes: dict[tuple[Epoch, BoxId], Box] = field(default_factory=dict)
    history: dict[Version, Stamp] = field(default_factory=dict)
    reported: dict[Rank, Epoch] = field(default_factory=dict)
    orphans: int = 0
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self.history[SEED.version] = SEED
        self._learn(self.register)
        for box_id, _ in numbered(self.register.activation.assignment.boxes):
            self.truth[box_id, SEED] = seed_digest(box_id)

    def _learn(self, register: Register) -> None:
        self.register = register
        self.members[register.epoch] = register.members
        for box_id, box in numbered(register.activation.assignment.boxes):
            self.boxes[register.epoch, box_id] = box

    # --- Ranks ---

    def acts(self, state: RankState, actions: tuple[Action, ...]) -> None:
        """A rank is about to do `actions`, being in `state` after the event."""
        for action in actions:
            if isinstance(action, Send):
                message = action.message
                if isinstance(message, VoteCast):
                    self._votes(state, message.vote)
                elif isinstance(message, Params):
                    self._serves(state, message)
                elif isinstance(message, Prepared):
                    self.reported[state.rank] = max(state.epoch, self.reported.get(state.rank, state.epoch))
            elif isinstance(action, Compute):
                self._computes(state, action)
            elif isinstance(action, Update):
                self._updates(state, action)
            elif isinstance(action, Committed):
                self._commits(state, action.certificate)

    def _computes(self, state: RankState, action: Compute) -> None:
        assert state.view is not None
        self.computed[state.epoch, action.version, state.rank] = state.view.samples
        self.newest[state.epoch] = max(action.version, self.newest.get(state.epoch, 0))
        seen: set[BoxId] = set()
        for source in {*state.view.senders, state.rank}:
            for box, digest in state.params[state.committed.version, source]:
                seen.add(box)
                if self.truth.get((box, state.committed)) == digest:
                    continue
                if source != state.rank:
                    raise Violation(
                        f"rank {state.rank} computes version {action.version} with wrong parameters of box {box}"
                    )
                # Made from a copy that has changed in memory, which the next record shows: no vote may follow.
                self.tainted.add((state.epoch, action.version, state.rank))
        if len(seen) != len(self.register.activation.assignment.boxes):
            raise Violation(f"rank {state.rank} computes version {action.version} without parameters of every box")

    def _votes(self, state: RankState, vote: Vote) -> None:
        if (vote.stamp, state.rank) in self.voted:
            return
        self._vouches(state, vote)
        self.voted.add((vote.stamp, state.rank))

    def _vouches(self, state: RankState, vote: Vote) -> None:
        """A yes means: base and record of every box that the plan wants this rank to have."""
        if self.reported.get(state.rank, -1) >= state.epoch:
            raise Violation(f"rank {state.rank} votes in epoch {state.epoch} after it has reported")
        if (state.epoch, vote.stamp.version, state.rank) in self.tainted:
            raise Violation(f"rank {state.rank} votes for {vote.stamp}, computed with wrong parameters")
        assert state.view is not None
        for box_id, box in state.view.kept.items():
            copy, pending = state.copies.get(box_id), state.records.get(box_id)
            if state.rank in box.catching_up and box_id not in state.complete:
                continue
            if copy is None or copy.stamp.version != vote.stamp.version - 1:
                raise Violation(f"rank {state.rank} votes for {vote.stamp} without the base of box {box_id}")
            if self.truth.get((box_id, copy.stamp)) != copy.digest:
                raise Violation(f"rank {state.rank} votes for {vote.stamp} with a wrong base of box {box_id}")
            if not pending or pending[0].stamp != vote.stamp:
                raise Violation(f"rank {state.rank} votes for {vote.stamp} without the record of box {box_id}")

    def _serves(self, state: RankState, frame: Params) -> None:
        for box, _ in frame.digests:
            rank = self.acted.setdefault((frame.epoch, frame.version, box), state.rank)
            if rank != state.rank:
                raise Violation(f"ranks {rank} and {state.rank} both own box {box} at version {frame.version}")

    def _updates(self, state: RankState, action: Update) -> None:
        stamp, box = action.record.stamp, action.box
        self._was_voted(stamp, f"rank {state.rank} updates box {box} to {stamp}")
        known = self.parts.get((box, stamp))
        if known is None:
            self.parts[box, stamp] = action.record.parts
            readers = self.boxes[stamp.epoch, box].readers
            right = all(
                self.computed.get((stamp.epoch, stamp.version, p.rank)) == p.samples for p in action.record.parts
            )
            ranks = tuple(p.rank for p in action.record.parts)
            if not right or ranks != readers or not covers(p.samples for p in action.record.parts):
                raise Violation(f"the record of box {box} at {stamp} is not every sample of the step once")
        elif known != action.record.parts:
            raise Violation(f"two records of box {box} at {stamp}")

    def _was_voted(self, stamp: Stamp, what: str) -> None:
        for rank in self.members.get(stamp.epoch, ()):
            if (stamp, rank) not in self.voted:
                raise Violation(f"{what} though rank {rank} has not voted for it")

    def _commits(self, state: RankState, certificate: Certificate) -> None:
        stamp = certificate.stamp
        if len(self.members[stamp.epoch]) == 1:
            self.voted.add((stamp, state.rank))
        self._was_voted(stamp, f"rank {state.rank} commits {stamp}")
        other = self.history.get(stamp.version)
        if stamp.epoch == self.register.epoch:
            if other is not None and other != stamp:
                raise Violation(f"rank {state.rank} commits {stamp}, the other side {other}")
        elif other != stamp:
            # A rank left behind may still learn of the step that was in flight: of that one, and no other.
            self.orphans += 1
            if stamp.version > self.newest.get(stamp.epoch, 0):
                raise Violation(f"rank {state.rank}, left behind, commits {stamp}, which nobody computed")

    def ran(self, action: Update | Load, digest: int) -> None:
        """A new base exists at a rank."""
        if isinstance(action, Load):
            return
        if self.truth.get((action.box, action.copy.stamp)) != action.copy.digest:
            return  # a base that was corrupted after the vote; found at the next record
        right = self.truth.setdefault((action.box, action.record.stamp), digest)
        if right != digest:
            raise Violation(f"copies of box {action.box} differ at {action.record.stamp}")

    # --- The store ---

    def swapped(self, new: Register, lines: tuple[Certificate, ...]) -> None:
        """The store has taken a swap."""
        old = self.register
        for line in lines:
            self._ledger(old, line)
        if new.epoch != old.epoch:
            self._epoch(old, new, max(self.history))
        self._learn(new)

    def _ledger(self, old: Register, line: Certificate) -> None:
        stamp = line.stamp
        if stamp.version != max(self.history) + 1 or stamp.epoch != old.epoch:
            raise Violation(f"the ledger takes {stamp} after version {max(self.history)} in epoch {old.epoch}")
        self._was_voted(stamp, f"the ledger takes {stamp}")
        spans: dict[int, list[Span]] = {}
        for vote in line.votes:
            computed = self.computed.get((stamp.epoch, stamp.version, vote.rank))
            if [span.samples for span in vote.consumed] != [computed] or vote.stamp != stamp:
                raise Violation(f"the ledger says that rank {vote.rank} consumed {vote.consumed} for {stamp}")
            for span in vote.consumed:
                for unit in span.units:
                    spans.setdefault(unit, []).append(span.samples)
        if not spans or not all(covers(of_unit) for of_unit in spans.values()):
            raise Violation(f"the ledger line of {stamp} does not cover the plane once")
        self.history[stamp.version] = stamp

    def _epoch(self, old: Register, new: Register, ledgered: int) -> None:
        activation = new.activation
        resume = activation.resume
        if new.epoch != old.epoch + 1:
            raise Violation(f"epoch {new.epoch} follows epoch {old.epoch}")
        if activation.rollback:
            self._rolls_back(resume, Version(ledgered))
            return
        if resume != self.history[Version(ledgered)]:
            raise Violation(f"epoch {new.epoch} goes on from {resume}, the ledger stands at {ledgered}")
        if self._goes_back_too_far(old, new, ledgered) and not self._all_gone(old):
            raise Violation(f"epoch {new.epoch} redoes more than the step in flight after {ledgered}")
        living = {state.rank: state for state in self.living()}
        for rank in new.members:
            state = living.get(rank)
            if state is not None and state.epoch == old.epoch and state.committed.version > resume.version:
                raise Violation(f"rank {rank} knows that {state.committed} was committed; epoch {new.epoch} lost it")
        for box_id, box in numbered(activation.assignment.boxes):
            state = living.get(box.owner)
            if state is not None and not self._has(state, box_id, resume):
                raise Violation(f"rank {box.owner} is to own box {box_id} without a copy at {resume}")

    def _goes_back_too_far(self, old: Register, new: Register, ledgered: int) -> bool:
        """A rank that knew of the last commit may have begun the step after it, if none of the rest knows."""
        ahead = {r for epoch, version, r in self.computed if epoch == old.epoch and version > ledgered + 1}
        return self.newest.get(old.epoch, 0) > ledgered + 2 or not ahead.isdisjoint(new.members)

    def _all_gone(self, old: Register) -> bool:
        """Nobody lives who could know of a commit that the ledger has not: then the ledger is the truth."""
        if any(s.rank in old.members and s.epoch == old.epoch for s in self.living()):
            return False
        self.rollbacks += 1
        return True

    def _has(self, state: RankState, box: BoxId, stamp: Stamp) -> bool:
        """Whether a rank can bring a right copy of the box to `stamp`."""
        copy, pending = state.copies.get(box), state.records.get(box, ())
        if copy is None or self.truth.get((box, copy.stamp)) != copy.digest:
            return False
        previous = self.history.get(Version(stamp.version - 1))
        return copy.stamp == stamp or (copy.stamp == previous and bool(pending) and pending[0].stamp == stamp)

    def _rolls_back(self, resume: Stamp, ledgered: Version) -> None:
        if self.history.get(resume.version) != resume:
            raise Violation(f"rolled back to {resume}, which was never committed")
        if resume.version < ledgered:
            states, stamp = list(self.living()), self.history[ledgered]
            boxes = [box_id for box_id, _ in numbered(self.register.activation.assignment.boxes)]
            if all(any(self._has(state, box, stamp) for state in states) for box in boxes):
                raise Violation(f"rolled back from {stamp} to {resume} while a copy of each box lives")
            self.rollbacks += 1
            for version in [v for v in self.history if v > resume.version]:
                del self.history[version]
