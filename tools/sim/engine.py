"""One rank's engine: the commit machine that a real run enters, with digests in place of tensors.

In: frames of other ranks, and what the main thread wants. Out: frames, updates, and what is here when a step was left.
The machine decides; what is in here moves digests as its actions say, and takes time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch  # noqa: F401  its libraries are those of _native

from elaswave_fx._native import StepMachine
from elaswave_fx.control.protocol.training_loop import StepFailed
from elaswave_fx.control.protocol.types import (
    Assignment,
    BoxId,
    Certificate,
    Part,
    Record,
    Replica,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.control.store.ledger import Payload
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Epoch, Rank
from tools.sim.checker import Checker, seed_digest, updated_digest
from tools.sim.frames import (
    CatchUpRecordOf,
    Frame,
    NearlyInSync,
    ParametersOf,
    PartOf,
    RecordOf,
    StateAsked,
    StateOf,
    VoteCast,
    Wishes,
)
from tools.sim.given_replicas import GivenReplicas
from tools.sim.surroundings import Surroundings, UpdateFailed, Wait

UPDATE_S = 0.001
HELD_FRAMES = 1024
"""Frames of a newer epoch kept until it is installed; a rank sends at most a step's worth ahead."""

Boxes = tuple[BoxId, ...]
"""Neighbours."""


def boxes_from(first: BoxId, count: int) -> Boxes:
    """`count` boxes, the first of them given."""
    return tuple(BoxId(number) for number in range(first, first + count))


def has_update(stamp: Stamp) -> bool:
    """A step whose norm is not finite changes nothing; every rank comes to the same answer."""
    return hash((stamp.version, stamp.epoch)) % 13 != 0


