"""Candidate lanes for the remaining ranks: lane shapes, with the words that describe them.

In: the previous plan and the present topology. Out: candidates, for `lane_search.py` to shape, time and compare. Whole
lanes stay as they are, unless a candidate uses them to help a hurt lane.

    4 x 4 lost rank 5, of the second lane   ->  its stages keep their units, and peers are dealt its micro-batches;
                                                three stages instead of four; one lane with a neighbour; everything anew
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elaswave_fx.plan.lanes.lane_shapes import LaneShape, LaneShapes, SideBySide
from elaswave_fx.plan.make.planner import shape_name
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import consecutive, even_split
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Member, Rank, Topology
from elaswave_fx.words import listed, rank_words

MANY = 64
"""Bound of ranks up to which all numbers of lanes are considered; with more ranks, neighbouring numbers differ by less
than the prediction error."""

MUCH_SLOWER = 0.5
"""Ranks above this fraction of the highest speed always get work: at half of it a rank can take half of a share, and a
step without it is rarely shorter."""

Stages = tuple[tuple[Member, ...], ...]
"""The members of a lane, stage by stage; a stage may have lost all of them."""


@dataclass(frozen=True)
class Candidate:
    """Lanes for the next plan. `name` describes the change of hurt lanes. `shares`: fixed granules of each lane."""

    name: str
    shapes: LaneShapes
    shares: tuple[int, ...] | None = None


def lane_candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """All distinct candidates, least change first, each with all members of the topology. Where some ranks are much
    slower, the same candidates follow without them; they compute nothing then."""
    yield from _of_all(plan, topology)
    for slow in _much_slower(topology):
        members = tuple(member for member in topology.members if member.rank not in slow)
        for candidate in _of_all(plan, topology.of(members)):
            yield replace(candidate, name=f"{candidate.name}, without {rank_words(slow)}, too slow")


def _much_slower(topology: Topology) -> Iterator[tuple[Rank, ...]]:
    """Slow ranks up to each of the speeds that are low against the highest."""
    speeds = {member.speed for member in topology.members}
    for speed in sorted(speeds):
        if speed <= MUCH_SLOWER * max(speeds):
            yield tuple(member.rank for member in topology.members if member.speed <= speed)


def _of_all(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    seen: set[tuple[LaneShape, ...]] = set()
    units = len(plan.workload.units)
    for candidate in itertools.chain(unchanged(plan, topology), repaired(plan, topology)):
        shapes = tuple(candidate.shapes)
        if shapes not in seen and all(len(shape.stages) <= units for shape in shapes):
            seen.add(shapes)
            yield candidate
    for candidate in new_lanes(units, plan.workload.granules, _by_units(plan, topology)):
        if not any(_same(candidate.shapes, other) for other in seen):
            yield candidate


def unchanged(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The present lanes, if ranks have joined and none has left: joiners first get replicas."""
    if plan.lanes and set(plan.ranks) < set(topology.ranks):
        yield Candidate("lanes as before, joiners get replicas", tuple(whole_lanes(plan, topology).values()))


def _same(new: LaneShapes, other: Sequence[LaneShape]) -> bool:
    """Whether the lanes are equal; `new` is only built if they could be."""
    if len(new) != len(other) or any(shape.borders is not None for shape in other):
        return False
    if isinstance(new, SideBySide) and any(len(s.stages) != depth for s, depth in zip(other, new.depths, strict=True)):
        return False
    return tuple(new) == tuple(other)


def new_lanes(units: int, granules: int, order: Sequence[Member]) -> Iterator[Candidate]:
    """Lanes side by side, or one lane of wide stages, in all depths, as even as possible, with ranks in the order of
    their former units. With more than `MANY` ranks: only the most and the fewest lanes of each depth, and wide stages
    where ranks exceed the possible lanes."""
    count = len(order)
    narrow = [parts for parts in _numbers_of_lanes(count, units) if parts <= granules]
    wide = range(1, min(count, units) + 1) if count <= MANY or not narrow else ()
    for parts in sorted({*narrow, *wide}):
        sizes = even_split(count, parts)
        if parts in narrow:
            yield Candidate(f"units cut anew: {_shape(sizes)}", SideBySide(order, sizes))
        if parts in wide and len(set(sizes)) > 1 and sizes[0] <= granules:
            stages = tuple(tuple(order[s.lo : s.hi]) for s in consecutive(sizes))
            yield Candidate(f"units cut anew: a lane of stages {listed(sizes)} ranks wide", (LaneShape(stages),))


