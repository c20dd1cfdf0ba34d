"""What follows from a tiling: boxes, hops, schedule, predicted cost.

In: topology, workload, tiles. Out: the Plan. Nothing is chosen here but the in-flight bounds of tilings whose
micro-batches do not line up.

    make_plan(topology, workload, tiles, reason)
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from elaswave_fx.plan.box import Box, Span
from elaswave_fx.plan.copies import choose_holders, deal_boxes, kept_elements
from elaswave_fx.plan.cost import GRADIENT_BYTES, Workload, value_samples
from elaswave_fx.plan.frequency import with_clocks
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
from elaswave_fx.plan.tiling import Tile, Tiling
from elaswave_fx.plan.topology import Rank, Topology

EXTRA_IN_FLIGHT = (0, 1, 2, 4)
"""Micro-batches added to the first bounds of tilings that do not line up; the fastest that fits is taken."""

Pair = tuple[Rank, Rank]
"""(who sends, to whom)."""

WORTHWHILE = 0.99
"""A wider bound must bring the pipeline below this fraction of the time of a narrower one."""


def make_plan(
    topology: Topology,
    workload: Workload,
    tiles: Tiling,
    reason: str,
    copies: int = 1,
    boxes: tuple[Box, ...] | None = None,
) -> Plan:
    """The plan of a tiling; PlanError if its schedule cannot run to the end.

    Boxes are dealt and get `copies` holders each, unless `boxes` are given: those are taken as they are.
    """
    hops = find_hops(workload, tiles)
    if boxes is None:
        ranks = [tile.rank for tile in tiles]
        boxes = choose_holders(topology, deal_boxes(workload, tiles), ranks, copies)
    kept = kept_elements(boxes)
    work = step_work(workload, topology, tiles, hops)
    schedule, pipeline_s = _choose_schedule(topology, workload, tiles, hops, work, kept)
    phases = _exchange_bytes(workload, boxes)
    reduced, copied, gathered = (_of_senders(phase) for phase in phases)
    sent, received = _hop_bytes(workload, hops)
    costs = {}
    for tile in tiles:
        rank, in_flight = tile.rank, most_in_flight(schedule[tile.rank])
        costs[rank] = RankCost(
            busy_s=sum(work.seconds[rank, kind, mb] for kind, mb in schedule[rank]),
            in_flight=in_flight,
            memory_bytes=_memory_bytes(workload, tile, in_flight, kept),
            sent_bytes=sent[rank],
            received_bytes=received[rank],
            reduced_bytes=reduced[rank],
            copied_bytes=copied[rank],
            gathered_bytes=gathered[rank],
        )
    predicted = Predicted(pipeline_s, _exchange_s(topology, phases), costs)
    plan = Plan(topology, workload, tiles, boxes, hops, schedule, predicted, reason)
    return plan if topology.power is None else with_clocks(plan, work)


def find_hops(workload: Workload, tiles: Sequence[Tile]) -> tuple[Hop, ...]:
    """The pieces of all values that travel between tiles, sorted.

    The sample axis is split at all borders of the micro-batches involved; in each interval the ranks of the value's
    users in unit order are a chain, whose links are the pieces. Neighbouring pieces between the same micro-batches
    join. A value without a sample axis goes once to each receiving micro-batch.
    """
    by_sample = sorted(tiles, key=lambda t: t.samples.lo)
    holders = [tuple(t.rank for t in by_sample if unit in t.units) for unit in range(len(workload.units))]
    by_rank = {tile.rank: tile for tile in tiles}
    # Many values have users on the same ranks: their pieces differ by the value only. Neighbouring users on the same
    # ranks exchange nothing.
    known: dict[tuple[tuple[Rank, ...], ...], list[Hop]] = {}
    hops: list[Hop] = []
    for index, value in enumerate(workload.values):
        stages = tuple(ranks for ranks, _ in itertools.groupby(holders[u] for u in (value.producer, *value.consumers)))
        if stages not in known:
            known[stages] = _value_hops(index, [[by_rank[r] for r in ranks] for ranks in stages])
        found = known[stages] if value.sample_axis is not None else _once_each(known[stages])
        hops += [h if h.value == index else replace(h, value=index) for h in found]
    return tuple(sorted(hops, key=_place))


def _place(hop: Hop) -> tuple[int, ...]:
    """The order of fields, compared without building a tuple for each comparison."""
    samples = hop.samples
    return hop.value, hop.source, hop.source_micro_batch, hop.target, hop.target_micro_batch, samples.lo, samples.hi


def _value_hops(index: int, holders: Sequence[Sequence[Tile]]) -> list[Hop]:
    if len(holders) == 1:
        return []
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
    return bisect_right(tile.micro_batches, sample, key=lambda m: m.lo) - 1


def _once_each(hops: Sequence[Hop]) -> list[Hop]:
    """The first hop into each receiving micro-batch."""
    first: dict[tuple[Rank, int], Hop] = {}
    for hop in sorted(hops, key=lambda h: h.samples.lo):
        first.setdefault((hop.target, hop.target_micro_batch), hop)
    return list(first.values())


def _choose_schedule(
    topology: Topology, workload: Workload, tiles: Tiling, hops: Sequence[Hop], work: Work, kept: Mapping[Rank, int]
) -> tuple[Schedule, float]:
    """The 1F1B order where micro-batches line up; else the fastest that fits of a few widths of the bounds."""
    best: tuple[Schedule, float] | None = None
    for extra in EXTRA_IN_FLIGHT[: 1 if work.lined_up else None]:
        schedule = find_schedule(work, first_bounds(tiles, hops, extra))
        seconds = makespan_s(work, schedule, topology)
        fits = all(
            (limit := topology.member(t.rank).memory_bytes) is None
            or _memory_bytes(workload, t, most_in_flight(schedule[t.rank]), kept) <= limit
            for t in tiles
        )
        if best is None or (fits and seconds < WORTHWHILE * best[1]):
            best = (schedule, seconds)
    assert best is not None
    return best


def _memory_bytes(workload: Workload, tile: Tile, in_flight: int, kept: Mapping[Rank, int]) -> int:
    largest = max(len(m) for m in tile.micro_batches)
    return tile_memory(workload, tile.units, largest, in_flight, kept.get(tile.rank, 0)).total


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


def _exchange_bytes(workload: Workload, boxes: Sequence[Box]) -> tuple[Counter[Pair], Counter[Pair], Counter[Pair]]:
    """Bytes from rank to rank in a step: gradients to owners, records to holders, updated parameters to readers.

    Readers that hold the box make its parameters from their copy; with copies.mode=state, which is there to compare
    with, they do not, and copies are the whole state.
    """
    reduced: Counter[Pair] = Counter()
    copied: Counter[Pair] = Counter()
    gathered: Counter[Pair] = Counter()
    for box in boxes:
        own, owner = len(box.span), box.owner
        for rank in set(box.readers) - {owner}:
            reduced[rank, owner] += workload.sum_bytes * own
        for rank in box.holders:
            copied[owner, rank] += GRADIENT_BYTES * own
        for rank in set(box.readers) - box.local_materializers:
            gathered[owner, rank] += workload.work_bytes_per_element * own
    return reduced, copied, gathered


def _of_senders(sent: Mapping[Pair, int]) -> Counter[Rank]:
    totals: Counter[Rank] = Counter()
    for (source, _), size in sent.items():
        totals[source] += size
    return totals


def _exchange_s(topology: Topology, phases: Sequence[Mapping[Pair, int]]) -> float:
    """Seconds of the rank that takes longest to send, one message after another, and waits for each phase's last."""
    spent: dict[Rank, float] = defaultdict(float)
    for phase in phases:
        latest: dict[Rank, float] = {}
        for (source, target), size in phase.items():
            link = topology.link(source, target)
            spent[source] += size / link.bytes_per_s
            latest[source] = max(latest.get(source, 0.0), link.latency_s)
        for source, latency_s in latest.items():
            spent[source] += latency_s
    return max(spent.values(), default=0.0)