class Engine:
    """One rank's engine. `content` is what is really in memory: the machine knows only what it was told of it."""

    def __init__(self, rank: Rank, around: Surroundings, checker: Checker, without: Iterable[str]) -> None:
        self.rank, self._around, self._checker = rank, around, checker
        self.machine = StepMachine(rank, without=list(without))
        self.epoch = Epoch(0)
        self.committed = Stamp(Version(0), Epoch(0))
        self.content: dict[BoxId, Replica] = {}
        self.records: dict[BoxId, Record] = {}
        self.work: dict[BoxId, tuple[Replica, bool]] = {}  # parameters, and whether they were made here
        self.votes: dict[Rank, Vote] = {}
        self.certificate: Certificate | None = None
        self.tile: Tile | None = None
        self.busy_s = 0.0  # what the units of the step took
        self.buckets: dict[int, list[BoxId]] = {}
        self._readers: dict[BoxId, tuple[Rank, ...]] = {}
        self._given = GivenReplicas(around)
        self._catch_up_owners: dict[BoxId, Rank] = {}  # owners of the boxes of which catch-up records are expected
        self._catch_up_records: dict[BoxId, Record] = {}  # that are being taken
        self._stamps: dict[int, Stamp] = {}
        self._parts: dict[tuple[BoxId, Rank], Part] = {}
        self._actions: deque[tuple[Any, ...]] = deque()
        self._expected: dict[tuple[type, BoxId | None, Rank], int] = {}
        self._inbox: dict[tuple[type, BoxId | None, Rank], deque[Frame]] = {}
        self._held: list[tuple[Rank, Frame]] = []

    @property
    def flight(self) -> Stamp:
        """The step in flight."""
        return Stamp(Version(self.committed.version + 1), self.epoch)

    @property
    def tile_size(self) -> int:
        """Units times samples of a step."""
        return 0 if self.tile is None else len(self.tile.units) * sum(map(len, self.tile.spans))

    @property
    def read(self) -> list[int]:
        """The buckets that this rank computes with."""
        return [number for number, boxes in self.buckets.items() if self.rank in self._readers[boxes[0]]]

    # --- Epochs ---

    def install(self, epoch: Epoch, assignment: Assignment, tile: Tile) -> Wait:
        """The roles of a new epoch, and what this rank computes."""
        self.epoch = epoch
        self.tile = tile
        self.buckets = {}
        for box_id, box in numbered(assignment.boxes):
            self.buckets.setdefault(box.bucket, []).append(box_id)
            self._readers[box_id] = box.readers
        roles = [(box.bucket, box.owner, list(box.holders), list(box.readers)) for box in assignment.boxes]
        self._forget_frames()
        self._do(self.machine.install(epoch, list(assignment.members), roles))
        held, self._held = self._held, []
        for sender, frame in held:
            self.receive(sender, frame)
        yield from self.perform()

    def load(self, stamp: Stamp, right: Callable[[BoxId], int], boxes: Iterable[BoxId]) -> None:
        """The state of a checkpoint."""
        self.committed = self._stamps[stamp.version] = stamp
        self.machine.restart(stamp.version)
        self.content.clear()
        for box in boxes:
            self.content[box] = Replica(stamp, right(box))
            self.machine.load(box, right(box))

    def start_from_seed(self, boxes: Iterable[BoxId]) -> None:
        """Every rank can make the parameters that the job begins with."""
        stamp = self.committed
        for box in boxes:
            self.work[box] = (Replica(stamp, seed_digest(box)), False)
        for bucket in self.read:
            self.machine.load_parameters(bucket)

    def known(self, box: BoxId) -> Replica | None:
        """The state as its last update left it, unless it lacks records of committed steps, as far as is known here."""
        if self.machine.sync_under_way(box):
            return None
        known, replica = self.machine.state(box), self.content.get(box)
        return None if known is None or replica is None else Replica(replica.stamp, known[1])

    def intact(self, box: BoxId) -> bool:
        """Whether what is in memory has the digest of its last update."""
        return box in self.content and self.known(box) == self.content[box]

    def refresh(self, takers: dict[int, list[Rank]]) -> Wait:
        """Parameters to every rank that wished for them."""
        for bucket, ranks in takers.items():
            self._do(self.machine.refresh(bucket, ranks))
        yield from self.perform()

    def replicate(self, transfers: Iterable[tuple[BoxId, Rank, Rank]]) -> Wait:
        """States to new holders, which travel beside the coming steps."""
        for box, owner, holder in transfers:
            if self.rank == holder:
                self._do(self.machine.expect_state(box))
            elif self.rank == owner:
                self._do(self.machine.send_state(box, holder))
        yield from self.perform()
        yield from self.send_replicas()

    # --- A step ---

    def begin_step(self) -> None:
        self.records, self.votes, self.certificate = {}, {}, None
        self._parts.clear()
        self._do(self.machine.begin_step())

    def parameters(self) -> dict[BoxId, tuple[Replica, bool]]:
        """What this rank computes with."""
        return {box: self.work[box] for bucket in self.read for box in self.buckets[bucket] if box in self.work}

    def parameters_ready(self) -> bool:
        return all(self.machine.parameters_ready(bucket) for bucket in self.read)

    def reduce(self) -> None:
        """The own gradient is done, the last bucket first."""
        for bucket in sorted(self.buckets, reverse=True):
            self._do(self.machine.bucket_reduced(bucket))

    def cast_vote(self) -> None:
        assert self.tile is not None
        self.votes[self.rank] = Vote(
            self.flight,
            self.rank,
            self.tile.work,
            Payload(busy_s=self.busy_s).pack(),
        )
        actions = self.machine.cast_vote()
        if not any(action[0] == "leave_step" for action in actions):
            self._checker.votes(self, self.votes[self.rank])
        self._do(actions)

    def update(self) -> Wait:
        """What a commit leads to, in the order of a real step."""
        for bucket in sorted(self.buckets, reverse=True):
            self._do(self.machine.update_bucket(bucket))
            yield from self.perform()
            self._do(self.machine.gather(bucket))
            yield from self.perform()
        self._do(self.machine.update_replicas())
        yield from self.perform()
        for box in list(self._catch_up_owners):
            yield from self._catch_up(box)
        yield from self.send_replicas()
        self.machine.end_step()

    def _catch_up(self, box: BoxId) -> Wait:
        """Take the catch-up records that are here, of steps that are committed here."""
        owner = self._catch_up_owners[box]
        while self.machine.sync_under_way(box) and (frames := self._inbox.get((CatchUpRecordOf, box, owner))):
            frame = frames[0]
            assert isinstance(frame, CatchUpRecordOf)
            if self._inbox.get((StateOf, box, owner)) or frame.version >= self.machine.version:
                return
            frames.popleft()
            self._catch_up_records[box] = frame.record
            base = frame.record.base_digest
            self._do(self.machine.catch_up_record_arrived(box, frame.version, base, True, frame.prompt))
            yield from self.perform()
            self._catch_up_records.pop(box, None)
            self._align(box)

    def send_replicas(self) -> Wait:
        """States whose turn has come; records of replicas that are nearly in sync go with the step from now on."""
        for box, holder in self._given.take_nearly_in_sync():
            self.machine.replica_nearly_in_sync(box, holder)
        for box, holder in self._given.take_due():
            if (state := self.machine.state(box)) is None:
                continue  # its update has failed since
            catch_up = self.machine.state_leaves(box, holder)
            self._given.send_state(holder, StateOf(self.epoch, box, self.content[box], *state))
            self._do(catch_up)
            for answer in (StateAsked, NearlyInSync):
                self._expected[answer, box, holder] = 1
            yield from self.perform()

    def send_catch_up_records(self) -> None:
        """Those of the step, after its own messages."""
        self._given.send_records(self.flight.version)

    def awaits_bulk(self) -> bool:
        """Whether catch-up records are under way that the vote waits for."""
        return self._given.vote_waits()

    def leave(self) -> Wait:
        """Leave the step; updates that a commit demands are done."""
        self._forget_frames()
        self._actions.clear()
        self._do(self.machine.leave())
        yield from self.perform()
        if self.machine.committed:
            self.machine.end_step()

    def finish(self, certificate: Certificate) -> Wait:
        """Finish the step that was left after the own vote, with the votes of all."""
        self.votes = {vote.rank: vote for vote in certificate.votes}
        self._do(self.machine.finish([vote.rank for vote in certificate.votes]))
        yield from self.perform()
        self.machine.end_step()

    def take_certificate(self) -> Certificate | None:
        """Return the certificate of the step that was committed, and forget it."""
        certificate, self.certificate = self.certificate, None
        return certificate

    def drop(self) -> None:
        """Give up the step that was left."""
        self.machine.drop()
        self.records = {}

    # --- Frames ---

    def receive(self, sender: Rank, frame: Frame) -> None:
        """A frame is here; the main thread takes it when it waits for it."""
        admission = self.machine.admit(frame.epoch)
        if admission == "hold" and len(self._held) < HELD_FRAMES:
            self._held.append((sender, frame))
        elif admission == "deliver":
            self._inbox.setdefault((type(frame), frame.box, sender), deque()).append(frame)

    def take_wish(self, sender: Rank) -> frozenset[int] | None:
        """The wishes of a member, if they are here."""
        found = self._inbox.get((Wishes, None, sender))
        frame = found.popleft() if found else None
        return frame.buckets if isinstance(frame, Wishes) else None

    def progress(self) -> Wait:
        """Take what was awaited and is here, and do what follows from it."""
        yield from self.perform()
        took = True
        while took:
            took = False
            for key in list(self._expected):
                frames = self._inbox.get(key)
                if frames and not self._is_ahead(frames[0]):
                    self._arrived(key[2], frames.popleft())
                    took = True
            for box, owner in self._catch_up_owners.items():
                frames = self._inbox.get((CatchUpRecordOf, box, owner))
                if frames and self.machine.record_awaited(box):
                    frame = frames.popleft()
                    assert isinstance(frame, CatchUpRecordOf)
                    self._record_arrived(box, frame.record, frame.version)
                    took = True
            yield from self.perform()

    def _is_ahead(self, frame: Frame) -> bool:
        """Whether it is a state of a step that is not committed here."""
        return isinstance(frame, StateOf) and frame.version > self.machine.version

    def _forget_frames(self) -> None:
        self._expected.clear()
        self._inbox.clear()
        self._given.clear()
        self._catch_up_owners.clear()
        self._catch_up_records.clear()

    def _arrived(self, sender: Rank, frame: Frame) -> None:
        machine = self.machine
        self._checker.arrives(frame, sender, self.rank, self._expected.pop((type(frame), frame.box, sender), None))
        if isinstance(frame, PartOf):
            for box in boxes_from(frame.box, frame.count):
                self._parts[box, sender] = Part(sender, frame.samples)
            self._do(machine.part_arrived(frame.box, sender, frame.count))
        elif isinstance(frame, RecordOf):
            for box, (record, version) in zip(boxes_from(frame.box, frame.count), frame.records, strict=True):
                self._record_arrived(box, record, version)
        elif isinstance(frame, VoteCast):
            self.votes[sender] = frame.vote
            self._do(machine.vote_arrived(sender))
        elif isinstance(frame, ParametersOf):
            for box, replica in zip(boxes_from(frame.box, frame.count), frame.replicas, strict=True):
                self.work[box] = (replica, False)
                machine.parameters_arrived(box)
        elif isinstance(frame, StateOf):
            self.content[frame.box] = frame.replica
            self._do(machine.state_arrived(frame.box, frame.version, frame.digest, True))
            self._align(frame.box)
        elif isinstance(frame, StateAsked):
            self._do(machine.state_asked(frame.box, sender))
        elif isinstance(frame, NearlyInSync):
            self._given.nearly_in_sync.append((frame.box, sender))

    def _record_arrived(self, box: BoxId, record: Record, version: int) -> None:
        self.records[box] = record
        self._do(self.machine.record_arrived(box, version, record.base_digest, True))

    def _align(self, box: BoxId) -> None:
        """A step without an update, which the machine has counted, leaves the bytes as they are."""
        known = self.machine.state(box)
        if known is not None and box in self.content and known[0] > self.content[box].stamp.version:
            self.content[box] = self.content[box]._replace(stamp=self._stamps[known[0]])

    # --- Actions ---

    def _do(self, actions: Iterable[tuple[Any, ...]]) -> None:
        """What is told to the machine while actions are under way comes first."""
        self._actions.extendleft(reversed(list(actions)))

    def perform(self) -> Wait:
        while self._actions:
            kind, box, peer, _, count = self._actions.popleft()
            if kind == "update":
                yield from self._update(box)
            elif kind in _RUN_ACTIONS:
                _RUN_ACTIONS[kind](self, boxes_from(box, count), peer)
            elif kind in _EXPECTED:
                self._expected[_EXPECTED[kind], box, peer] = count
            else:
                _ACTIONS[kind](self, box, peer)

    def _update(self, box: BoxId) -> Wait:
        record = self._catch_up_records.get(box) or self.records[box]
        base = self.content[box]
        self._checker.updates(self, box, record)
        yield from self._around.sleep(UPDATE_S)
        if self._around.update_fails():
            actions = self.machine.update_failed(box)
            if self.machine.state(box) is None:
                self._drop_state(box, None)
                raise UpdateFailed(f"rank {self.rank}: the update of box {box} failed")
            self.content[box] = base._replace(stamp=record.stamp)
            return self._do(actions)
        after = Replica(record.stamp, updated_digest(base, record))
        self.content[box] = after
        self._checker.updated(base, after, box)
        self._do(self.machine.updated(box, after.digest))
        self._align(box)

    def _send_part(self, boxes: Boxes, peer: Rank) -> None:
        self._around.send(peer, PartOf(self.epoch, boxes[0], len(boxes), self._samples))

    def _sum(self, boxes: Boxes, peer: None) -> None:
        own = Part(self.rank, self._samples)
        for box in boxes:
            parts = tuple(own if r == self.rank else self._parts[box, r] for r in self._readers[box])
            self.records[box] = Record(self.flight, parts, self.content[box].digest if box in self.content else 0)

    def _send_record(self, boxes: Boxes, peer: Rank) -> None:
        self._around.send(peer, RecordOf(self.epoch, boxes[0], tuple(self._record_of(box) for box in boxes)))

    def _record_of(self, box: BoxId) -> tuple[Record, int]:
        """The record as it travels, with the version of the state here that it belongs to."""
        version, digest = self.machine.state(box) or (self.machine.version, 0)
        return self.records[box]._replace(base_digest=digest), version

    def _send_vote(self, box: None, peer: Rank) -> None:
        self._around.send(peer, VoteCast(self.epoch, self.votes[self.rank]))

    def _leave_step(self, box: BoxId, peer: None) -> None:
        raise StepFailed(None, f"replicas of box {box} differ from their owners'", mismatch=True)

    def _commit(self, box: None, peer: None) -> None:
        stamp = self.flight
        self.certificate = Certificate(stamp, tuple(self.votes[rank] for rank in sorted(self.votes)))
        self._checker.commits(self, self.certificate)
        self.committed = self._stamps[stamp.version] = stamp
        self._do(self.machine.commit(has_update(stamp)))
        if not has_update(stamp):
            self._checker.unchanged(stamp)
            self.content = {held: _unchanged(replica, stamp) for held, replica in self.content.items()}
            self.work = {held: (replica._replace(stamp=stamp), own) for held, (replica, own) in self.work.items()}

    def _write_parameters(self, box: BoxId, peer: None) -> None:
        if self.rank in self._readers[box]:
            self.work[box] = (self.content[box], True)

    def _send_parameters(self, boxes: Boxes, peer: Rank) -> None:
        for box in boxes:
            self._checker.serves(self, box)
        self._around.send(peer, ParametersOf(self.epoch, boxes[0], tuple(self.content[box] for box in boxes)))

    def _send_state(self, box: BoxId, peer: Rank) -> None:
        self._given.make_due((box, peer))

    def _send_catch_up_record(self, box: BoxId, peer: Rank) -> None:
        record, version = self._record_of(box)
        self._given.keep_record(peer, CatchUpRecordOf(self.epoch, box, record, version, prompt=False))

    def _send_prompt_record(self, box: BoxId, peer: Rank) -> None:
        self._around.send(peer, CatchUpRecordOf(self.epoch, box, *self._record_of(box), prompt=True))

    def _expect_catch_up_record(self, box: BoxId, peer: Rank) -> None:
        self._catch_up_owners[box] = peer

    def _report_nearly_in_sync(self, box: BoxId, peer: Rank) -> None:
        self._around.send(peer, NearlyInSync(self.epoch, box))

    def _ask_state(self, box: BoxId, peer: Rank) -> None:
        del self.content[box]
        self._around.send(peer, StateAsked(self.epoch, box))

    def _drop_state(self, box: BoxId, peer: None) -> None:
        self.content.pop(box, None)
        self._catch_up_owners.pop(box, None)
        for key in [key for key in self._expected if key[:2] == (StateOf, box)]:
            del self._expected[key]

    @property
    def _samples(self) -> tuple[Span, ...]:
        assert self.tile is not None
        return self.tile.spans


