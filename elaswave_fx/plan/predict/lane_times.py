"""The order and the length of a lane's step, with whole backward passes or in halves.

In: a workload and a topology; lanes. Out: `LaneRun`. Lanes with equal members and equal room in their memory are one
kind, which is run once.

    LaneTimes(workload, topology).of(lane, kept={0: 4096, 1: 4096}).seconds
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_fx.plan.order.hops import ValueRoutes
from elaswave_fx.plan.order.pipelines import StageSeconds, is_pipeline, least_pipeline_s, pipeline_orders, pipeline_s
from elaswave_fx.plan.order.schedule import (
    Action,
    LaneKind,
    Schedule,
    Task,
    Work,
    find_schedule,
    first_bounds,
    lane_work,
    levels,
    makespan_s,
    most_in_flight,
)
from elaswave_fx.plan.order.split_schedule import Room, shortest_s, split_schedules
from elaswave_fx.plan.predict.memory import UnitSums
from elaswave_fx.plan.work.cost import ROUNDING, Workload, backward_s, forward_s
from elaswave_fx.plan.work.spans import Span, consecutive
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Member, Rank, Topology

WORTHWHILE = 0.99
"""An order with more memory or programs must shorten a lane's step below this fraction."""


@dataclass(frozen=True)
class LaneRun:
    """A step of a lane: by place the order of its micro-batches and its busy seconds; `seconds` of the whole.

    `whole_s`: with whole backward passes. `refused`: why allowed halves were not taken, else empty.
    """

    orders: tuple[tuple[Action, ...], ...]
    busy_s: tuple[float, ...]
    seconds: float
    whole_s: float
    fits: bool = True
    refused: str = ""

    @property
    def is_split(self) -> bool:
        """Whether backward passes are in halves."""
        return any(kind == "W" for order in self.orders for kind, _ in order)


