"""Extra bytes for replicas that are syncing, and waves of replicas that stay within a bound.

In: boxes with syncing replicas. Out: the bytes that this takes, by rank; or the boxes of a first wave, with as many new
replicas as have room and all existing ones kept. Later plans make the rest.

    transition_memory(plan)[3]                      ->  Needs(replicas=98304, records=294912, in_flight=0, parameters=0)
    first_wave(boxes, workload, {3: 2000000, ...})  ->  boxes 0-1 with rank 3 among their holders, boxes 2-4 without it
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.cost import GRADIENT_BYTES, Workload
from elaswave_fx.plan.work.topology import Rank, Topology
from elaswave_fx.words import size_text

EXPECTED_RECORDS = 2
"""Records of a box that a syncing rank expects at the same time (`kExpectedAhead` in native/commit/machine.h)."""

LAG_STEPS = 4
"""Steps by which catch-up records may lag at the owner's vote (`kLagSteps` in
native/exec/state/replica_sync.cc). The next step's record is made before the next vote."""

UNDER_WAY_BYTES = 4 << 20
"""States that an owner sends at the same time, not counting the last one (`kStateBytesUnderWay` in
native/exec/state/replica_sync.cc). An update leaves them alone and writes new ones, so each exists twice meanwhile."""


@dataclass(frozen=True)
class Needs:
    """Extra bytes of a rank: `replicas` that it receives, their catch-up `records`, states and records `in_flight` to
    others; and new working `parameters`, in a stop in which it still has its previous ones."""

    replicas: int = 0
    records: int = 0
    in_flight: int = 0
    parameters: int = 0

    @property
    def sync_bytes(self) -> int:
        """Bytes needed during steps. Only these are bounded, as parameters are part of the plan's own need."""
        return self.replicas + self.records + self.in_flight


@dataclass(frozen=True)
class Short:
    """A replica for which a rank has no room, not even alone."""

    box: BoxId
    rank: Rank
    needs: int
    has: int

    @property
    def words(self) -> str:
        """The shortage in words."""
        return (
            f"a replica of box {self.box} takes {size_text(self.needs)} of rank {self.rank}, which has "
            f"{size_text(self.has)} for syncing replicas (by switch.memory, and by what its plan leaves): "
            f"{self.needs - self.has} bytes short"
        )


Room = Mapping[Rank, int]
"""Bytes by rank for syncing replicas; a rank that is not in it has no bound."""


def transition_memory(plan: Plan, before: Plan | None = None) -> dict[Rank, Needs]:
    """The most bytes, by rank, that its syncing replicas need, and parameters that it did not have `before`."""
    account = _Account(plan.workload)
    for box in plan.boxes:
        for rank in box.catching_up:
            account.add(box, rank, {})
    return {
        rank: account.needs(rank, 0 if before is None else _new_parameters(before, plan, rank)) for rank in plan.ranks
    }


def replica_bytes(workload: Workload, box: Box) -> int:
    """Bytes of a new replica: its state, records that it expects, and one that is applied."""
    return state_bytes(workload, box) + (EXPECTED_RECORDS + 1) * _record_bytes(workload, box)


def state_bytes(workload: Workload, box: Box) -> int:
    """Bytes to transfer of a box: no record is transferred, for the next step makes one."""
    return (workload.state_bytes_per_element - GRADIENT_BYTES) * len(box.span)


def room_for_replicas(topology: Topology, needed: Mapping[Rank, int]) -> dict[Rank, int]:
    """Free bytes of ranks beside `needed`, at most what the topology allows for a transition."""
    found: dict[Rank, int] = {}
    for member in topology.members:
        bounds = [] if topology.switch_bytes is None else [topology.switch_bytes]
        if member.memory_bytes is not None:
            bounds.append(max(0, member.memory_bytes - needed.get(member.rank, 0)))
        if bounds:
            found[member.rank] = min(bounds)
    return found


def needed_without_replicas(plan: Plan) -> dict[Rank, int]:
    """Bytes of the plan by rank, without replicas that are still to come."""
    needed = {rank: cost.memory_bytes for rank, cost in plan.predicted.ranks.items()}
    return without_replicas(needed, plan.boxes, plan.workload)


def without_replicas(needed: Mapping[Rank, int], boxes: Sequence[Box], workload: Workload) -> dict[Rank, int]:
    """`needed` without the bytes of replicas that are still to come."""
    left = dict(needed)
    for box in boxes:
        for rank in box.catching_up:
            left[rank] -= workload.state_bytes_per_element * len(box.span)
    return left


