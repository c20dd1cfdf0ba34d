"""The difference between two plans: changed tiles, boxes with new owners, replicas and parameters to transfer.

In: the previous plan and the next plan. Out: a `Transition`, a plain value for events and for people. Pure; the worker
reads the plans themselves.

    Transition.of(plan, replan(plan, (0, 2, 3), replicas, 1)).lines()
    ("epoch 0 -> 1: lost rank 1", "rank 3 computes units 4-7 x samples 0-23 (before: units 4-7 x samples 12-23)", ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.cost import GRADIENT_BYTES
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Epoch, Rank
from elaswave_fx.words import listed, number_ranges, rank_words, size_text

Link = tuple[Rank, Rank]
"""Two ranks that exchange anything, the lower one first."""


class Handover(NamedTuple):
    """A box with a new owner; `before` may have failed."""

    box: BoxId
    before: Rank
    after: Rank


class ReplicaTransfer(NamedTuple):
    """A state transfer from the owner `source` to the replica holder `target`."""

    box: BoxId
    source: Rank
    target: Rank
    size_bytes: int


@dataclass(frozen=True)
class Transition:
    """The difference of two plans of one job.

    `lost` have failed, `left` were drained. `tiles`: rank -> (tile before, tile after) where they differ, None for no
    tile. `gained` and `dropped`: units by rank, of ranks in both plans. `parameters`: bucket index -> ranks that read
    it for the first time and receive it. `links`: all that the new plan needs; `opened`: those that the old one did
    not.
    """

    epochs: tuple[Epoch, Epoch]
    lost: tuple[Rank, ...]
    left: tuple[Rank, ...]
    joined: tuple[Rank, ...]
    tiles: Mapping[Rank, tuple[Tile | None, Tile | None]]
    gained: Mapping[Rank, tuple[int, ...]]
    dropped: Mapping[Rank, tuple[int, ...]]
    handovers: tuple[Handover, ...]
    transfers: tuple[ReplicaTransfer, ...]
    parameters: Mapping[int, tuple[Rank, ...]]
    parameter_bytes: int
    links: tuple[Link, ...]
    opened: tuple[Link, ...]

    @staticmethod
    def of(old: Plan, new: Plan) -> Transition:
        """The transition from `old` to `new`, which have the same boxes."""
        before, after = ({t.rank: t for t in plan.tiles} for plan in (old, new))
        tiles = {r: (before.get(r), after.get(r)) for r in sorted({*before, *after}) if before.get(r) != after.get(r)}
        parameters = _new_readers(old, new)
        links, known = _links(new), _links(old)
        return Transition(
            epochs=(old.epoch, new.epoch),
            lost=tuple(r for r in before if r not in after and r not in old.topology.leaving),
            left=tuple(r for r in before if r not in after and r in old.topology.leaving),
            joined=tuple(r for r in after if r not in before),
            tiles=tiles,
            gained=_units_without(after, before, after),
            dropped=_units_without(before, after, after),
            handovers=tuple(
                Handover(box_id, a.owner, b.owner)
                for (box_id, a), b in zip(numbered(old.boxes), new.boxes, strict=True)
                if a.owner != b.owner
            ),
            transfers=_replica_transfers(new),
            parameters=parameters,
            parameter_bytes=_parameter_bytes(new, parameters),
            links=tuple(sorted(links)),
            opened=tuple(sorted(links - known)),
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes of states of new replicas and of working parameters of new readers."""
        return sum(task.size_bytes for task in self.transfers) + self.parameter_bytes

    def lines(self) -> tuple[str, ...]:
        """The transition in words, a line per kind and rank; stable."""
        return (self._head(), *self._tile_lines(), *self._box_lines(), *self._link_lines())

    def _head(self) -> str:
        changes = (("lost", self.lost), ("left by", self.left), ("joined by", self.joined))
        words = [f"{what} {rank_words(ranks)}" for what, ranks in changes if ranks]
        return f"epoch {self.epochs[0]} -> {self.epochs[1]}: {', '.join(words) or 'the same ranks'}"

    def _tile_lines(self) -> Iterator[str]:
        for rank, (before, after) in self.tiles.items():
            if after is not None:
                yield f"rank {rank} computes {_place(after)} (before: {_place(before)})"

    def _box_lines(self) -> Iterator[str]:
        handed: dict[tuple[Rank, Rank], list[int]] = {}
        for box, source, target in self.handovers:
            handed.setdefault((source, target), []).append(box)
        for (source, target), numbers in sorted(handed.items()):
            yield f"{_boxes(numbers, 'goes', 'go')} from rank {source} to rank {target}, which has a copy"
        tasks: dict[tuple[Rank, Rank], list[ReplicaTransfer]] = {}
        for task in self.transfers:
            tasks.setdefault((task.source, task.target), []).append(task)
        for (source, target), found in sorted(tasks.items()):
            size = size_text(sum(task.size_bytes for task in found))
            yield f"{_boxes([t.box for t in found], 'is', 'are')} copied from rank {source} to rank {target}, {size}"
        if self.parameters:
            readers = sorted({rank for ranks in self.parameters.values() for rank in ranks})
            size = size_text(self.parameter_bytes)
            count = len(self.parameters)
            yield f"parameters of {count} bucket{'s' if count > 1 else ''} are new to {rank_words(readers)}, {size}"

    def _link_lines(self) -> Iterator[str]:
        if self.opened:
            pairs = ", ".join(f"{a}-{b}" for a, b in self.opened)
            yield f"ranks that exchange something for the first time: {pairs}"