def _numbers_of_lanes(ranks: int, units: int) -> list[int]:
    """Numbers of lanes in which no lane is deeper than there are units."""
    if ranks <= MANY:
        return [parts for parts in range(1, ranks + 1) if -(-ranks // parts) <= units]
    of_depth = ((-(-ranks // (depth + 1)), ranks // depth) for depth in range(1, units + 1))
    return sorted({parts for pair in of_depth for parts in pair if -(-ranks // parts) <= units})


def repaired(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The present lanes but for hurt lanes and the lanes that help them; no work for joiners."""
    alive = {m.rank: m for m in topology.members}
    if not plan.lanes or not set(alive) <= set(plan.ranks):
        return
    left = [tuple(tuple(alive[r] for r in s.ranks if r in alive) for s in lane.stages) for lane in plan.lanes]
    whole = whole_lanes(plan, topology)
    hurt = [i for i in range(len(plan.lanes)) if i not in whole]
    groups = [sorted({i, *(j for j, other in enumerate(plan.lanes) if _alike(other, plan.lanes[i]))}) for i in hurt]
    yield from _keeping_units(plan, left, whole, groups)
    yield from _with_a_neighbour(plan, left, whole, hurt, keep=True)
    yield from _shallower(left, whole, hurt)
    yield from _with_a_neighbour(plan, left, whole, hurt, keep=False)


def whole_lanes(plan: Plan, topology: Topology) -> dict[int, LaneShape]:
    """Complete lanes by place, unchanged."""
    alive = {m.rank: m for m in topology.members}
    return {
        i: LaneShape(tuple(tuple(alive[rank] for rank in stage.ranks) for stage in lane.stages), lane.borders)
        for i, lane in enumerate(plan.lanes)
        if alive.keys() >= set(lane.ranks)
    }


def samples_of_lanes(plan: Plan) -> tuple[int, ...]:
    return tuple(sum(map(len, lane.micro_batches)) for lane in plan.lanes)


def keep_samples(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """Every lane keeps its samples; hurt lanes are cut anew, less deep or less wide."""
    alive = {m.rank: m for m in topology.members}
    left = [tuple(tuple(alive[r] for r in s.ranks if r in alive) for s in lane.stages) for lane in plan.lanes]
    shapes = tuple(
        LaneShape(tuple(stage for stage in stages if stage), lane.borders if set(lane.ranks) <= set(alive) else None)
        for stages, lane in zip(left, plan.lanes, strict=True)
    )
    if plan.lanes and set(alive) <= set(plan.ranks) and all(shape.stages for shape in shapes):
        shares = tuple(count // plan.workload.options.granule for count in samples_of_lanes(plan))
        yield Candidate("the hurt lanes are cut anew, with the samples that they had", shapes, shares)


def keeps_units(plan: Plan, candidate: Candidate) -> bool:
    """Whether no rank gets a new unit."""
    count = len(plan.workload.units)
    had = {tile.rank: tile.units for tile in plan.tiles}
    for shape in candidate.shapes:
        borders = (0, count) if len(shape.stages) == 1 else shape.borders
        if borders is None:
            return False
        for members, lo, hi in zip(shape.stages, borders, borders[1:], strict=False):
            if any(m.rank not in had or any(unit not in had[m.rank] for unit in range(lo, hi)) for m in members):
                return False
    return True


def places(plan: Plan, topology: Topology) -> dict[Rank, int]:
    """Positions of ranks by their order in the previous plan: place in lanes, then boxes; joiners by number. Renaming
    ranks does not change the order of places."""
    named = itertools.chain(
        (rank for lane in plan.lanes for rank in lane.ranks),
        (rank for box in plan.boxes for rank in (box.owner, *box.holders)),
        topology.ranks,
    )
    return {rank: place for place, rank in enumerate(dict.fromkeys(named))}


def _alike(a: Lane, b: Lane) -> bool:
    return a.borders == b.borders


def _keeping_units(
    plan: Plan, left: Sequence[Stages], whole: dict[int, LaneShape], groups: Sequence[Sequence[int]]
) -> Iterator[Candidate]:
    """Stages that lost a rank borrow others: from their own lane, or from all lanes with the same cuts, as one lane."""
    own = [(i,) if all(left[i]) else tuple(group) for group in groups for i in group if i not in whole]
    together = [tuple(group) for group in groups]
    for name, parts in (("stages keep their units", own), ("stages keep their units, as one lane", together)):
        merged = sorted(set(parts))
        stages = [_union([left[i] for i in part]) for part in merged]
        apart = len({i for part in merged for i in part}) == sum(map(len, merged))
        if apart and all(all(each) for each in stages):
            shapes = [LaneShape(s, plan.lanes[p[0]].borders) for s, p in zip(stages, merged, strict=True)]
            yield Candidate(name, _lanes(whole, merged, shapes))


def _with_a_neighbour(
    plan: Plan, left: Sequence[Stages], whole: dict[int, LaneShape], hurt: Sequence[int], keep: bool
) -> Iterator[Candidate]:
    """Each hurt lane merged with a complete lane of the same cuts."""
    pairs: list[tuple[int, ...]] = []
    free = list(whole)
    for i in hurt:
        partner = next((j for j in free if _alike(plan.lanes[i], plan.lanes[j])), None)
        if partner is None:
            return
        free.remove(partner)
        pairs.append(tuple(sorted((i, partner))))
    if not pairs:
        return
    merged = [_union([left[i] for i in pair]) for pair in pairs]
    shapes = [LaneShape(s, plan.lanes[p[0]].borders if keep else None) for s, p in zip(merged, pairs, strict=True)]
    lane = "the hurt lane is" if len(pairs) == 1 else "the hurt lanes are"
    yield Candidate(
        "stages keep their units, as one lane with a neighbour" if keep else f"{lane} one with a neighbour, cut anew",
        _lanes(whole, pairs, shapes),
    )


def _shallower(left: Sequence[Stages], whole: dict[int, LaneShape], hurt: Sequence[int]) -> Iterator[Candidate]:
    """The ranks of hurt lanes by themselves: each lane less deep, or all of them in as many lanes or fewer."""
    if not hurt:
        return
    alone = [tuple(stage for stage in left[i] if stage) for i in hurt]
    depths = [len(stages) for stages in alone if stages]
    name = (
        f"the hurt lane is cut anew, {depths[0]} deep"
        if len(hurt) == len(depths) == 1
        else (f"the hurt lanes are cut anew, {listed(depths)} deep" if depths else "the hurt lanes are gone")
    )
    if whole or depths:
        yield Candidate(name, _lanes(whole, [(i,) for i in hurt], [LaneShape(s) if s else None for s in alone]))
    pooled = [(place, member) for i in hurt for place, stage in enumerate(left[i]) for member in stage]
    order = [member for _, member in sorted(pooled, key=lambda each: each[0])]
    for parts in range(1, min(len(hurt), len(order)) + 1):
        sizes = even_split(len(order), parts)
        yield Candidate(
            f"units cut anew: the ranks of the hurt lane{'s' if len(hurt) > 1 else ''} in {_shape(sizes)}",
            (*whole.values(), *SideBySide(order, sizes)),
        )


def _union(lanes: Sequence[Stages]) -> Stages:
    """The stages of all lanes, merged stage by stage."""
    return tuple(tuple(member for stage in stages for member in stage) for stages in zip(*lanes, strict=True))


def _lanes(
    whole: dict[int, LaneShape], parts: Sequence[Sequence[int]], shapes: Sequence[LaneShape | None]
) -> LaneShapes:
    """Unchanged lanes, and `shapes` in the places of the first lanes that they are made of."""
    taken = {i for part in parts for i in part}
    found: dict[int, LaneShape | None] = {i: shape for i, shape in whole.items() if i not in taken}
    found.update({min(part): shape for part, shape in zip(parts, shapes, strict=True)})
    return tuple(shape for _, shape in sorted(found.items()) if shape is not None)


def _by_units(plan: Plan, topology: Topology) -> list[Member]:
    """The ranks in the order of their former work: first unit, then place; ranks without a tile last."""
    last = len(plan.workload.units)
    first = {tile.rank: next(iter(tile.units), 0) for tile in plan.tiles}
    place = places(plan, topology)
    return sorted(topology.members, key=lambda member: (first.get(member.rank, last), place[member.rank]))


def _shape(depths: Sequence[int]) -> str:
    """Words for lanes one rank wide."""
    return shape_name([(1,) * depth for depth in depths])
