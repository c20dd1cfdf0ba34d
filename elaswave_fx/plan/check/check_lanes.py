"""Tiles and hops derived from lanes by the definition of the work plane.

Part of the independent checker: the results of the planner and of the lowering are compared with these. In: a plan's
lanes, topology and workload. Out: tiles, and the hops between them.

    lane_tiles(plan)             ->  Tile(rank 0, units [0, 2), micro-batches [0, 2) [2, 4)), …
    due_hops(workload, tiles)    ->  Hop(value 1, source 0, source_micro_batch 0, target 1, …), …
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from elaswave_fx.plan.order.hops import Hop
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Rank


def samples_of_step(plan: Plan) -> int:
    """The width of the plane: the batch without the samples at its end that a step skips."""
    return plan.workload.options.global_batch - plan.workload.skipped


def lane_tiles(plan: Plan) -> list[Tile]:
    """A tile for every place of a lane, then an empty tile for each laneless member that has a tile in the plan."""
    found = []
    for lane in plan.lanes:
        for stage in lane.stages:
            units, dealt = Runs((stage.units,) if stage.units else ()), 0
            for rank, count in zip(stage.ranks, stage.deal, strict=True):
                found.append(Tile(rank, units, lane.micro_batches[dealt : dealt + count]))
                dealt += count
    working, named = {tile.rank for tile in found}, {tile.rank for tile in plan.tiles}
    idle = [m.rank for m in plan.topology.members if m.rank in named - working]
    return found + [Tile(rank, Runs(), ()) for rank in idle]


def due_hops(workload: Workload, tiles: Sequence[Tile]) -> Iterator[Hop]:
    """The hop of every value that a tile reads and does not make. The source is the value's last user before the tile,
    at the micro-batch of the same samples."""
    holders: dict[Span, list[tuple[Tile, int]]] = defaultdict(list)
    for tile in tiles:
        for number, samples in enumerate(tile.micro_batches):
            holders[samples].append((tile, number))
    for tile in tiles:
        first = next(iter(tile.units), 0)
        for index, value in enumerate(workload.values):
            before = [u for u in (value.producer, *value.consumers) if u < first]
            if not before or not any(unit in tile.units for unit in value.consumers):
                continue
            for number, samples in enumerate(tile.micro_batches):
                for other, others_number in holders[samples]:
                    if before[-1] in other.units:
                        yield Hop(index, other.rank, others_number, tile.rank, number, samples)


Way = dict[tuple[int, Rank, int], tuple[Rank, int]]
"""(value, rank, its micro-batch) -> (the other rank, its micro-batch)."""


def ways(hops: Sequence[Hop]) -> tuple[Way, Way]:
    """Source and target of every micro-batch's values; gradients take the same ways back."""
    sources = {(h.value, h.target, h.target_micro_batch): (h.source, h.source_micro_batch) for h in hops}
    targets = {(h.value, h.source, h.source_micro_batch): (h.target, h.target_micro_batch) for h in hops}
    return sources, targets
