"""The shortest step that ranks in given places can have: every cut of the units that they have memory for, every share
of the granules.

How long lanes take, and what is kept in memory for their backward passes, is found here by itself: 1F1B as in the
textbook where all stages are one rank wide, else by the rule of docs/explain/planning.md on a clock of whole ticks; a
micro-batch is sent in no time. How long they take with backward passes in halves, `LaneTimes` says: there is no order
but the one that it finds.

    BruteForce(workload).shortest(shapes, size=2)  ->  Shortest(seconds=0.021, shares=(5, 3))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from elaswave_fx.plan.lanes.lane_shapes import LaneShape
from elaswave_fx.plan.lanes.shares import deal
from elaswave_fx.plan.order.schedule import LaneKind, StageKind
from elaswave_fx.plan.predict.lane_times import LaneTimes
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane, split_micro_batches
from elaswave_fx.plan.work.topology import Topology

Task = tuple[int, int, int]
"""(stage, 0 forward or 1 backward, micro-batch of the lane)."""

Deals = tuple[tuple[int, ...], ...]
"""By stage, how many micro-batches each of its ranks runs."""

Speeds = tuple[tuple[float, ...], ...]
"""By stage, of its ranks."""


@dataclass(frozen=True)
class Shortest:
    """`shares`: granules by lane of one of the best choices."""

    seconds: float
    shares: tuple[int, ...]


def all_borders(units: int, stages: int) -> list[tuple[int, ...]]:
    """Every cut of the units into so many stages."""
    return [(0, *cut, units) for cut in itertools.combinations(range(1, units), stages - 1)]


class BruteForce:
    """For one workload; lanes of equal members are tried once. `times`: of lanes with backward passes in halves."""

    def __init__(self, workload: Workload, times: LaneTimes | None = None) -> None:
        self._workload, self._times = workload, times
        self._known: dict[tuple[object, ...], dict[int, float]] = {}

    def shortest(self, shapes: Sequence[LaneShape], size: int) -> Shortest | None:
        """Of lanes of micro-batches of at most `size` samples; None if nothing fits. Lanes that are all alike have
        equal shares."""
        granules = self._workload.granules
        spare = granules - sum(shape.width for shape in shapes)
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        even = granules // len(shapes) if len({_alike(each) for each in shapes}) == 1 else 0
        for shape in shapes if spare >= 0 else ():
            longer: dict[int, tuple[float, tuple[int, ...]]] = {}
            seconds = self._by_share(shape, size, shape.width + spare)
            if even * len(shapes) == granules and even in seconds:
                seconds = {even: seconds[even]}
            for (done, (before, shares)), (share, taken) in itertools.product(best.items(), seconds.items()):
                found = max(before, taken), (*shares, share)
                longer[done + share] = min(longer.get(done + share, found), found)
            best = longer
        return Shortest(*best[granules]) if granules in best else None

    def _by_share(self, shape: LaneShape, size: int, most: int) -> dict[int, float]:
        """Granules of a lane -> the fewest seconds that it takes with any cut that fits."""
        key = _alike(shape), size, most
        if key not in self._known:
            seconds = {share: self._with_any_cut(shape, size, share) for share in range(shape.width, most + 1)}
            self._known[key] = {share: taken for share, taken in seconds.items() if math.isfinite(taken)}
        return self._known[key]

    def _with_any_cut(self, shape: LaneShape, size: int, share: int) -> float:
        stages, work = len(shape.stages), self._workload
        cuts = [shape.borders] if shape.borders is not None else all_borders(len(work.units), stages)
        pieces = split_micro_batches(Span(0, share * work.options.granule), size, work.options.granule, shape.width)
        sizes = [len(piece) for piece in pieces]
        deals = tuple(deal(len(pieces), stage) for stage in shape.stages)
        if not cuts:
            return math.inf
        speeds = tuple(tuple(member.speed for member in stage) for stage in shape.stages)
        if work.options.schedule != "1f1b":
            return min(self._in_halves(shape, cut, deals, sizes) for cut in cuts)
        seconds = _seconds(work, cuts, deals, speeds, sizes)
        return float(np.where(_fits(work, cuts, deals, shape, sizes), seconds, math.inf).min())

    def _in_halves(self, shape: LaneShape, cut: Sequence[int], deals: Deals, sizes: Sequence[int]) -> float:
        assert self._times is not None, "of lanes with backward passes in halves"
        stages = zip(itertools.pairwise(cut), deals, shape.stages, strict=True)
        kind = LaneKind(
            tuple(StageKind(Span(*units), dealt, tuple(m.speed for m in members)) for units, dealt, members in stages),
            tuple(sizes),
        )
        run = self._times.about(kind, shape.members, 0)
        return run.seconds if run.fits else math.inf


def _alike(shape: LaneShape) -> tuple[object, ...]:
    return tuple(tuple((m.speed, m.memory_bytes) for m in stage) for stage in shape.stages), shape.borders


def _fits(
    workload: Workload, cuts: Sequence[tuple[int, ...]], deals: Deals, shape: LaneShape, sizes: Sequence[int]
) -> np.ndarray:
    """By cut, whether every rank has room for its parameters and for what its micro-batches in flight have saved."""
    costs = np.array([[u.param_bytes, u.saved_bytes] for u in workload.units])
    until = np.concatenate([np.zeros((1, 2)), np.cumsum(costs, axis=0)])
    borders = np.array(cuts)
    params, saved = np.moveaxis(until[borders[:, 1:]] - until[borders[:, :-1]], 2, 0)
    in_flight, most = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for stage, back, mb in one_order(deals):
        place = stage, holder(deals[stage], mb)
        in_flight[place] = in_flight.get(place, 0) + (-1 if back else 1)
        most[place] = max(most.get(place, 0), in_flight[place])
    found = np.ones(len(cuts), dtype=bool)
    for (stage, rank), count in most.items():
        limit = shape.stages[stage][rank].memory_bytes
        if limit is not None:
            largest = max(size for mb, size in enumerate(sizes) if holder(deals[stage], mb) == rank)
            found &= params[:, stage] + saved[:, stage] * count * largest <= limit
    return found


def lane_seconds(workload: Workload, lane: Lane, topology: Topology) -> float:
    """A step of one lane."""
    speeds = tuple(tuple(topology.member(rank).speed for rank in stage.ranks) for stage in lane.stages)
    deals = tuple(stage.deal for stage in lane.stages)
    sizes = [len(samples) for samples in lane.micro_batches]
    return float(_seconds(workload, [lane.borders], deals, speeds, sizes)[0])


def _seconds(
    workload: Workload,
    cuts: Sequence[tuple[int, ...]],
    deals: Deals,
    speeds: Speeds,
    sizes: Sequence[int],
) -> np.ndarray:
    """By cut, how long a lane takes."""
    costs = np.array([[u.fixed_s, u.forward_s, u.backward_s] for u in workload.units])
    until = np.concatenate([np.zeros((1, 3)), np.cumsum(costs, axis=0)])
    borders = np.array(cuts)
    fixed, forward, backward = np.moveaxis(until[borders[:, 1:]] - until[borders[:, :-1]], 2, 0)
    ends: dict[Task, np.ndarray] = {}
    free: dict[tuple[int, int], np.ndarray] = {}
    last = len(deals) - 1
    for stage, back, mb in one_order(deals):
        place = stage, holder(deals[stage], mb)
        per_sample = (backward if back else forward)[:, stage]
        taken = (fixed[:, stage] + per_sample * sizes[mb]) / speeds[stage][place[1]]
        before = _needs((stage, back, mb), last)
        begin = free.get(place, np.zeros(len(cuts)))
        for task in before:
            begin = np.maximum(begin, ends[task])
        free[place] = ends[stage, back, mb] = begin + taken
    return np.max(np.stack(list(free.values())), axis=0)


def holder(dealt: Sequence[int], mb: int) -> int:
    """Which rank of a stage has a micro-batch of the lane."""
    return next(i for i, until in enumerate(itertools.accumulate(dealt)) if mb < until)


def _needs(task: Task, last: int) -> list[Task]:
    stage, back, mb = task
    if not back:
        return [(stage - 1, 0, mb)] if stage else []
    return [(stage, 0, mb), *([(stage + 1, 1, mb)] if stage < last else [])]


@cache
def one_order(deals: Deals) -> tuple[Task, ...]:
    """All tasks of a lane, each after what it needs and after what its rank does before."""
    wide = any(len(dealt) > 1 for dealt in deals)
    orders = _by_rule(deals) if wide else {(s, 0): _textbook(s, len(deals), deals[0][0]) for s in range(len(deals))}
    done: dict[Task, None] = {}
    left = {place: list(order) for place, order in orders.items()}
    while any(left.values()):
        before = len(done)
        for order in left.values():
            while order and all(task in done for task in _needs(order[0], len(deals) - 1)):
                done[order.pop(0)] = None
        assert len(done) > before, "orders wait for each other"
    return tuple(done)


def _textbook(stage: int, stages: int, count: int) -> list[Task]:
    """1F1B with flush: as many forward passes as there are stages from here on, then backward and forward in turn."""
    warm_up = min(stages - stage, count)
    order = [(stage, 0, mb) for mb in range(warm_up)]
    for mb in range(count):
        order.append((stage, 1, mb))
        if warm_up + mb < count:
            order.append((stage, 0, warm_up + mb))
    return order


def _by_rule(deals: Deals) -> dict[tuple[int, int], list[Task]]:
    """Forward takes a tick, backward two. A rank that is free takes a backward pass, else what has waited longest, and
    holds at most its bound of micro-batches."""
    widths, last = [len(dealt) for dealt in deals], len(deals) - 1
    bounds = [1] * len(deals)
    for stage in reversed(range(last)):
        held_later = bounds[stage + 1] * widths[stage + 1]
        bounds[stage] += -(-held_later // widths[stage]) + (widths[stage] != widths[stage + 1])
    places = [(stage, rank) for stage, width in enumerate(widths) for rank in range(width)]
    orders: dict[tuple[int, int], list[Task]] = {place: [] for place in places}
    tasks = {(s, back, mb) for s in range(len(deals)) for back in (0, 1) for mb in range(sum(deals[0]))}
    since, ends, busy_until = dict[Task, int](), dict[Task, int](), dict.fromkeys(places, 0)
    now = 0
    while tasks:
        for task in tasks - since.keys():
            if all(ends.get(need, now + 1) <= now for need in _needs(task, last)):
                since[task] = now
        for place in places:
            stage, rank = place
            if busy_until[place] > now:
                continue
            held = sum(-1 if back else 1 for _, back, _ in orders[place])
            ready = [t for t in since if t in tasks and t[0] == stage and holder(deals[stage], t[2]) == rank]
            ready = [t for t in ready if t[1] or held < bounds[stage]]
            if ready:
                task = min(ready, key=lambda t: (-t[1], since[t], t[2]))
                tasks.discard(task)
                orders[place].append(task)
                busy_until[place] = ends[task] = now + 1 + task[1]
        now += 1
    return orders
