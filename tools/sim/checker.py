"""The invariants, checked from outside after every event; knows nothing of how the protocol keeps them.

In: what a rank really computes, votes for, updates and sends, swaps of the store, crashes. Out: nothing, or `Violation`
that says in words which promise was broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from elaswave_fx.control.protocol.messages import StoreSeen
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import (
    SEED,
    Certificate,
    Part,
    Record,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Epoch, Rank
from tools.sim.frames import Frame
from tools.sim.job import BATCH

WORD = (1 << 64) - 1


class Violation(Exception):
    """A broken invariant, in words."""


class Memory(Protocol):
    """What a rank really has: `content`, states; `records` of the step in flight; `committed`, what it knows.

    `known(box)`: the state as its last update left it; bytes that have changed in memory since differ from that.
    """

    rank: Rank
    epoch: Epoch
    committed: Stamp
    content: dict[BoxId, Replica]
    records: dict[BoxId, Record]
    tile: Tile | None

    def known(self, box: BoxId) -> Replica | None: ...


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
    return hash((box, 0)) & WORD


def updated_digest(replica: Replica, record: Record) -> int:
    """The update: a function of the state and the summed gradient alone."""
    parts = tuple((p.rank, *((s.lo, s.hi) for s in p.samples)) for p in record.parts)
    return hash((replica.digest, record.stamp, parts)) & WORD


@dataclass
class Checker:
    """What an all-knowing observer has seen so far. `living` gives the memories of processes that have one."""

    living: Callable[[], Iterable[Memory]]
    register: Register
    truth: dict[tuple[BoxId, Stamp], int] = field(default_factory=dict)
    parts: dict[tuple[BoxId, Stamp], tuple[Part, ...]] = field(default_factory=dict)
    computed: dict[tuple[Epoch, Version, Rank], tuple[Span, ...]] = field(default_factory=dict)
    tainted: set[tuple[Epoch, Version, Rank]] = field(default_factory=set)
    newest: dict[Epoch, int] = field(default_factory=dict)
    voted: set[tuple[Stamp, Rank]] = field(default_factory=set)
    served: dict[tuple[Epoch, Version, BoxId], Rank] = field(default_factory=dict)
    members: dict[Epoch, tuple[Rank, ...]] = field(default_factory=dict)
    boxes: dict[Epoch, Mapping[BoxId, Box]] = field(default_factory=dict)
    history: dict[Version, Stamp] = field(default_factory=dict)
    reported: dict[Rank, Epoch] = field(default_factory=dict)
    over_s: dict[tuple[Term, Epoch], float] = field(default_factory=dict)
    first_line_s: dict[Epoch, float] = field(default_factory=dict)
    orphans: int = 0
    rollbacks: int = 0

    def __post_init__(self) -> None:
        self.history[SEED.version] = SEED
        self._learn(self.register)
        for box_id in self.boxes[self.register.epoch]:
            self.truth[box_id, SEED] = seed_digest(box_id)

    def _learn(self, register: Register) -> None:
        self.register = register
        self.members[register.epoch] = register.members
        if register.epoch not in self.boxes:
            self.boxes[register.epoch] = dict(numbered(register.activation.assignment.boxes))

    # --- Ranks ---

    def arrives(self, frame: Frame, sender: Rank, receiver: Rank, expected: int | None) -> None:
        """A frame is taken; both ends have to count alike how many boxes are in it."""
        if frame.count != expected:
            name = type(frame).__name__
            raise Violation(
                f"{name} of {frame.count} boxes from {sender}, {receiver} expects {expected} (box {frame.box})"
            )

    def computes(self, memory: Memory, used: Mapping[BoxId, tuple[Replica, bool]]) -> None:
        """A rank begins to compute with the parameters `used`; of each, whether it was made from an own replica."""
        assert memory.tile is not None
        epoch, rank, version = memory.epoch, memory.rank, Version(memory.committed.version + 1)
        self.computed[epoch, version, rank] = memory.tile.spans
        self.newest[epoch] = max(version, self.newest.get(epoch, 0))
        for box_id, box in self.boxes[epoch].items():
            if rank not in box.readers:
                continue
            if box_id not in used:
                raise Violation(f"rank {rank} computes version {version} without parameters of box {box_id}")
            replica, made_here = used[box_id]
            if replica.stamp == memory.committed and self.truth.get((box_id, replica.stamp)) == replica.digest:
                continue
            if not made_here:
                raise Violation(f"rank {rank} computes version {version} with wrong parameters of box {box_id}")
            # Made from a replica that has changed in memory, which the next record shows: no vote may follow.
            self.tainted.add((epoch, version, rank))

    def votes(self, memory: Memory, vote: Vote) -> None:
        """A yes means: state and record of every box that the plan wants this rank to have."""
        rank, epoch, stamp = memory.rank, memory.epoch, vote.stamp
        if self.reported.get(rank, -1) >= epoch:
            raise Violation(f"rank {rank} votes in epoch {epoch} after it has reported")
        if (epoch, stamp.version, rank) in self.tainted:
            raise Violation(f"rank {rank} votes for {stamp}, computed with wrong parameters")
        for box_id, box in self.boxes[epoch].items():
            if rank in box.replica_ranks:
                self._vouches(memory, box_id, stamp, rank in box.catching_up)
        self.voted.add((stamp, rank))

    def _vouches(self, memory: Memory, box: BoxId, stamp: Stamp, is_syncing: bool) -> None:
        rank, replica, record = memory.rank, memory.known(box), memory.records.get(box)
        if replica is None and is_syncing:
            return
        if replica is None or replica.stamp.version != stamp.version - 1:
            raise Violation(f"rank {rank} votes for {stamp} without the state of box {box}")
        if self.truth.get((box, replica.stamp)) != replica.digest:
            raise Violation(f"rank {rank} votes for {stamp} with a wrong state of box {box}")
        if record is None or record.stamp != stamp:
            raise Violation(f"rank {rank} votes for {stamp} without the record of box {box}")

    def serves(self, memory: Memory, box: BoxId) -> None:
        """A rank sends the parameters of a box."""
        at = (memory.epoch, memory.committed.version, box)
        rank = self.served.setdefault(at, memory.rank)
        if rank != memory.rank:
            raise Violation(f"ranks {rank} and {memory.rank} both own box {box} at version {at[1]}")

    def updates(self, memory: Memory, box: BoxId, record: Record) -> None:
        """A rank begins to apply a record."""
        stamp = record.stamp
        self._was_voted(stamp, f"rank {memory.rank} updates box {box} to {stamp}")
        known = self.parts.get((box, stamp))
        if known is None:
            self.parts[box, stamp] = record.parts
            right = all(self.computed.get((stamp.epoch, stamp.version, p.rank)) == p.samples for p in record.parts)
            ranks = tuple(p.rank for p in record.parts)
            readers = self.boxes[stamp.epoch][box].readers
            if not right or ranks != readers or not covers(span for p in record.parts for span in p.samples):
                raise Violation(f"the record of box {box} at {stamp} is not every sample of the step once")
        elif known != record.parts:
            raise Violation(f"two records of box {box} at {stamp}")

    def updated(self, before: Replica, after: Replica, box: BoxId) -> None:
        """A state has become the next one."""
        if self.truth.get((box, before.stamp)) != before.digest:
            return  # it had changed in memory, which the next record shows
        right = self.truth.setdefault((box, after.stamp), after.digest)
        if right != after.digest:
            raise Violation(f"replicas of box {box} differ at {after.stamp}")

    def unchanged(self, stamp: Stamp) -> None:
        """A step without an update: states stay as they are."""
        before = self.history_of(stamp)
        for box in self.boxes[stamp.epoch]:
            if (box, before) in self.truth:
                self.truth.setdefault((box, stamp), self.truth[box, before])

    def history_of(self, stamp: Stamp) -> Stamp:
        """The commit before `stamp`, in its epoch or where that began."""
        before = Stamp(Version(stamp.version - 1), stamp.epoch)
        if stamp.epoch in self.members and (before, self.members[stamp.epoch][0]) in self.voted:
            return before
        return self.history[before.version]

    def _was_voted(self, stamp: Stamp, what: str) -> None:
        for rank in self.members.get(stamp.epoch, ()):
            if (stamp, rank) not in self.voted:
                raise Violation(f"{what} though rank {rank} has not voted for it")

    def commits(self, memory: Memory, certificate: Certificate) -> None:
        """A rank takes a step for committed."""
        stamp = certificate.stamp
        self._was_voted(stamp, f"rank {memory.rank} commits {stamp}")
        if any(vote.stamp != stamp for vote in certificate.votes):
            raise Violation(f"rank {memory.rank} commits {stamp} with votes for something else")
        other = self.history.get(stamp.version)
        if stamp.epoch == self.register.epoch:
            if other is not None and other != stamp:
                raise Violation(f"rank {memory.rank} commits {stamp}, the other side {other}")
        elif other != stamp:
            # A rank left behind may still learn of the step that was in flight: of that one, and no other.
            self.orphans += 1
            if stamp.version > self.newest.get(stamp.epoch, 0):
                raise Violation(f"rank {memory.rank}, left behind, commits {stamp}, which nobody computed")

    def reports(self, rank: Rank, report: Report) -> None:
        """A rank has said what it has, and promised to vote no more in that epoch."""
        self.reported[rank] = max(report.epoch, self.reported.get(rank, report.epoch))

    def sees(self, rank: Rank, seen: StoreSeen) -> None:
        """A rank is told what the store says: it must have said so at some time after the rank asked."""
        over_s = self.over_s.get((seen.term, seen.epoch))
        if over_s is not None and over_s < seen.asked_s:
            raise Violation(
                f"rank {rank}, which asked at {seen.asked_s:.3f} s, is told that the store is at term {seen.term}, "
                f"epoch {seen.epoch}, which were over at {over_s:.3f} s"
            )
        is_member, began_s = rank in self.members[seen.epoch], self.first_line_s.get(seen.epoch)
        if is_member and not seen.needed:
            raise Violation(f"rank {rank} is told that nobody needs it, and is in epoch {seen.epoch}")
        if seen.needed and not is_member and began_s is not None and began_s < seen.asked_s:
            raise Violation(f"rank {rank} is told that it is needed, and steps of epoch {seen.epoch} are committed")

    # --- The store ---

    def swapped(self, new: Register, lines: tuple[Certificate, ...], now_s: float) -> None:
        """The store has taken a swap."""
        old = self.register
        if new.numbers < old.numbers:
            raise Violation(f"{old.numbers} numbers had been given, and now {new.numbers}")
        if (new.term, new.epoch) != (old.term, old.epoch):
            self.over_s[old.term, old.epoch] = now_s
        for line in lines:
            self.first_line_s.setdefault(line.stamp.epoch, now_s)
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
            if tuple(span.samples for span in vote.consumed) != computed or vote.stamp != stamp:
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
        living = {memory.rank: memory for memory in self.living()}
        for rank in new.members:
            memory = living.get(rank)
            if memory is not None and memory.epoch == old.epoch and memory.committed.version > resume.version:
                raise Violation(f"rank {rank} knows that {memory.committed} was committed; epoch {new.epoch} lost it")
        for box_id, box in numbered(activation.assignment.boxes):
            memory = living.get(box.owner)
            if memory is not None and not self._has(memory, box_id, resume, memory.known(box_id)):
                raise Violation(f"rank {box.owner} is to own box {box_id} without a replica at {resume}")

    def _goes_back_too_far(self, old: Register, new: Register, ledgered: int) -> bool:
        """A rank that knew of the last commit may have begun the step after it, if none of the rest knows."""
        ahead = {r for epoch, version, r in self.computed if epoch == old.epoch and version > ledgered + 1}
        return self.newest.get(old.epoch, 0) > ledgered + 2 or not ahead.isdisjoint(new.members)

    def _all_gone(self, old: Register) -> bool:
        """Nobody lives who could know of a commit that the ledger has not: then the ledger is the truth."""
        if any(memory.rank in old.members and memory.epoch == old.epoch for memory in self.living()):
            return False
        self.rollbacks += 1
        return True

    def _has(self, memory: Memory, box: BoxId, stamp: Stamp, replica: Replica | None) -> bool:
        """Whether `replica` is right, and the rank can bring it to `stamp`."""
        record = memory.records.get(box)
        if replica is None or self.truth.get((box, replica.stamp)) != replica.digest:
            return False
        previous = self.history.get(Version(stamp.version - 1))
        return replica.stamp == stamp or (replica.stamp == previous and record is not None and record.stamp == stamp)

    def over(self) -> None:
        """The coordinator says that nobody goes on."""
        if self.register.checkpoint != SEED:
            raise Violation(f"the job is over, though {self.register.checkpoint} was saved")
        if self._all_replicas_live(self._newest_known()):
            raise Violation("the job is over while a replica of each box lives")

    def _newest_known(self) -> Stamp:
        """What replicas have to lead to: the last commit of the ledger, or the one after it that a member knows of."""
        members, epoch = self.register.members, self.register.epoch
        known = [m.committed for m in self.living() if m.rank in members and m.committed.epoch == epoch]
        return max([self.history[max(self.history)], *known], key=lambda stamp: stamp.version)

    def _all_replicas_live(self, stamp: Stamp) -> bool:
        memories, boxes = list(self.living()), self.boxes[self.register.epoch]
        return all(any(self._has(m, box, stamp, m.content.get(box)) for m in memories) for box in boxes)

    def _rolls_back(self, resume: Stamp, ledgered: Version) -> None:
        if self.history.get(resume.version) != resume:
            raise Violation(f"rolled back to {resume}, which was never committed")
        if resume.version < ledgered:
            if self._all_replicas_live(self.history[ledgered]):
                raise Violation(f"rolled back from {ledgered} to {resume} while a replica of each box lives")
            self.rollbacks += 1
            for version in [v for v in self.history if v > resume.version]:
                del self.history[version]
