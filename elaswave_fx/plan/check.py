"""The independent checker: whether a plan is valid, by definition and not by how it was made.

It shares no code with the planner, the derivation or the scheduler. In: a plan (and, if wanted, the instruction
lists that its ranks will execute; by default those of `step.py`). Out: nothing, or a PlanError that names the first
violation in one line.

    check_plan(plan)
    PlanError: plan 0: unit 3 x samples [4, 8) is covered by no tile; tiles cover the plane exactly once
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import Box, Span
from elaswave_fx.plan.check_steps import run_instructions
from elaswave_fx.plan.plan import Hop, Plan
from elaswave_fx.plan.step import Instruction, eval_program, step_program
from elaswave_fx.plan.tiling import Tile
from elaswave_fx.plan.topology import Rank


def check_plan(plan: Plan) -> None:
    """PlanError with the first violation of a rule of plans, none if the plan is valid."""
    for violation in plan_violations(plan):
        raise PlanError(f"plan {plan.epoch}: {violation}")
    for name, lower in (("training", step_program), ("evaluation", eval_program)):
        check_instructions(plan, {r: lower(plan, r).instructions for r in plan.ranks}, name)


def check_instructions(plan: Plan, lists: Mapping[Rank, Sequence[Instruction]], name: str = "training") -> None:
    """PlanError if the instruction lists of all ranks, executed together, break a rule or do not end."""
    violation = run_instructions(plan, lists, train=name == "training")
    if violation:
        raise PlanError(f"plan {plan.epoch}: {name}: {violation}")


def plan_violations(plan: Plan) -> Iterator[str]:
    """All violations of the plan itself, its instruction lists aside; later ones may follow from earlier ones."""
    yield from _tiles(plan)
    yield from _plane(plan)
    yield from _micro_batches(plan)
    yield from _boxes(plan)
    yield from _hops(plan)
    yield from _schedules(plan)
    yield from _memory(plan)
    yield from _clocks(plan)


def _tiles(plan: Plan) -> Iterator[str]:
    alive = {m.rank for m in plan.topology.members}
    for rank, count in Counter(t.rank for t in plan.tiles).items():
        if count > 1:
            yield f"rank {rank} has {count} tiles; a rank has one"
        if rank not in alive:
            yield f"rank {rank} has a tile but is not alive; ranks of a plan are in its topology"
    for tile in plan.tiles:
        if not tile.units or not tile.samples:
            yield f"rank {tile.rank} has units {tile.units} and samples {tile.samples}; a tile is not empty"
        if tile.units.hi > len(plan.workload.units) or tile.samples.hi > plan.workload.global_batch:
            yield f"rank {tile.rank} has units {tile.units} and samples {tile.samples}; a tile lies in the plane"


def _plane(plan: Plan) -> Iterator[str]:
    whole = Span(0, plan.workload.global_batch)
    for unit in range(len(plan.workload.units)):
        spans = [t.samples for t in plan.tiles if t.units.lo <= unit < t.units.hi]
        for span, count in _cover_faults(whole, spans):
            times = f"{count} tiles" if count else "no tile"
            yield f"unit {unit} x samples {span} is covered by {times}; tiles cover the plane exactly once"


def _cover_faults(whole: Span, spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Parts of `whole` that are not covered exactly once, with the number of times."""
    borders = sorted({whole.lo, whole.hi, *(b for s in spans for b in (s.lo, s.hi) if whole.lo < b < whole.hi)})
    for lo, hi in itertools.pairwise(borders):
        count = sum(s.lo <= lo and hi <= s.hi for s in spans)
        if count != 1:
            yield Span(lo, hi), count


def _micro_batches(plan: Plan) -> Iterator[str]:
    granule = plan.workload.granule
    for tile in plan.tiles:
        position = tile.samples.lo
        for index, piece in enumerate(tile.micro_batches):
            if piece.lo != position or piece.hi <= piece.lo:
                yield (
                    f"micro-batch {index} of rank {tile.rank} is {piece} where {position} comes next; "
                    "micro-batches cover their tile in order"
                )
            if piece.lo % granule or piece.hi % granule:
                yield (
                    f"micro-batch {index} of rank {tile.rank} is {piece}; micro-batches begin and end at granules "
                    f"of {granule}"
                )
            if plan.workload.single_granules and len(piece) != granule:
                yield (
                    f"micro-batch {index} of rank {tile.rank} has {len(piece)} samples; batch-coupled programs and "
                    f"exact sums take one granule of {granule} at a time"
                )
            position = piece.hi
        if position != tile.samples.hi:
            yield (
                f"micro-batches of rank {tile.rank} end at {position}, its tile at {tile.samples.hi}; "
                "micro-batches cover their tile"
            )