def _unchanged(replica: Replica, stamp: Stamp) -> Replica:
    """The state after a step without an update, if it has all before."""
    return replica._replace(stamp=stamp) if replica.stamp.version + 1 == stamp.version else replica


_EXPECTED: dict[str, type] = {
    "expect_part": PartOf,
    "expect_record": RecordOf,
    "expect_vote": VoteCast,
    "expect_parameters": ParametersOf,
    "expect_state": StateOf,
}

_RUN_ACTIONS: dict[str, Callable[[Engine, Boxes, Any], None]] = {
    "send_part": Engine._send_part,
    "sum": Engine._sum,
    "send_record": Engine._send_record,
    "send_parameters": Engine._send_parameters,
}

_ACTIONS: dict[str, Callable[[Engine, Any, Any], None]] = {
    "send_vote": Engine._send_vote,
    "leave_step": Engine._leave_step,
    "commit": Engine._commit,
    "write_parameters": Engine._write_parameters,
    "send_state": Engine._send_state,
    "send_catch_up_record": Engine._send_catch_up_record,
    "send_prompt_record": Engine._send_prompt_record,
    "expect_catch_up_record": Engine._expect_catch_up_record,
    "report_nearly_in_sync": Engine._report_nearly_in_sync,
    "ask_state": Engine._ask_state,
    "drop_state": Engine._drop_state,
}