class LaneTimes:
    """Runs of lanes of one workload on one topology, each kind once."""

    def __init__(self, workload: Workload, topology: Topology, sums: UnitSums | None = None) -> None:
        self._workload, self._topology = workload, topology
        self.sums = sums or UnitSums(workload)
        self.routes = ValueRoutes(workload)
        self._passes: dict[tuple[Span, int], tuple[float, float]] = {}
        self._limits = {m.rank: m.memory_bytes for m in topology.members}
        self._whole: dict[LaneKind, LaneRun] = {}
        self._least: dict[LaneKind, float] = {}
        self._known: dict[tuple[LaneKind, tuple[Room, ...]], LaneRun] = {}

    def whole_of(self, kind: LaneKind) -> LaneRun:
        """The run with whole backward passes, in unbounded memory."""
        return self._run_whole(kind)

    def least_of(self, kind: LaneKind) -> float:
        """Lower bound of `whole_of`'s seconds without links, where all stages are one rank wide."""
        sizes, stages = kind.sizes, []
        small, large = min(sizes), max(sizes)
        for stage in kind.stages:
            (speed,) = stage.speeds
            forward, backward = self._pass_s(stage.units, small)
            all_s = sum(sum(self._pass_s(stage.units, size)) * number for size, number in Counter(sizes).items())
            largest = self._pass_s(stage.units, large)[0]
            stages.append(StageSeconds(forward / speed, backward / speed, largest / speed, all_s / speed))
        return least_pipeline_s(stages, len(sizes))

    def of(self, lane: Lane, kept: Mapping[Rank, int]) -> LaneRun:
        """The run by the workload's `schedule`; `kept`: elements of state by rank."""
        kind = LaneKind.of(lane, self._topology)
        if self._workload.options.schedule == "1f1b":
            return self._run_whole(kind)
        return self._run(kind, [self._limits[rank] for rank in lane.ranks], [kept.get(rank, 0) for rank in lane.ranks])

    def about(self, kind: LaneKind, members: Sequence[Member], kept: int) -> LaneRun:
        """The run of ranks that keep about `kept` elements each."""
        if self._workload.options.schedule == "1f1b":
            return self._run_whole(kind)
        return self._run(kind, [member.memory_bytes for member in members], [kept] * len(members))

    def least_about(self, kind: LaneKind) -> float:
        """Lower bound of `about`'s seconds, without a search of halves: each rank's earliest first forward pass plus
        all its work."""
        if self._workload.options.schedule == "1f1b":
            return self._run_whole(kind).seconds
        if kind not in self._least:
            self._least[kind] = self._find_least(kind, is_whole=False)
        return self._least[kind]

    def least_whole_of(self, kind: LaneKind) -> float:
        """Lower bound of `whole_of`'s seconds without a run: each rank's earliest first forward pass, all its work, and
        the backward passes of earlier stages after its last one."""
        return self._find_least(kind, is_whole=True)

    def _find_least(self, kind: LaneKind, is_whole: bool) -> float:
        """`is_whole`: a rank ends with a backward pass, and those of earlier stages follow."""
        around_s = {size: self._around_s(kind, size, is_whole) for size in set(kind.sizes)}
        least_s = 0.0
        for number, stage in enumerate(kind.stages):
            for dealt, speed in zip(consecutive(stage.deal), stage.speeds, strict=True):
                sizes = Counter(kind.sizes[dealt.lo : dealt.hi])
                taken_s = sum(sum(self._pass_s(stage.units, size)) * count for size, count in sizes.items()) / speed
                least_s = max(least_s, around_s[min(sizes)][number] + taken_s)
        return least_s * (1 - ROUNDING)

    def _around_s(self, kind: LaneKind, size: int, with_backward: bool) -> list[float]:
        """Seconds by stage that a micro-batch of `size` spends in earlier stages, before and after it."""
        before_s, after_s = [0.0] * len(kind.stages), [0.0] * len(kind.stages)
        passes = [[s / max(stage.speeds) for s in self._pass_s(stage.units, size)] for stage in kind.stages]
        for (source, target), traffic in sorted(self.routes.traffic(kind.borders).items()):
            before_s[target] = max(before_s[target], before_s[source] + passes[source][0])
            if with_backward and traffic.back is not None:
                after_s[target] = max(after_s[target], after_s[source] + passes[source][1])
        return [before + after for before, after in zip(before_s, after_s, strict=True)]

    def rooms(self, lane: Lane, kept: Mapping[Rank, int]) -> tuple[Room, ...]:
        """Memory for activations by place, beside the elements of state that the rank keeps."""
        limits, elements = [self._limits[rank] for rank in lane.ranks], [kept.get(rank, 0) for rank in lane.ranks]
        return self._rooms(LaneKind.of(lane, self._topology), limits, elements)

    def _rooms(self, kind: LaneKind, limits: Sequence[int | None], kept: Sequence[int]) -> tuple[Room, ...]:
        stage_of = [number for number, stage in enumerate(kind.stages) for _ in stage.deal]
        return tuple(self._room(kind, *place) for place in zip(stage_of, limits, kept, strict=True))

    def _run(self, kind: LaneKind, limits: Sequence[int | None], kept: Sequence[int]) -> LaneRun:
        rooms = self._rooms(kind, limits, kept)
        if (kind, rooms) not in self._known:
            self._known[kind, rooms] = self._choose(kind, rooms)
        return self._known[kind, rooms]

    def _choose(self, kind: LaneKind, rooms: Sequence[Room]) -> LaneRun:
        """The run with whole backward passes, in halves, or the faster that fits."""
        whole = self._run_whole(kind)
        whole = replace(whole, fits=all(map(fits, whole.orders, rooms)))
        split = self._run_split(kind, rooms, whole)
        if split is None:
            return replace(whole, refused="no schedule of the split kind runs to its end")
        if self._workload.options.schedule == "split":
            return split
        if not split.fits:
            return replace(whole, refused="the split backward does not fit in memory")
        if split.seconds < WORTHWHILE * whole.seconds or not whole.fits:
            return split
        return replace(whole, refused=f"{whole.seconds * 1e3:.3g} ms, which the split backward does not shorten")

    def _run_whole(self, kind: LaneKind) -> LaneRun:
        if kind not in self._whole:
            if is_pipeline(kind, self.routes.traffic(kind.borders)):
                self._whole[kind] = self._run_pipeline(kind)
            else:
                work = lane_work(self.routes, kind)
                schedule = find_schedule(work, first_bounds(self.routes, kind))
                seconds = makespan_s(work, schedule, kind.link)
                self._whole[kind] = _lane_run(work, schedule, seconds, seconds)
        return self._whole[kind]

    def _run_pipeline(self, kind: LaneKind) -> LaneRun:
        """The result of a run of its tasks, in closed form."""
        forward: list[list[float]] = []
        backward: list[list[float]] = []
        for stage in kind.stages:
            (speed,) = stage.speeds
            of_size = {size: self._pass_s(stage.units, size) for size in set(kind.sizes)}
            forward.append([of_size[size][0] / speed for size in kind.sizes])
            backward.append([of_size[size][1] / speed for size in kind.sizes])
        seconds = pipeline_s(kind, self.routes.traffic(kind.borders), forward, backward)
        busy = tuple(
            sum(itertools.chain.from_iterable(zip(f, b, strict=True))) for f, b in zip(forward, backward, strict=True)
        )
        return LaneRun(pipeline_orders(len(kind.stages), len(kind.sizes)), busy, seconds, seconds)

    def _pass_s(self, units: Span, samples: int) -> tuple[float, float]:
        """Forward and backward seconds of a micro-batch at speed 1."""
        key = (units, samples)
        if key not in self._passes:
            lo, hi = units.lo, units.hi
            self._passes[key] = forward_s(self._workload, lo, hi, samples), backward_s(self._workload, lo, hi, samples)
        return self._passes[key]

    def _run_split(self, kind: LaneKind, rooms: Sequence[Room], whole: LaneRun) -> LaneRun | None:
        """The fastest split schedule that fits, or the one that needs least memory; None if there is none."""
        work = lane_work(self.routes, kind, split=True)
        first = dict(enumerate(whole.orders))
        bounds = {place: most_in_flight(order) for place, order in first.items()}
        best: LaneRun | None = None
        least_s = shortest_s(work)

        def enough_s() -> float:
            """Seconds that a useful schedule must stay below."""
            return WORTHWHILE * best.seconds if best is not None and best.fits else math.inf

        for schedule in split_schedules(work, first, bounds, dict(enumerate(rooms)), kind.link, enough_s):
            found = _lane_run(work, schedule, makespan_s(work, schedule, kind.link), whole.seconds)
            found = replace(found, fits=all(map(fits, found.orders, rooms)))
            if best is None or (found.fits and (not best.fits or found.seconds < WORTHWHILE * best.seconds)):
                best = found
            if best.fits and WORTHWHILE * best.seconds <= least_s:
                break
        return best

    def _room(self, kind: LaneKind, stage: int, limit: int | None, kept: int) -> Room:
        """Room in whole micro-batches, at most all of the step's: ranks with enough memory are then alike."""
        units, sums = kind.stages[stage].units, self.sums
        largest = max(kind.sizes)
        saved, held = largest * sums.saved(units), largest * sums.held(units)
        if limit is None:
            return Room(saved, held)
        fixed, per_sample = sums.arriving(units)
        static = (
            sums.params(units)
            + self._workload.sum_bytes * sums.touched(units)
            + self._workload.state_bytes_per_element * kept
            + fixed
            + per_sample * largest
        )
        left, step = limit - static, max(1, saved)
        return Room(saved, held, None if left >= len(kind.sizes) * (saved + held) else left // step * step)


def plan_work(workload: Workload, topology: Topology, lanes: Sequence[Lane], schedule: Schedule | None = None) -> Work:
    """The step of all lanes in the orders of `schedule`, with ranks for places; None: backward in halves, in any
    order."""
    routes = ValueRoutes(workload)
    tasks: list[Task] = []
    needs: dict[Task, dict[Task, int]] = {}
    seconds: dict[Task, float] = {}
    for lane in lanes:
        split = schedule is None or any(kind == "W" for rank in lane.ranks for kind, _ in schedule[rank])
        work = lane_work(routes, LaneKind.of(lane, topology), split)
        by_rank = {task: (lane.ranks[task[0]], *task[1:]) for task in work.tasks}
        tasks += by_rank.values()
        needs |= {by_rank[t]: {by_rank[b]: size for b, size in before.items()} for t, before in work.needs.items()}
        seconds |= {by_rank[t]: taken for t, taken in work.seconds.items()}
    return Work(tuple(tasks), needs, seconds)


def _lane_run(work: Work, schedule: Schedule, seconds: float, whole_s: float) -> LaneRun:
    busy = [0.0] * len(schedule)
    for (place, _, _), duration in work.seconds.items():
        busy[place] += duration
    return LaneRun(tuple(schedule[place] for place in range(len(busy))), tuple(busy), seconds, whole_s)


def fits(order: Sequence[Action], room: Room) -> bool:
    """Whether the activations kept for backward passes fit."""
    most = max((a * room.saved + b * room.held for a, b in levels(order)), default=0)
    return room.bytes is None or most <= room.bytes