def _boxes(plan: Plan) -> Iterator[str]:
    buckets, ranks = plan.workload.buckets, {t.rank for t in plan.tiles}
    spans: dict[int, list[Span]] = {index: [] for index in range(len(buckets))}
    users = [tuple(sorted(t.rank for t in plan.tiles if _runs_any(t, bucket.users))) for bucket in buckets]
    for number, box in enumerate(plan.boxes):
        if box.bucket not in spans:
            yield f"box {number} is of bucket {box.bucket}; there are buckets 0..{len(buckets) - 1}"
            continue
        name, numel = buckets[box.bucket].name, buckets[box.bucket].numel
        if box.span.hi > numel or box.span.lo >= box.span.hi:
            yield f"bucket {name} has the box {box.span} of rank {box.owner} outside of [0, {numel})"
        spans[box.bucket].append(box.span)
        if box.readers != users[box.bucket]:
            yield (
                f"box {box.span} of bucket {name} is read by {box.readers}; users of its bucket run on "
                f"{users[box.bucket]}"
            )
        for fault in _replica_faults(box, ranks):
            yield f"box {box.span} of bucket {name} {fault}"
    for index, found in spans.items():
        name, numel = buckets[index].name, buckets[index].numel
        for span, count in _cover_faults(Span(0, numel), found):
            yield f"bucket {name} has elements {span} in {count} boxes; boxes cover a bucket exactly once"
    order = [(box.bucket, box.span.lo) for box in plan.boxes]
    if order != sorted(order):
        yield "boxes are not in order of bucket and span; a box is known by its place"


def _runs_any(tile: Tile, units: Sequence[int]) -> bool:
    return any(tile.units.lo <= unit < tile.units.hi for unit in units)


def _replica_faults(box: Box, ranks: set[Rank]) -> Iterator[str]:
    """What is wrong with the replica ranks of a box."""
    if box.owner not in ranks:
        yield f"is owned by rank {box.owner}, which has no tile; owners and holders take part in the step"
    for rank in box.holders:
        if rank not in ranks:
            yield f"is held by rank {rank}, which has no tile; owners and holders take part in the step"
    if box.owner in box.holders:
        yield f"is owned and held by rank {box.owner}; a holder is another rank than the owner"
    if len(set(box.holders)) != len(box.holders):
        yield f"is held by {box.holders}; a rank holds a box once"
    odd = sorted(set(box.catching_up) - set(box.holders))
    if odd or len(set(box.catching_up)) != len(box.catching_up):
        yield f"is awaited by {box.catching_up} and held by {box.holders}; those that catch up are holders, each once"


def _hops(plan: Plan) -> Iterator[str]:
    tiles = {t.rank: t for t in plan.tiles}
    incoming: dict[tuple[int, Rank, int], list[Hop]] = {}
    for hop in plan.hops:
        fault = _hop_fault(plan, tiles, hop)
        if fault:
            yield f"hop of value {_name(plan, hop.value)} from rank {hop.source} to rank {hop.target}: {fault}"
        else:
            incoming.setdefault((hop.value, hop.target, hop.target_micro_batch), []).append(hop)
    for index, value in enumerate(plan.workload.values):
        users = (value.producer, *value.consumers)
        for tile in plan.tiles:
            wanted = any(tile.units.lo <= u < tile.units.hi for u in value.consumers)
            if not wanted or tile.units.lo <= value.producer:
                continue
            before = max(u for u in users if u < tile.units.lo)
            for mb, piece in enumerate(tile.micro_batches):
                hops = incoming.get((index, tile.rank, mb), [])
                yield from _delivery_faults(plan, tiles, index, tile, mb, piece, before, hops)


def _hop_fault(plan: Plan, tiles: Mapping[Rank, Tile], hop: Hop) -> str | None:
    """Why the hop makes no sense by itself, None if it does."""
    if not 0 <= hop.value < len(plan.workload.values):
        return f"there are values 0..{len(plan.workload.values) - 1}"
    if hop.source not in tiles or hop.target not in tiles or hop.source == hop.target:
        return "it joins two different ranks that have tiles"
    for rank, mb in ((hop.source, hop.source_micro_batch), (hop.target, hop.target_micro_batch)):
        pieces = tiles[rank].micro_batches
        if not 0 <= mb < len(pieces):
            return f"rank {rank} has no micro-batch {mb}"
        if not (pieces[mb].lo <= hop.samples.lo < hop.samples.hi <= pieces[mb].hi):
            return f"samples {hop.samples} do not lie in micro-batch {mb} of rank {rank}, {pieces[mb]}"
    value, target = plan.workload.values[hop.value], tiles[hop.target]
    if not any(target.units.lo <= u < target.units.hi for u in value.consumers) or target.units.lo <= value.producer:
        return "the target needs no piece of it"
    return None


