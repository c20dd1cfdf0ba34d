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
from elaswave_fx.plan.hops import Hop
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.schedule import Action
from elaswave_fx.plan.step import Instruction, eval_program, step_program
from elaswave_fx.plan.tiling import Tile
from elaswave_fx.plan.topology import Rank

MOST_SPANS = 8
"""Of samples that adjoin, in a tile; kMostSpans of native/exec/vote.h."""


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
    yield from _lanes(plan)
    yield from _tiles(plan)
    yield from _plane(plan)
    yield from _micro_batches(plan)
    yield from _boxes(plan)
    yield from _hops(plan)
    yield from _schedules(plan)
    yield from _memory(plan)
    yield from _clocks(plan)


def _lanes(plan: Plan) -> Iterator[str]:
    for number, lane in enumerate(plan.lanes):
        position = 0
        for stage in lane.stages:
            if stage.units.lo != position:
                yield (
                    f"lane {number} has a stage of units {stage.units} where {position} comes next; stages follow each "
                    "other"
                )
            position = stage.units.hi
            if len(stage.ranks) != len(stage.deal) or sum(stage.deal) != len(lane.micro_batches):
                yield (
                    f"lane {number} deals {stage.deal} of its {len(lane.micro_batches)} micro-batches to the ranks "
                    f"{stage.ranks} of units {stage.units}; a stage deals every micro-batch once"
                )
        if position != len(plan.workload.units):
            yield f"lane {number} ends at unit {position} of {len(plan.workload.units)}; a lane has all units"


def _tiles(plan: Plan) -> Iterator[str]:
    alive = {m.rank for m in plan.topology.members}
    for rank, count in Counter(t.rank for t in plan.tiles).items():
        if count > 1:
            yield f"rank {rank} has {count} tiles; a rank has one"
        if rank not in alive:
            yield f"rank {rank} has a tile but is not alive; ranks of a plan are in its topology"
    for tile in plan.tiles:
        samples = _text(tile.micro_batches)
        if bool(tile.units) != any(tile.micro_batches):
            yield f"rank {tile.rank} has units {tile.units} and samples {samples}; a tile has both or nothing"
        elif not tile.units:
            continue
        elif tile.units.hi > len(plan.workload.units) or tile.micro_batches[-1].hi > plan.workload.global_batch:
            yield f"rank {tile.rank} has units {tile.units} and samples {samples}; a tile lies in the plane"
        spans = 1 + sum(a.hi != b.lo for a, b in itertools.pairwise(tile.micro_batches))
        if spans > MOST_SPANS:
            yield f"rank {tile.rank} has {spans} separate spans of samples; a vote has room for {MOST_SPANS}"


def _plane(plan: Plan) -> Iterator[str]:
    whole = Span(0, plan.workload.global_batch)
    for unit in range(len(plan.workload.units)):
        spans = [s for t in plan.tiles if t.units.lo <= unit < t.units.hi for s in t.spans]
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
        position = 0
        for index, piece in enumerate(tile.micro_batches):
            if piece.lo < position or piece.hi <= piece.lo:
                yield (
                    f"micro-batch {index} of rank {tile.rank} is {piece}, after one that ends at {position}; "
                    "micro-batches ascend"
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
            for mb in range(len(tile.micro_batches)):
                hops = incoming.get((index, tile.rank, mb), [])
                yield from _delivery_faults(plan, tiles, index, tile, mb, before, hops)


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
        if pieces[mb] != hop.samples:
            return f"samples {hop.samples} are not those of micro-batch {mb} of rank {rank}, {pieces[mb]}"
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
    if len(hops) != 1:
        yield f"{place} arrives {len(hops)} times; it arrives once"


def _schedules(plan: Plan) -> Iterator[str]:
    for tile in plan.tiles:
        order = plan.schedule.get(tile.rank, ())
        kinds = "FIW" if any(kind in "IW" for kind, _ in order) else "FB"
        want = Counter((kind, mb) for mb in range(len(tile.micro_batches)) for kind in kinds)
        if Counter(order) != want:
            odd = sorted((Counter(order) - want) + (want - Counter(order)))[0]
            yield (
                f"schedule of rank {tile.rank} has {odd[0]}{odd[1]} {Counter(order)[odd]} times; every micro-batch "
                "goes forward once and backward once, whole or in halves"
            )
            continue
        running: set[int] = set()
        halfway: set[int] = set()
        most = most_halfway = 0
        for kind, mb in order:
            if kind == "F":
                running.add(mb)
            elif kind == "W":
                if mb not in halfway:
                    yield f"schedule of rank {tile.rank} has W{mb} before I{mb}; weight halves follow input halves"
                halfway.discard(mb)
            else:
                if mb not in running:
                    yield f"schedule of rank {tile.rank} has {kind}{mb} before F{mb}; backward follows forward"
                running.discard(mb)
                halfway |= {mb} if kind == "I" else set()
            most, most_halfway = max(most, len(running)), max(most_halfway, len(halfway))
        cost = plan.predicted.ranks.get(tile.rank)
        bound, bound_halfway = (cost.in_flight, cost.waiting) if cost else (0, 0)
        if most > bound:
            yield f"schedule of rank {tile.rank} holds {most} micro-batches in flight; its bound is {bound}"
        if most_halfway > bound_halfway:
            yield (
                f"schedule of rank {tile.rank} leaves {most_halfway} micro-batches between the halves of backward; "
                f"its bound is {bound_halfway}"
            )


def _most_kept(order: Sequence[Action], saved: int, held: int) -> int:
    """The most bytes per sample that wait for their backward pass, or for its second half, at once."""
    level = most = 0
    for kind, _ in order:
        level += {"F": saved, "B": -saved, "I": held - saved, "W": -held}[kind]
        most = max(most, level)
    return most


def _memory(plan: Plan) -> Iterator[str]:
    work = plan.workload
    limits = {m.rank: m.memory_bytes for m in plan.topology.members}
    for tile in plan.tiles:
        limit = limits.get(tile.rank)
        if limit is None:
            continue
        units = range(tile.units.lo, tile.units.hi)
        largest = max((len(m) for m in tile.micro_batches), default=0)
        kept = [b.span for b in plan.boxes if tile.rank in b.replica_ranks]
        need = sum(work.state_bytes_per_element * (span.hi - span.lo) for span in kept)
        costs = [work.units[unit] for unit in units]
        need += sum(cost.param_bytes for cost in costs) + largest * _most_kept(
            plan.schedule.get(tile.rank, ()), sum(c.saved_bytes for c in costs), sum(c.held_bytes for c in costs)
        )
        for bucket in work.buckets:
            if set(bucket.users) & set(units):
                need += (8 if work.exact else 4) * bucket.numel
        for value in work.values:
            if value.producer < tile.units.lo and set(value.consumers) & set(units):
                need += value.bytes_per_sample * (largest if value.sample_axis is not None else 1)
        if need > limit:
            yield f"rank {tile.rank} needs {need} bytes and has {limit}; a tile fits in the memory of its rank"


def _text(spans: Sequence[Span]) -> str:
    return " ".join(str(span) for span in spans) or "none"


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
