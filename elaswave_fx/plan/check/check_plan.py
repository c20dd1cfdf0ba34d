"""The independent checker: whether a plan is valid by definition, however it was made.

It takes only types from the planner, the derivation and the scheduler, no code. Tiles and hops are derived again
(`check_lanes.py`) and compared with the plan and with the instructions of its ranks. In: a plan, and optionally the
instruction lists of its ranks (default: those of `step.py`). Out: nothing, or a PlanError that names the first
violation in one line.

    check_plan(plan)
    PlanError: plan 0: unit 3 x samples [4, 8) is covered by no tile; tiles cover the plane exactly once
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_lanes import due_hops, lane_tiles, samples_of_step
from elaswave_fx.plan.check.check_steps import run_instructions
from elaswave_fx.plan.lower.step import Instruction, eval_program, step_program
from elaswave_fx.plan.order.hops import Hop
from elaswave_fx.plan.order.schedule import Action
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Tile
from elaswave_fx.plan.work.topology import Rank


def check_plan(plan: Plan) -> None:
    """Raise PlanError with the first violation of a rule of plans."""
    for violation in plan_violations(plan):
        raise PlanError(f"plan {plan.topology.epoch}: {violation}")
    if plan.terminal_reason:
        return
    ranks = sorted(tile.rank for tile in lane_tiles(plan))
    for name, lower in (("training", step_program), ("evaluation", eval_program)):
        check_instructions(plan, {r: lower(plan, r).instructions for r in ranks}, name)


def check_instructions(plan: Plan, lists: Mapping[Rank, Sequence[Instruction]], name: str = "training") -> None:
    """Raise PlanError if the instruction lists of all ranks, executed together, break a rule or do not end."""
    violation = run_instructions(plan, lists, train=name == "training")
    if violation:
        raise PlanError(f"plan {plan.topology.epoch}: {name}: {violation}")


def plan_violations(plan: Plan) -> Iterator[str]:
    """All violations of the plan itself, its instruction lists aside; later ones may follow from earlier ones."""
    tiles = lane_tiles(plan)
    yield from _lanes(plan)
    yield from _tiles(plan, tiles)
    yield from _plane(plan, tiles)
    yield from _micro_batches(plan, tiles)
    yield from _derived_tiles(plan, tiles)
    yield from _boxes(plan, tiles)
    yield from _leaving(plan)
    yield from _hops(plan, tiles)
    yield from _schedules(plan, tiles)
    yield from _memory(plan, tiles)
    yield from _clocks(plan, tiles)
    yield from _target(plan)


def _lanes(plan: Plan) -> Iterator[str]:
    if plan.terminal_reason and plan.lanes:
        yield f"{len(plan.lanes)} lanes, and no step can be taken: {plan.terminal_reason}; nobody computes then"
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


def _target(plan: Plan) -> Iterator[str]:
    """Faults of a target layout: its lanes must be possible for the ranks of the plan."""
    if plan.target is None:
        return
    then = replace(plan, lanes=plan.target.lanes, target=None)
    tiles = lane_tiles(then)
    for rule in (_lanes(then), _tiles(then, tiles), _plane(then, tiles), _micro_batches(then, tiles)):
        yield from (f"its target layout: {violation}" for violation in rule)
    if plan.terminal_reason or not plan.target.step_s > 0:
        yield f"its target layout has steps of {plan.target.step_s} s; plan and target layout both take steps"


def _leaving(plan: Plan) -> Iterator[str]:
    """Faults of leaving ranks: they get no work and no replica that they do not have."""
    for number, box in enumerate(plan.boxes):
        for rank in sorted(set(box.catching_up) & set(plan.topology.leaving)):
            yield f"rank {rank} is to get a replica of box {number}, and to leave; who leaves gets nothing"


def _tiles(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    alive = {m.rank for m in plan.topology.members}
    for rank, count in Counter(t.rank for t in tiles).items():
        if count > 1:
            yield f"rank {rank} has {count} tiles; a rank has one"
        if rank not in alive:
            yield f"rank {rank} has a tile but is not alive; ranks of a plan are in its topology"
    placed = {rank for lane in plan.lanes for stage in lane.stages for rank in stage.ranks}
    for tile in tiles:
        if tile.rank not in placed:
            continue
        samples = _text(tile.micro_batches)
        if not tile.units or not any(tile.micro_batches):
            yield f"rank {tile.rank} has units {tile.units} and samples {samples}; the tile of a lane is not empty"
        elif tile.units.spans[-1].hi > len(plan.workload.units) or tile.micro_batches[-1].hi > samples_of_step(plan):
            yield f"rank {tile.rank} has units {tile.units} and samples {samples}; a tile lies in the plane"


def _derived_tiles(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    """Differences from the tiles of the plan's lanes; a rank in no lane may have an empty tile."""
    due = {tile.rank: tile for tile in tiles}
    ranks = [tile.rank for tile in plan.tiles]
    if ranks != sorted(set(ranks)):
        yield f"tiles are of ranks {ranks}; each rank has one, in rank order"
    for rank in sorted(due.keys() - set(ranks)):
        yield f"rank {rank} is in a lane and has no tile; tiles follow from lanes"
    for tile in plan.tiles:
        want = due.get(tile.rank)
        if want is None:
            yield f"rank {tile.rank} has a tile but is in no lane and not alive; tiles follow from lanes"
        elif tile != want:
            yield (
                f"rank {tile.rank} has a tile of units {tile.units} and samples {_text(tile.micro_batches)}, and its "
                f"lane gives it units {want.units} and samples {_text(want.micro_batches)}; tiles follow from lanes"
            )