def _units_without(
    these: Mapping[Rank, Tile], those: Mapping[Rank, Tile], ranks: Mapping[Rank, Tile]
) -> dict[Rank, tuple[int, ...]]:
    """Units of each rank's tile in `these` that are not in its tile in `those`; ranks without any are left out."""
    found = {}
    for rank in ranks:
        other = those[rank].units if rank in those else ()
        units = tuple(unit for unit in these[rank].units if unit not in other) if rank in these else ()
        if units:
            found[rank] = units
    return found


def _replica_transfers(plan: Plan) -> tuple[ReplicaTransfer, ...]:
    """State transfers of syncing replicas. Records need none: the next step makes one for owner and replica holder
    alike."""
    base_bytes = plan.workload.state_bytes_per_element - GRADIENT_BYTES
    return tuple(
        ReplicaTransfer(box_id, box.owner, target, base_bytes * len(box.span))
        for box_id, box in numbered(plan.boxes)
        for target in box.catching_up
    )


def _new_readers(old: Plan, new: Plan) -> dict[int, tuple[Rank, ...]]:
    """New readers by bucket, without those that make its parameters from a complete replica."""
    made: dict[int, set[Rank]] = {}
    for box in new.boxes:
        made[box.bucket] = made.get(box.bucket, set(box.local_materializers)) & box.local_materializers
    found = {}
    for index, bucket in enumerate(new.workload.buckets):
        known = {*old.groups[bucket.name], *made.get(index, ())}
        ranks = tuple(r for r in new.groups[bucket.name] if r not in known)
        if ranks:
            found[index] = ranks
    return found


def _parameter_bytes(plan: Plan, parameters: Mapping[int, tuple[Rank, ...]]) -> int:
    """Bytes that owners send to new readers, without what the readers own."""
    return sum(
        plan.workload.buckets[box.bucket].element_bytes * len(box.span)
        for box in plan.boxes
        for rank in parameters.get(box.bucket, ())
        if rank != box.owner
    )


def _links(plan: Plan) -> set[Link]:
    """Pairs that exchange pieces of values, gradients and parameters of boxes, or records."""
    pairs = {(hop.source, hop.target) for hop in plan.hops}
    for box in plan.boxes:
        pairs.update((box.owner, rank) for rank in (*box.readers, *box.holders))
    return {(min(a, b), max(a, b)) for a, b in pairs if a != b}


def _place(tile: Tile | None) -> str:
    if tile is None or not tile.units:
        return "nothing"
    samples = ", ".join(str(s.lo) if len(s) == 1 else f"{s.lo}-{s.hi - 1}" for s in tile.spans)
    units = number_ranges(list(tile.units))
    return f"unit{'s' if len(tile.units) > 1 else ''} {units} x sample{'s' if tile.sample_count > 1 else ''} {samples}"


def _boxes(numbers: list[int], one: str, many: str) -> str:
    return f"box {listed(numbers)} {one}" if len(numbers) == 1 else f"boxes {number_ranges(numbers)} {many}"