def first_wave(boxes: Sequence[Box], workload: Workload, room: Room) -> tuple[Box, ...]:
    """The boxes with as many new replicas as have room: boxes with fewest replicas first, then in order. Unchanged if
    all fit."""
    account, found = _Account(workload), list(boxes)
    syncing = [number for number, box in enumerate(boxes) if box.catching_up]
    for number in sorted(syncing, key=lambda number: (len(boxes[number].local_materializers), number)):
        box = boxes[number]
        refused = {rank for rank in box.catching_up if not account.add(box, rank, room)}
        if refused:
            holders, catching_up = ([r for r in ranks if r not in refused] for ranks in (box.holders, box.catching_up))
            found[number] = replace(box, holders=tuple(holders), catching_up=tuple(catching_up))
    return tuple(found)


def without_room(boxes: Sequence[Box], workload: Workload, room: Room) -> Short | None:
    """The first new replica that has no room in any wave; None if all do."""
    for number, box in numbered(boxes):
        for rank in box.catching_up:
            sent = state_bytes(workload, box) + _catch_up_bytes(workload, box)
            needs = {rank: replica_bytes(workload, box), box.owner: sent}
            for who, size in needs.items():
                if size > room.get(who, size):
                    return Short(number, who, size, room[who])
    return None


class _Account:
    """Needs of the replicas added so far."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._replicas: Counter[Rank] = Counter()
        self._records: Counter[Rank] = Counter()
        self._sent: Counter[Rank] = Counter()
        self._catch_up: Counter[Rank] = Counter()  # catch-up records
        self._largest: defaultdict[Rank, int] = defaultdict(int)  # by owner, of the states that it sends

    def add(self, box: Box, target: Rank, room: Room) -> bool:
        """Add a replica at `target` if it and the owner have room. Return whether they have."""
        state = state_bytes(self._workload, box)
        comes = self.needs(target).sync_bytes + replica_bytes(self._workload, box)
        sent, largest = self._sent[box.owner] + state, max(self._largest[box.owner], state)
        catch_up = self._catch_up[box.owner] + _catch_up_bytes(self._workload, box)
        goes = self._replicas[box.owner] + self._records[box.owner] + _in_flight(sent, largest) + catch_up
        if comes > room.get(target, comes) or goes > room.get(box.owner, goes):
            return False
        self._replicas[target] += state
        self._records[target] += replica_bytes(self._workload, box) - state
        self._sent[box.owner], self._largest[box.owner], self._catch_up[box.owner] = sent, largest, catch_up
        return True

    def needs(self, rank: Rank, parameters: int = 0) -> Needs:
        in_flight = _in_flight(self._sent[rank], self._largest[rank]) + self._catch_up[rank]
        return Needs(self._replicas[rank], self._records[rank], in_flight, parameters)


def _in_flight(sent: int, largest: int) -> int:
    """Bytes in flight of an owner that sends `sent` bytes of states in all."""
    return min(sent, UNDER_WAY_BYTES + largest)


def _catch_up_bytes(workload: Workload, box: Box) -> int:
    """The most bytes of catch-up records at the owner."""
    return (LAG_STEPS + 1) * _record_bytes(workload, box)


def _record_bytes(workload: Workload, box: Box) -> int:
    """Bytes of a record; for buffers, which are whole buckets, the outputs of every granule."""
    times = workload.granules if workload.buckets[box.bucket].whole else 1
    return GRADIENT_BYTES * len(box.span) * times


def made_ahead(before: Plan, plan: Plan, rank: Rank) -> list[int]:
    """New parameter buckets of a rank that fit, gradients included, beside all that it has `before`: all of them or
    none. Buffers are small and left out."""
    work = plan.workload
    new = [number for number in _new_buckets(before, plan, rank) if not work.buckets[number].whole]
    more = sum(work.buckets[number].work_bytes + work.sum_bytes * work.buckets[number].numel for number in new)
    limit = before.topology.member(rank).memory_bytes
    return new if limit is None or before.predicted.ranks[rank].memory_bytes + more <= limit else []


def _new_parameters(before: Plan, plan: Plan, rank: Rank) -> int:
    """Bytes of working copies that are new to the rank."""
    buckets = plan.workload.buckets
    return sum(buckets[n].work_bytes for n in _new_buckets(before, plan, rank))


def _new_buckets(before: Plan, plan: Plan, rank: Rank) -> list[int]:
    return [
        number for number, bucket in enumerate(plan.workload.buckets)
        if rank in plan.groups[bucket.name] and rank not in before.groups[bucket.name]
    ]  # fmt: skip


def wave_words(planned: Sequence[Box], made: Sequence[Box], short: Short | None) -> str:
    """Words for replicas that are not made in this wave; empty if all are. `short`: a replica that has no room at
    all."""
    wanted, now = (sum(len(box.catching_up) for box in boxes) for boxes in (planned, made))
    if wanted == now:
        return ""
    words = f"of {wanted} replicas of boxes {now} are made now, for which there is room"
    return words if short is None else f"{words}; {short.words}"
