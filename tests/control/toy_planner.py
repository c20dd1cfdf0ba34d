"""A small planner for jobs whose boxes are numbers, so that a test can say what comes out of it.

In: members and who has which replica. Out: an `Assignment`. A step has BATCH samples.

    first_assignment(4, stages=2)  ->  4 boxes, ranks 0, 2 on stage 0 and 1, 3 on stage 1, each box held on another host
"""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_fx.control.protocol.types import Assignment
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.spans import Runs, Span, consecutive, even_split
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Rank

BATCH = 12
"""Samples of a step."""

RANKS_PER_HOST = 2


def host_of(rank: Rank) -> int:
    """Neighbours share a host; joiners too."""
    return rank // RANKS_PER_HOST


def tile_of(rank: Rank, assignment: Assignment) -> Tile:
    """What a member computes."""
    units = 1 + max(box.bucket for box in assignment.boxes)
    return next(tile for tile in _tiles_of(assignment.members, units) if tile.rank == rank)


def _tiles_of(members: tuple[Rank, ...], units: int) -> tuple[Tile, ...]:
    """One lane: every second member on the second stage, samples split evenly within a stage."""
    stages = min(units, len(members))
    tiles = []
    for stage in range(stages):
        ranks = members[stage::stages]
        span = Span(stage, stage + 1) if stages == units else Span(0, units)
        for rank, samples in zip(ranks, consecutive(even_split(BATCH, len(ranks))), strict=True):
            tiles.append(Tile(rank, Runs.of(span), (samples,)))
    return tuple(sorted(tiles, key=lambda tile: tile.rank))


def first_assignment(world: int, units: int) -> Assignment:
    """The job at its start: one box per rank, everybody can load the seed."""
    members = tuple(Rank(r) for r in range(world))
    boxes = tuple(Box(b % units, Span(b, b + 1), Rank(0)) for b in range(world))
    return replan(members, {box_id: members for box_id, _ in numbered(boxes)}, Assignment(members, boxes, 0))


def replan(members: tuple[Rank, ...], held: Mapping[BoxId, tuple[Rank, ...]], before: Assignment) -> Assignment:
    """Owners among ranks with a replica, evenly; one more replica on another host, in sync while the old ones stay.

    A box's bucket is that of the unit with the same number.
    """
    units = 1 + max(box.bucket for box in before.boxes)
    tiles = _tiles_of(members, units)
    owned = dict.fromkeys(members, 0)
    kept = dict.fromkeys(members, 0)
    boxes = []
    for box_id, box in numbered(before.boxes):
        have = held[box_id]
        owner = min(have, key=lambda r: (owned[r], r != box.owner, kept[r], r))
        owned[owner] += 1
        others = [r for r in members if r != owner]
        wish = min(others, key=lambda r: (host_of(r) == host_of(owner), kept[r], r not in have, r), default=None)
        stay = [r for r in have if r != owner and r != wish][:1] if wish not in have else []
        holders = tuple(r for r in (*stay, wish) if r is not None)
        for rank in (owner, *holders):
            kept[rank] += 1
        readers = tuple(t.rank for t in tiles if box.bucket in t.units)
        catching_up = tuple(r for r in holders if r not in have)
        boxes.append(Box(box.bucket, box.span, owner, holders, catching_up, readers))
    fingerprint = hash((members, *((b.owner, b.holders) for b in boxes)))
    return Assignment(members, tuple(boxes), fingerprint)
