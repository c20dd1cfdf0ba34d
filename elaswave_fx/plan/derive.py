"""What follows from a tiling: layouts, groups, hops, schedule, predicted cost.

In: topology, workload, tiles. Out: the Plan. Nothing is chosen here but the in-flight bounds of tilings whose
micro-batches do not line up.

    make_plan(topology, workload, tiles, reason)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import GRADIENT_BYTES, Bucket, Workload, value_samples
from elaswave_fx.plan.memory import tile_memory
from elaswave_fx.plan.plan import Hop, Plan, Predicted, RankCost
from elaswave_fx.plan.schedule import (
    Schedule,
    Work,
    find_schedule,
    first_bounds,
    makespan_s,
    most_in_flight,
    step_work,
)
from elaswave_fx.plan.tiling import Tile, Tiling, consecutive, even_split
from elaswave_fx.plan.topology import Rank, Topology

Layouts = Mapping[str, tuple[tuple[Rank, Span], ...]]

EXTRA_IN_FLIGHT = (0, 1, 2, 4)
"""Micro-batches added to the first bounds of tilings that do not line up; the fastest that fits is taken."""

WORTHWHILE = 0.99
"""A wider bound must bring the pipeline below this fraction of the time of a narrower one."""


def make_plan(topology: Topology, workload: Workload, tiles: Tiling, reason: str) -> Plan:
    """The plan of a tiling; PlanError if its schedule cannot run to the end."""
    hops = find_hops(workload, tiles)
    layouts = {b.name: bucket_layout(b, tiles) for b in workload.buckets}
    groups = {b.name: bucket_group(b, tiles) for b in workload.buckets}
    work = step_work(workload, topology, tiles, hops)
    schedule, pipeline_s = _choose_schedule(topology, workload, tiles, hops, work, layouts)
    exchange = {tile.rank: _exchange_bytes(workload, tile.rank, layouts, groups) for tile in tiles}
    sent, received = _hop_bytes(workload, hops)
    costs = {}
    for tile in tiles:
        in_flight = most_in_flight(schedule[tile.rank])
        reduced, gathered = exchange[tile.rank]
        costs[tile.rank] = RankCost(
            busy_s=sum(work.seconds[tile.rank, kind, mb] for kind, mb in schedule[tile.rank]),
            in_flight=in_flight,
            memory_bytes=_memory_bytes(workload, tile, in_flight, layouts),
            sent_bytes=sent[tile.rank],
            received_bytes=received[tile.rank],
            reduced_bytes=reduced,
            gathered_bytes=gathered,
        )
    exchange_s = max(sum(pair) for pair in exchange.values()) / topology.link_bytes_per_s
    predicted = Predicted(pipeline_s, exchange_s, costs)
    return Plan(topology, workload, tiles, layouts, groups, hops, schedule, predicted, reason)


def bucket_group(bucket: Bucket, tiles: Sequence[Tile]) -> tuple[Rank, ...]:
    """The ranks whose tiles contain any user of the bucket, ascending."""
    return tuple(sorted(t.rank for t in tiles if any(user in t.units for user in bucket.users)))


def bucket_layout(bucket: Bucket, tiles: Sequence[Tile]) -> tuple[tuple[Rank, Span], ...]:
    """Owned spans of the bucket's elements: an even split over the ranks of its first user; empty spans left out."""
    owners = sorted(t.rank for t in tiles if bucket.users[0] in t.units)
    spans = consecutive(even_split(bucket.numel, len(owners)))
    return tuple((rank, span) for rank, span in zip(owners, spans, strict=True) if span)


def find_hops(workload: Workload, tiles: Sequence[Tile]) -> tuple[Hop, ...]:
    """The pieces of all values that travel between tiles, sorted.

    The sample axis is split at all borders of the micro-batches involved; in each interval the ranks of the value's
    users in unit order are a chain, whose links are the pieces. Neighbouring pieces between the same micro-batches
    join. A value without a sample axis goes once to each receiving micro-batch.
    """
    holders = [
        sorted((t for t in tiles if unit in t.units), key=lambda t: t.samples.lo) for unit in range(len(workload.units))
    ]
    hops: list[Hop] = []
    for index, value in enumerate(workload.values):
        users = (value.producer, *value.consumers)
        found = _value_hops(index, [holders[unit] for unit in users])
        hops += found if value.sample_axis is not None else _once_each(found)
    return tuple(sorted(hops))