def _plane(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    if plan.terminal_reason:
        return
    whole = Span(0, samples_of_step(plan))
    known: dict[tuple[Span, ...], list[tuple[Span, int]]] = {}
    for unit in range(len(plan.workload.units)):
        spans = tuple(s for t in tiles if unit in t.units for s in t.micro_batches)
        if spans not in known:
            known[spans] = list(_cover_faults(whole, spans))
        for span, count in known[spans]:
            times = f"{count} tiles" if count else "no tile"
            yield f"unit {unit} x samples {span} is covered by {times}; tiles cover the plane exactly once"


def _cover_faults(whole: Span, spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Parts of `whole` that are not covered exactly once, with the number of times."""
    change = Counter({whole.lo: 0, whole.hi: 0})
    for span in spans:
        lo, hi = max(span.lo, whole.lo), min(span.hi, whole.hi)
        if lo < hi:
            change[lo] += 1
            change[hi] -= 1
    count = 0
    for lo, hi in itertools.pairwise(sorted(change)):
        count += change[lo]
        if count != 1:
            yield Span(lo, hi), count


def _micro_batches(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    granule, single = plan.workload.options.granule, plan.workload.batch_coupled or plan.workload.options.exact
    for tile in tiles:
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
            if single and len(piece) != granule:
                yield (
                    f"micro-batch {index} of rank {tile.rank} has {len(piece)} samples; batch-coupled programs and "
                    f"exact sums take one granule of {granule} at a time"
                )
            position = piece.hi


def _boxes(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    buckets, ranks = plan.workload.buckets, {t.rank for t in tiles}
    spans: dict[int, list[Span]] = {index: [] for index in range(len(buckets))}
    users = [tuple(sorted(t.rank for t in tiles if _runs_any(t, bucket.users))) for bucket in buckets]
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
    return any(unit in tile.units for unit in units)


def _replica_faults(box: Box, ranks: set[Rank]) -> Iterator[str]:
    """Faults in the replica ranks of a box."""
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
        yield f"is awaited by {box.catching_up} and held by {box.holders}; those that sync are holders, each once"


def _hops(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    of_rank = {t.rank: t for t in tiles}
    due = {(h.value, h.target, h.target_micro_batch): h for h in due_hops(plan.workload, tiles)}
    arrived: Counter[tuple[int, Rank, int]] = Counter()
    for hop in plan.hops:
        fault = _hop_fault(plan, of_rank, due, hop)
        if fault:
            yield f"hop of value {_name(plan, hop.value)} from rank {hop.source} to rank {hop.target}: {fault}"
        else:
            arrived[hop.value, hop.target, hop.target_micro_batch] += 1
    for (value, rank, mb), count in ((place, arrived[place]) for place in due):
        if count != 1:
            yield f"value {_name(plan, value)} into micro-batch {mb} of rank {rank} arrives {count} times; once is due"


def _hop_fault(
    plan: Plan, tiles: Mapping[Rank, Tile], due: Mapping[tuple[int, Rank, int], Hop], hop: Hop
) -> str | None:
    """Why the hop makes no sense, None if it is due."""
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
    want = due.get((hop.value, hop.target, hop.target_micro_batch))
    if want is None:
        return "the target needs no piece of it"
    if want != hop:
        return f"it is due from rank {want.source}; hops join neighbouring users"
    return None


def _schedules(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    for rank in sorted(set(plan.schedule) - {t.rank for t in tiles}):
        yield f"rank {rank} has a schedule and no tile"
    for tile in tiles:
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
    """The most bytes per sample kept at the same time for a backward pass or its second half."""
    level = most = 0
    for kind, _ in order:
        level += {"F": saved, "B": -saved, "I": held - saved, "W": -held}[kind]
        most = max(most, level)
    return most


def _memory(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    work = plan.workload
    limits = {m.rank: m.memory_bytes for m in plan.topology.members}
    kept: Counter[Rank] = Counter()
    for box in plan.boxes:
        kept.update(dict.fromkeys((box.owner, *box.holders), box.span.hi - box.span.lo))
    awaited, syncing = _on_their_way(plan)
    for tile in tiles:
        taken, most = syncing[tile.rank], plan.topology.switch_bytes
        if most is not None and taken > most:
            yield f"rank {tile.rank} needs {taken} bytes for syncing replicas, which may take {most}"
        limit = limits.get(tile.rank)
        if limit is None:
            continue
        largest = max((len(m) for m in tile.micro_batches), default=0)
        need = work.state_bytes_per_element * kept[tile.rank]
        costs = [work.units[unit] for unit in tile.units if unit < len(work.units)]
        need += sum(cost.param_bytes for cost in costs) + largest * _most_kept(
            plan.schedule.get(tile.rank, ()), sum(c.saved_bytes for c in costs), sum(c.held_bytes for c in costs)
        )
        for bucket in work.buckets:
            if _runs_any(tile, bucket.users):
                need += (8 if work.options.exact else 4) * bucket.numel
        for value in work.values:
            if value.producer not in tile.units and _runs_any(tile, value.consumers):
                need += value.bytes_per_sample * (largest if value.sample_axis is not None else 1)
        if need > limit:
            yield f"rank {tile.rank} needs {need} bytes and has {limit}; a tile fits in the memory of its rank"
        elif taken and need - work.state_bytes_per_element * awaited[tile.rank] + taken > limit:
            yield f"rank {tile.rank} has no room for syncing replicas: they need {taken} bytes, and it has {limit}"


def _on_their_way(plan: Plan) -> tuple[Counter[Rank], Counter[Rank]]:
    """Elements that each rank receives, and the bytes that it needs until all have arrived.

    Received: states and three records of each. Sent: 4 MiB, one more of the states, which the update writes anew
    meanwhile, and records of five steps.
    """
    work = plan.workload
    awaited: Counter[Rank] = Counter()
    needed: Counter[Rank] = Counter()
    sent: defaultdict[Rank, list[int]] = defaultdict(list)
    for box in plan.boxes:
        elements = box.span.hi - box.span.lo
        state = (work.state_bytes_per_element - 4) * elements
        record = 4 * elements * (work.granules if work.buckets[box.bucket].whole else 1)
        for rank in box.catching_up:
            awaited[rank] += elements
            needed[rank] += state + 3 * record
            needed[box.owner] += 5 * record
            sent[box.owner].append(state)
    for rank, sizes in sent.items():
        needed[rank] += min(sum(sizes), 2**22 + max(sizes))
    return awaited, needed


def _text(spans: Sequence[Span]) -> str:
    return " ".join(str(span) for span in spans) or "none"


def _clocks(plan: Plan, tiles: Sequence[Tile]) -> Iterator[str]:
    power = plan.topology.power
    if power is None:
        if plan.clocks:
            yield f"rank {min(plan.clocks)} has a clock, and no device has operating points"
        return
    for tile in tiles:
        clock = plan.clocks.get(tile.rank)
        if clock not in power.points and (tile.units or clock is not None):
            yield f"rank {tile.rank} has the clock {clock}; a rank has one of the operating points"
    for rank in sorted(set(plan.clocks) - {t.rank for t in tiles}):
        yield f"rank {rank} has a clock and no tile"
    drawn_w = sum(point.watts for point in plan.clocks.values())
    if power.cap_w is not None and drawn_w > power.cap_w * (1 + 1e-6):
        yield f"all ranks together draw {drawn_w:g} W, and may draw {power.cap_w:g} W"


def _name(plan: Plan, index: int) -> str:
    values = plan.workload.values
    return values[index].name if 0 <= index < len(values) else str(index)
