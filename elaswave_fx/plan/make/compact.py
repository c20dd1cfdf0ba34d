"""A plan by kinds: lanes that are alike stand once, with their number; what one rank does follows when it is asked for.

For clusters so large that a table of all ranks would be the work. In: a workload, a fleet, the wanted shape. Out: a
`CompactPlan`, shaped by the code that shapes every plan (`shape_lanes.py`), with the same lanes, and the same owners of
boxes. Nothing here grows with the number of ranks but the time to name them all.

    plan = plan_compact(workload, Fleet(1_024_000), Parallel(dp=20_480, pp=50))
    plan.groups                               one of 20,480 lanes, of which the first is written down
    plan.tile(777_777), step_program(plan, 777_777)
    plan.expanded()                           the `Plan` of the same lanes, with every rank in it
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import overload

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.lanes.shape_lanes import LaneShaper
from elaswave_fx.plan.lanes.sketches import Outline, Part, Run, Sketch
from elaswave_fx.plan.make.derive import make_plan, place_costs
from elaswave_fx.plan.make.planner import Parallel, refuse
from elaswave_fx.plan.order.hops import Hop, ValueRoutes, rank_hops
from elaswave_fx.plan.order.schedule import Action
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.exchange import ExchangeEstimate
from elaswave_fx.plan.predict.lane_times import LaneRun
from elaswave_fx.plan.replicas.deal_boxes import choose_holders, deal_owners, kept_elements
from elaswave_fx.plan.work.box import Box, Span
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.tiling import Lane, Stage, Tile
from elaswave_fx.plan.work.topology import Host, Member, Rank, Topology


@dataclass(frozen=True)
class Fleet:
    """Ranks 0 to `count` - 1 with links that are alike; `ranks_per_host` neighbours share a host. All have `speed` and
    `memory_bytes` but those in `others`, which are named one by one."""

    count: int
    ranks_per_host: int = 2
    speed: float = 1.0
    memory_bytes: int | None = None
    others: Mapping[Rank, Member] = field(default_factory=dict)

    def member(self, rank: Rank) -> Member:
        """The member of that rank."""
        known = self.others.get(rank)
        return known or Member(rank, Host(rank // self.ranks_per_host), self.speed, self.memory_bytes)

    def topology(self, ranks: Sequence[Rank]) -> Topology:
        """Of some of its ranks."""
        return Topology(tuple(map(self.member, ranks)), self.ranks_per_host)


@dataclass(frozen=True)
class LaneGroup:
    """`count` lanes, one after the other, that are alike. `lane`: the first; the next one has the ranks and the samples
    that follow. `run`: the orders of their micro-batches, by place."""

    lane: Lane
    count: int
    run: LaneRun

    @property
    def first(self) -> Rank:
        """Its lowest rank."""
        return self.lane.ranks[0]

    def at(self, number: int) -> Lane:
        """One of its lanes."""
        ranks, samples = number * len(self.lane.ranks), number * sum(map(len, self.lane.micro_batches))
        stages = tuple(
            Stage(stage.units, tuple(Rank(rank + ranks) for rank in stage.ranks), stage.deal)
            for stage in self.lane.stages
        )
        return Lane(stages, tuple(Span(m.lo + samples, m.hi + samples) for m in self.lane.micro_batches))

    def place(self, unit: int) -> int:
        """That which runs the unit."""
        return next(place for place, stage in enumerate(self.lane.stages) if unit in stage.units)


class UnitRanks(Sequence[Rank]):
    """The ranks that run a unit, ascending; none of them is written down."""

    def __init__(self, groups: Sequence[LaneGroup], unit: int) -> None:
        self._groups, self._places = groups, [group.place(unit) for group in groups]
        self._until = list(accumulate(group.count for group in groups))

    def __len__(self) -> int:
        return self._until[-1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnitRanks):
            return NotImplemented
        return self._groups is other._groups and self._places == other._places

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, number: int) -> Rank: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Rank]: ...
    def __getitem__(self, number: int | slice) -> Rank | Sequence[Rank]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        at = bisect_right(self._until, number)
        group, before = self._groups[at], self._until[at] - self._groups[at].count
        return Rank(group.first + (number - before) * len(group.lane.ranks) + self._places[at])


@dataclass(frozen=True)
class CompactPlan:
    """Who does what, by kinds. `pipeline_s` runs the schedule of the slowest lane, `exchange_s` estimates reduce, copy
    and gather, and `update_s` the update, with every bucket owned evenly."""

    fleet: Fleet
    workload: Workload
    groups: tuple[LaneGroup, ...]
    copies: int
    pipeline_s: float
    exchange_s: float
    update_s: float
    reason: str

    @property
    def step_s(self) -> float:
        """Seconds of a whole step, exchange not overlapped."""
        return self.pipeline_s + self.exchange_s + self.update_s

    @property
    def lanes(self) -> Iterator[Lane]:
        """All of them, in their order."""
        return (group.at(number) for group in self.groups for number in range(group.count))

    @cached_property
    def routes(self) -> ValueRoutes:
        """The stages that values visit."""
        return ValueRoutes(self.workload)

    def lane(self, rank: Rank) -> Lane:
        """The lane that a rank works in; PlanError if there is no such rank."""
        group, number, _ = self.find(rank)
        return group.at(number)

    def tile(self, rank: Rank) -> Tile:
        """The tile of a rank; PlanError if there is no such rank."""
        group, number, place = self.find(rank)
        samples = number * sum(map(len, group.lane.micro_batches))
        pieces = tuple(Span(piece.lo + samples, piece.hi + samples) for piece in group.lane.micro_batches)
        return Tile(rank, group.lane.stages[place].units, pieces)

    def order(self, rank: Rank) -> tuple[Action, ...]:
        """The order of a rank's micro-batches."""
        group, _, place = self.find(rank)
        return group.run.orders[place]

    def hops_of(self, rank: Rank) -> tuple[Hop, ...]:
        """What a rank sends and receives in a step."""
        return tuple(rank_hops(self.routes, self.lane(rank), rank))

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes with owner and holders, which are few; who reads them is a rule, `reads`.

        Owners are dealt as in every plan. Holders are chosen as in every plan, but only out of the lanes that own boxes
        and as many beside them as copies need, so that no other rank is looked at.
        """
        boxes = deal_owners(self.workload, [UnitRanks(self.groups, unit) for unit in range(len(self.workload.units))])
        near = self._near(boxes)
        readers = [
            tuple(rank for rank in near if self.reads(rank, index)) for index in range(len(self.workload.buckets))
        ]
        known = [Box(box.bucket, box.span, box.owner, readers=readers[box.bucket]) for box in boxes]
        found = choose_holders(self.fleet.topology(near), known, near, self.copies)
        return tuple(Box(box.bucket, box.span, box.owner, box.holders) for box in found)

    def reads(self, rank: Rank, bucket: int) -> bool:
        """Whether the rank computes with the boxes of a bucket."""
        group, _, place = self.find(rank)
        units = group.lane.stages[place].units
        return any(units.lo <= user < units.hi for user in self.workload.buckets[bucket].users)

    def readers(self, bucket: int) -> Iterator[Rank]:
        """All of them, ascending in each lane."""
        users = self.workload.buckets[bucket].users
        for group in self.groups:
            stages = enumerate(group.lane.stages)
            places = [place for place, stage in stages if any(user in stage.units for user in users)]
            for number in range(group.count):
                yield from (Rank(group.first + number * len(group.lane.ranks) + place) for place in places)

    def owned_buckets(self, rank: Rank) -> frozenset[int]:
        """Those of which the rank owns a box."""
        return frozenset(box.bucket for box in self.boxes if box.owner == rank)

    def expanded(self) -> Plan:
        """The same with every rank in it."""
        topology = self.fleet.topology([Rank(rank) for rank in range(self.fleet.count)])
        return make_plan(topology, self.workload, tuple(self.lanes), self.reason, self.copies)

    def find(self, rank: Rank) -> tuple[LaneGroup, int, int]:
        """The group of a rank, which of its lanes, and the place in it."""
        if not 0 <= rank < self.fleet.count:
            raise PlanError(f"compact plan: rank {rank} is none of the {self.fleet.count} ranks of the fleet")
        group = self.groups[bisect_right(self._firsts, rank) - 1]
        return group, *divmod(rank - group.first, len(group.lane.ranks))

    @cached_property
    def _firsts(self) -> list[Rank]:
        return [group.first for group in self.groups]

    def _near(self, boxes: Sequence[Box]) -> list[Rank]:
        """The ranks of all lanes up to the last that owns a box, and of as many more as lie on hosts for its copies."""
        depth = max(len(group.lane.ranks) for group in self.groups)
        last = max((box.owner for box in boxes), default=Rank(0))
        beyond = (self.copies + 1) * max(depth, self.fleet.ranks_per_host)
        return [Rank(rank) for rank in range(min(self.fleet.count, last + 1 + 2 * beyond))]


def plan_compact(workload: Workload, fleet: Fleet, parallel: Parallel) -> CompactPlan:
    """dp lanes of pp stages of one rank each, rank = lane * pp + stage, as `plan_uniform` would plan them.

    ConfigError names the key that cannot work and the nearest valid value; PlanError if nothing fits the memory.
    """
    refuse(workload, parallel)
    if fleet.count != parallel.dp * parallel.pp:
        raise PlanError(f"planner: dp {parallel.dp} x pp {parallel.pp} does not make {fleet.count} ranks")
    workload = replace(workload, micro_batch=parallel.micro_batch, schedule=parallel.schedule)
    shaper = LaneShaper(workload, fleet.topology([Rank(rank) for rank in range(parallel.pp)]))
    outline = Outline(fleet.count, parallel.dp, parallel.dp, parallel.pp, parallel.pp)
    table, runs = shaper.table(outline, parallel.copies), list(_runs(fleet, parallel))
    for size in shaper.sizes(outline, parallel.micro_batch):
        cut = shaper.cut(runs, size, table)
        parts = None if cut is None else shaper.parts(cut, table)
        if parts is None:
            continue
        plan = _compact(workload, fleet, parallel, shaper, parts, size)
        if _fits(plan, shaper):
            return plan
    raise PlanError(f"planner: no micro-batch of {parallel.dp} x {parallel.pp} lanes fits in memory")


def _runs(fleet: Fleet, parallel: Parallel) -> Iterator[Run]:
    """Lanes without a rank that is named stand together, the others alone."""
    named = sorted({rank // parallel.pp for rank in fleet.others})
    for before, lane in pairwise((-1, *named, parallel.dp)):
        if lane > before + 1:
            yield Run(_sketch(fleet, before + 1, parallel.pp), lane - before - 1)
        if lane < parallel.dp:
            yield Run(_sketch(fleet, lane, parallel.pp), 1)


def _sketch(fleet: Fleet, lane: int, depth: int) -> Sketch:
    return Sketch(tuple((fleet.member(Rank(rank)),) for rank in range(lane * depth, (lane + 1) * depth)))


def _compact(
    workload: Workload, fleet: Fleet, parallel: Parallel, shaper: LaneShaper, parts: Sequence[Part], size: int
) -> CompactPlan:
    kept = sum(bucket.numel for bucket in workload.buckets) * (1 + parallel.copies) // fleet.count
    groups: list[LaneGroup] = []
    rank = sample = 0
    for part in parts:
        sketch = _sketch(fleet, rank // parallel.pp, parallel.pp)
        samples = part.granules * workload.granule
        lane = shaper.lane(sketch, part.borders, Span(sample, sample + samples), size)
        run = shaper.times.about(shaper.kind(part, size), sketch.members, kept)
        groups.append(LaneGroup(lane, part.count, run))
        rank, sample = rank + part.count * parallel.pp, sample + part.count * samples
    stages = [(stage.units, group.count * len(stage.ranks)) for group in groups for stage in group.lane.stages]
    exchange_s = ExchangeEstimate(workload, fleet.topology(groups[0].lane.ranks)).seconds(stages, parallel.copies)
    pipeline_s = max(group.run.seconds for group in groups)
    reason = f"{parallel.dp} x {parallel.pp} lanes of {len(groups)} kind{'s' if len(groups) > 1 else ''}"
    update_s = workload.update_s * kept
    return CompactPlan(fleet, workload, tuple(groups), parallel.copies, pipeline_s, exchange_s, update_s, reason)


def _fits(plan: CompactPlan, shaper: LaneShaper) -> bool:
    """Whether every rank has the memory: those that keep boxes one by one, of the others one of each place."""
    if plan.fleet.memory_bytes is None and not plan.fleet.others:
        return True
    costs = [place_costs(shaper.times, group.lane, group.run) for group in plan.groups]
    kept, state = kept_elements(plan.boxes), plan.workload.state_bytes_per_element
    of_group = {id(group): each for group, each in zip(plan.groups, costs, strict=True)}
    first_of_kind = [rank for group in plan.groups for rank in group.lane.ranks]
    for rank in {*first_of_kind, *kept}:
        group, _, place = plan.find(rank)
        limit = plan.fleet.member(rank).memory_bytes
        if limit is not None and of_group[id(group)][place].memory_bytes + state * kept[rank] > limit:
            return False
    return True
