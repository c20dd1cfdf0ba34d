"""What follows from a tiling: boxes, hops, schedule, predicted cost.

In: topology, workload, tiles. Out: the Plan. Nothing is chosen here but the order of work: whole backward passes or
halves, and the in-flight bounds of tilings whose micro-batches do not line up.

    make_plan(topology, workload, tiles, reason)
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_fx.plan.box import Box, Span
from elaswave_fx.plan.copies import choose_holders, deal_boxes, kept_elements
from elaswave_fx.plan.cost import GRADIENT_BYTES, Workload, value_samples
from elaswave_fx.plan.memory import tile_memory
from elaswave_fx.plan.plan import Action, Hop, Plan, Predicted, RankCost
from elaswave_fx.plan.schedule import (
    Schedule,
    Work,
    find_schedule,
    first_bounds,
    levels,
    makespan_s,
    most_in_flight,
    step_work,
)
from elaswave_fx.plan.split_schedule import Room, shortest_s, split_schedules
from elaswave_fx.plan.tiling import Tile, Tiling
from elaswave_fx.plan.topology import Rank, Topology

EXTRA_IN_FLIGHT = (0, 1, 2, 4)
"""Micro-batches added to the first bounds of tilings that do not line up; the fastest that fits is taken."""

WORTHWHILE = 0.99
"""What takes more memory, or more programs, must bring the pipeline below this fraction of the time without."""


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
    chosen = _choose_schedule(topology, workload, tiles, hops, kept)
    schedule = chosen.schedule
    reduced, copied, gathered = _exchange_bytes(workload, boxes)
    sent, received = _hop_bytes(workload, hops)
    costs = {}
    for tile in tiles:
        rank, order = tile.rank, schedule[tile.rank]
        costs[rank] = RankCost(
            busy_s=sum(chosen.work.seconds[rank, kind, mb] for kind, mb in order),
            in_flight=most_in_flight(order),
            waiting=max((waiting for _, waiting in levels(order)), default=0),
            memory_bytes=_memory_bytes(workload, tile, order, kept),
            sent_bytes=sent[rank],
            received_bytes=received[rank],
            reduced_bytes=reduced[rank],
            copied_bytes=copied[rank],
            gathered_bytes=gathered[rank],
        )
    exchanged = max(c.reduced_bytes + c.copied_bytes + c.gathered_bytes for c in costs.values())
    predicted = Predicted(chosen.seconds, exchanged / topology.link_bytes_per_s, costs)
    because = "; ".join(part for part in (reason, chosen.because) if part)
    return Plan(topology, workload, tiles, boxes, hops, schedule, predicted, because)


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


@dataclass(frozen=True)
class _Chosen:
    """Orders of the tasks of `work`, how long they take, whether they fit; what `because` says they beat."""

    work: Work
    schedule: Schedule
    seconds: float
    fits: bool
    because: str = ""


def _choose_schedule(
    topology: Topology, workload: Workload, tiles: Tiling, hops: Sequence[Hop], kept: Mapping[Rank, int]
) -> _Chosen:
    """As `parallel.schedule` asks: with whole backward passes, in halves, or the faster that fits."""
    whole = _one_f_one_b(topology, workload, tiles, hops, kept)
    if workload.schedule == "1f1b":
        return whole
    split = _split(topology, workload, tiles, hops, kept, whole)
    if split is None:
        return replace(whole, because="1f1b: no schedule of the split kind runs to its end")
    times = f"{split.seconds * 1e3:.3g} ms against {whole.seconds * 1e3:.3g} ms with 1f1b"
    if workload.schedule == "split":
        return replace(split, because=f"split backward (parallel.schedule=split): {times}")
    if not split.fits:
        return replace(whole, because="1f1b: the split backward does not fit in memory")
    if split.seconds < WORTHWHILE * whole.seconds or not whole.fits:
        return replace(split, because=f"split backward: {times}")
    return replace(whole, because=f"1f1b: {whole.seconds * 1e3:.3g} ms, which the split backward does not shorten")


def _one_f_one_b(
    topology: Topology, workload: Workload, tiles: Tiling, hops: Sequence[Hop], kept: Mapping[Rank, int]
) -> _Chosen:
    """The 1F1B order where micro-batches line up; else the fastest that fits of a few widths of the bounds."""
    work = step_work(workload, topology, tiles, hops)
    best: _Chosen | None = None
    for extra in EXTRA_IN_FLIGHT[: 1 if work.lined_up else None]:
        found = _weigh(topology, workload, tiles, kept, work, find_schedule(work, first_bounds(tiles, hops, extra)))
        if best is None or (found.fits and found.seconds < WORTHWHILE * best.seconds):
            best = found
    assert best is not None
    return best


def _split(
    topology: Topology,
    workload: Workload,
    tiles: Tiling,
    hops: Sequence[Hop],
    kept: Mapping[Rank, int],
    whole: _Chosen,
) -> _Chosen | None:
    """The fastest that fits of the schedules of the split kind, or the leanest; None if there is none.

    `whole`: the same step with whole backward passes.
    """
    work = step_work(workload, topology, tiles, hops, split=True)
    bounds = {rank: most_in_flight(order) for rank, order in whole.schedule.items()}
    rooms = {tile.rank: _room(topology, workload, tile, kept) for tile in tiles}
    best: _Chosen | None = None
    least_s = shortest_s(work)
    for schedule in split_schedules(work, whole.schedule, bounds, rooms, topology.link_bytes_per_s):
        found = _weigh(topology, workload, tiles, kept, work, schedule)
        if best is None or (found.fits and (not best.fits or found.seconds < WORTHWHILE * best.seconds)):
            best = found
        if best.fits and WORTHWHILE * best.seconds <= least_s:
            break
    return best


def _room(topology: Topology, workload: Workload, tile: Tile, kept: Mapping[Rank, int]) -> Room:
    largest = max(len(m) for m in tile.micro_batches)
    costs = workload.units[tile.units.lo : tile.units.hi]
    limit = topology.member(tile.rank).memory_bytes
    return Room(
        saved=largest * sum(u.saved_bytes for u in costs),
        held=largest * sum(u.held_bytes for u in costs),
        bytes=None if limit is None else limit - _memory_bytes(workload, tile, (), kept),
    )


def _weigh(
    topology: Topology, workload: Workload, tiles: Tiling, kept: Mapping[Rank, int], work: Work, schedule: Schedule
) -> _Chosen:
    fits = all(
        (limit := topology.member(t.rank).memory_bytes) is None
        or _memory_bytes(workload, t, schedule[t.rank], kept) <= limit
        for t in tiles
    )
    return _Chosen(work, schedule, makespan_s(work, schedule, topology.link_bytes_per_s), fits)


def _memory_bytes(workload: Workload, tile: Tile, order: Sequence[Action], kept: Mapping[Rank, int]) -> int:
    """Of a rank whose activations are kept as its order says."""
    largest = max(len(m) for m in tile.micro_batches)
    costs = workload.units[tile.units.lo : tile.units.hi]
    saved, held = sum(u.saved_bytes for u in costs), sum(u.held_bytes for u in costs)
    in_flight, waiting = max(levels(order), key=lambda level: level[0] * saved + level[1] * held, default=(0, 0))
    return tile_memory(workload, tile.units, largest, in_flight, kept.get(tile.rank, 0), waiting).total


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


def _exchange_bytes(workload: Workload, boxes: Sequence[Box]) -> tuple[Counter[Rank], Counter[Rank], Counter[Rank]]:
    """Bytes each rank sends in a step: gradients to owners, records to holders, updated parameters to readers.

    Readers that hold the box make its parameters from their copy; with copies.mode=state, which is there to compare
    with, they do not, and copies are the whole state.
    """
    reduced: Counter[Rank] = Counter()
    copied: Counter[Rank] = Counter()
    gathered: Counter[Rank] = Counter()
    for box in boxes:
        own = len(box.span)
        for rank in set(box.readers) - {box.owner}:
            reduced[rank] += workload.sum_bytes * own
        copied[box.owner] += GRADIENT_BYTES * own * len(box.holders)
        takers = set(box.readers) - box.local_materializers
        gathered[box.owner] += workload.work_bytes_per_element * own * len(takers)
    return reduced, copied, gathered