def _value_hops(index: int, holders: Sequence[Sequence[Tile]]) -> list[Hop]:
    borders = sorted({b for tiles in holders for t in tiles for m in t.micro_batches for b in (m.lo, m.hi)})
    hops: list[Hop] = []
    open_hops: dict[tuple[Rank, Rank], Hop] = {}
    for lo, hi in itertools.pairwise(borders):
        chain: list[tuple[Rank, int]] = []
        for tiles in holders:
            for tile in tiles:
                if tile.samples.lo <= lo < tile.samples.hi:
                    place = (tile.rank, _micro_batch_at(tile, lo))
                    if not chain or chain[-1] != place:
                        chain.append(place)
        still_open = {}
        for (source, source_mb), (target, target_mb) in itertools.pairwise(chain):
            hop = Hop(index, source, source_mb, target, target_mb, Span(lo, hi))
            before = open_hops.get((source, target))
            if before and (before.source_micro_batch, before.target_micro_batch) == (source_mb, target_mb):
                hop = Hop(index, source, source_mb, target, target_mb, Span(before.samples.lo, hi))
            elif before:
                hops.append(before)
            still_open[source, target] = hop
        hops += [hop for key, hop in open_hops.items() if key not in still_open]
        open_hops = still_open
    return hops + list(open_hops.values())


def _micro_batch_at(tile: Tile, sample: int) -> int:
    return next(i for i, m in enumerate(tile.micro_batches) if m.lo <= sample < m.hi)


def _once_each(hops: Sequence[Hop]) -> list[Hop]:
    """The first hop into each receiving micro-batch."""
    first: dict[tuple[Rank, int], Hop] = {}
    for hop in sorted(hops, key=lambda h: h.samples.lo):
        first.setdefault((hop.target, hop.target_micro_batch), hop)
    return list(first.values())


def _choose_schedule(
    topology: Topology, workload: Workload, tiles: Tiling, hops: Sequence[Hop], work: Work, layouts: Layouts
) -> tuple[Schedule, float]:
    """The 1F1B order where micro-batches line up; else the fastest that fits of a few widths of the bounds."""
    best: tuple[Schedule, float] | None = None
    for extra in EXTRA_IN_FLIGHT[: 1 if work.lined_up else None]:
        schedule = find_schedule(work, first_bounds(tiles, hops, extra))
        seconds = makespan_s(work, schedule, topology.link_bytes_per_s)
        fits = all(
            (limit := topology.member(t.rank).memory_bytes) is None
            or _memory_bytes(workload, t, most_in_flight(schedule[t.rank]), layouts) <= limit
            for t in tiles
        )
        if best is None or (fits and seconds < WORTHWHILE * best[1]):
            best = (schedule, seconds)
    assert best is not None
    return best


def _memory_bytes(workload: Workload, tile: Tile, in_flight: int, layouts: Layouts) -> int:
    owned = sum(len(span) for parts in layouts.values() for rank, span in parts if rank == tile.rank)
    largest = max(len(m) for m in tile.micro_batches)
    return tile_memory(workload, tile.units, largest, in_flight, owned).total


def _hop_bytes(workload: Workload, hops: Sequence[Hop]) -> tuple[Counter[Rank], Counter[Rank]]:
    """Bytes of values and gradients that each rank sends and receives in a step."""
    sent: Counter[Rank] = Counter()
    received: Counter[Rank] = Counter()
    for hop in hops:
        value = workload.values[hop.value]
        size = value.bytes_per_sample * value_samples(value, len(hop.samples))
        back = size if value.has_grad else 0
        sent[hop.source] += size
        received[hop.target] += size
        sent[hop.target] += back
        received[hop.source] += back
    return sent, received


def _exchange_bytes(
    workload: Workload, rank: Rank, layouts: Layouts, groups: Mapping[str, tuple[Rank, ...]]
) -> tuple[int, int]:
    """Bytes the rank sends in a step to reduce gradients to their owners and to gather updated parameters."""
    reduced = gathered = 0
    for bucket in workload.buckets:
        group = groups[bucket.name]
        if rank in group:
            own = sum(len(span) for owner, span in layouts[bucket.name] if owner == rank)
            reduced += GRADIENT_BYTES * (bucket.numel - own)
            gathered += workload.work_bytes_per_element * own * (len(group) - 1)
    return reduced, gathered