def _delivery_faults(
    plan: Plan,
    tiles: Mapping[Rank, Tile],
    index: int,
    tile: Tile,
    mb: int,
    piece: Span,
    before: int,
    hops: Sequence[Hop],
) -> Iterator[str]:
    """What is wrong with the pieces that micro-batch `mb` of `tile` receives; `before` is the user before the tile."""
    place = f"value {_name(plan, index)} into micro-batch {mb} of rank {tile.rank}"
    for hop in hops:
        source = tiles[hop.source]
        if not source.units.lo <= before < source.units.hi:
            yield (
                f"{place} comes from rank {hop.source}, which does not run unit {before}; hops join neighbouring users"
            )
    if plan.workload.values[index].sample_axis is None:
        if len(hops) != 1:
            yield f"{place} arrives {len(hops)} times; a value without a sample axis arrives once"
        return
    for span, count in _cover_faults(piece, [h.samples for h in hops]):
        yield f"{place} has samples {span} arriving {count} times; each sample arrives once"


def _schedules(plan: Plan) -> Iterator[str]:
    for tile in plan.tiles:
        order = plan.schedule.get(tile.rank, ())
        want = Counter((kind, mb) for mb in range(len(tile.micro_batches)) for kind in "FB")
        if Counter(order) != want:
            odd = sorted((Counter(order) - want) + (want - Counter(order)))[0]
            yield (
                f"schedule of rank {tile.rank} has {odd[0]}{odd[1]} {Counter(order)[odd]} times; every micro-batch "
                "goes forward once and backward once"
            )
            continue
        running: set[int] = set()
        most = 0
        for kind, mb in order:
            if kind == "F":
                running.add(mb)
                most = max(most, len(running))
            elif mb not in running:
                yield f"schedule of rank {tile.rank} has B{mb} before F{mb}; backward follows forward"
            else:
                running.remove(mb)
        bound = plan.predicted.ranks[tile.rank].in_flight if tile.rank in plan.predicted.ranks else 0
        if most > bound:
            yield f"schedule of rank {tile.rank} holds {most} micro-batches in flight; its bound is {bound}"


def _memory(plan: Plan) -> Iterator[str]:
    work = plan.workload
    limits = {m.rank: m.memory_bytes for m in plan.topology.members}
    for tile in plan.tiles:
        limit = limits.get(tile.rank)
        if limit is None:
            continue
        units = range(tile.units.lo, tile.units.hi)
        largest = max((len(m) for m in tile.micro_batches), default=0)
        in_flight = plan.predicted.ranks[tile.rank].in_flight if tile.rank in plan.predicted.ranks else 0
        kept = [b.span for b in plan.boxes if tile.rank in b.replica_ranks]
        need = sum(work.state_bytes_per_element * (span.hi - span.lo) for span in kept)
        for unit in units:
            need += work.units[unit].param_bytes + in_flight * largest * work.units[unit].saved_bytes
        for bucket in work.buckets:
            if set(bucket.users) & set(units):
                need += 4 * bucket.numel
        for value in work.values:
            if value.producer < tile.units.lo and set(value.consumers) & set(units):
                need += value.bytes_per_sample * (largest if value.sample_axis is not None else 1)
        if need > limit:
            yield f"rank {tile.rank} needs {need} bytes and has {limit}; a tile fits in the memory of its rank"


def _clocks(plan: Plan) -> Iterator[str]:
    power = plan.topology.power
    if power is None:
        if plan.clocks:
            yield f"rank {min(plan.clocks)} has a clock, and no device has operating points"
        return
    for rank in plan.ranks if not plan.terminal_reason else ():
        if plan.clocks.get(rank) not in power.points:
            yield f"rank {rank} has the clock {plan.clocks.get(rank)}; a rank has one of the operating points"
    for rank in sorted(set(plan.clocks) - set(plan.ranks)):
        yield f"rank {rank} has a clock and no tile"
    drawn_w = sum(point.watts for point in plan.clocks.values())
    if power.cap_w is not None and drawn_w > power.cap_w * (1 + 1e-6):
        yield f"all ranks together draw {drawn_w:g} W, and may draw {power.cap_w:g} W"


def _name(plan: Plan, index: int) -> str:
    values = plan.workload.values
    return values[index].name if 0 <= index < len(values) else str(index)
