"""The order of micro-batches on every rank, found by running a lane abstractly.

Every rank is a worker that may run ("F", mb) once all inputs have arrived and ("B", mb) once all gradients have. It
prefers backward, then the task that has waited longest, and holds at most its *bound* of micro-batches between forward
and backward. On this clock forward takes 1 and backward 2, which gives lanes of width 1 the 1F1B order (Narayanan et
al., PipeDream, SOSP 2019, section 3.2; with flushes as in Megatron-LM, SC 2021): stage s of p runs p - s forwards, then
backward and forward alternate. A second run on modelled durations gives the length of the lane's step.

Lanes with equal members are one *kind*: results for one hold for all, with other ranks in the same places.

    rank 0 of 2, 3 micro-batches  ->  F0 F1 B0 F2 B1 B2
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.order.hops import ValueRoutes
from elaswave_fx.plan.work.cost import backward_s, forward_s, weights_s
from elaswave_fx.plan.work.spans import Span, consecutive
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Link, Topology

Action = tuple[str, int]
"""One micro-batch through all units of the rank's tile: ("F", micro-batch) forward, ("B", micro-batch) backward; or
backward in halves, ("I", micro-batch) for the gradients of values, later ("W", micro-batch) for those of parameters."""

Location = int
"""Place of a rank within its lane, counted stage by stage."""

Task = tuple[Location, str, int]
"""An action of a rank: (place, kind, micro-batch)."""

Schedule = Mapping[Location, tuple[Action, ...]]

LinkOf = Callable[[Location, Location], Link]
"""The link between two places."""


class StageKind(NamedTuple):
    """The properties of a stage that matter: its units, and the number of micro-batches and the speed of each rank."""

    units: Span
    deal: tuple[int, ...]
    speeds: tuple[float, ...]


class LaneKind(NamedTuple):
    """The properties of a lane that matter, whichever its ranks are.

    `sizes` of its micro-batches, in samples. `links`: of each two places, (0, 1), (0, 2), …, (1, 2), …; or a single one
    if all are alike.
    """

    stages: tuple[StageKind, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...] = (Link(),)

    @staticmethod
    def of(lane: Lane, topology: Topology) -> LaneKind:
        """The kind of a lane of alive ranks."""
        members = {rank: topology.member(rank) for rank in lane.ranks}
        stages = tuple(StageKind(s.units, s.deal, tuple(members[r].speed for r in s.ranks)) for s in lane.stages)
        return LaneKind(stages, tuple(len(m) for m in lane.micro_batches), topology.links_among(lane.ranks))

    def link(self, a: Location, b: Location) -> Link:
        if len(self.links) == 1:
            return self.links[0]
        low, high, count = min(a, b), max(a, b), sum(len(stage.deal) for stage in self.stages)
        return self.links[low * count - low * (low + 1) // 2 + high - low - 1]

    @property
    def borders(self) -> tuple[int, ...]:
        """Borders of its stages' units, one more than stages."""
        return (self.stages[0].units.lo, *(stage.units.hi for stage in self.stages))

    @property
    def places(self) -> list[range]:
        """Places by stage."""
        return [range(s.lo, s.hi) for s in consecutive([len(stage.deal) for stage in self.stages])]


@dataclass(frozen=True)
class Work:
    """A step as tasks: prerequisites of each with the bytes to transfer, and its seconds."""

    tasks: tuple[Task, ...]
    needs: Mapping[Task, Mapping[Task, int]]
    seconds: Mapping[Task, float]

    @cached_property
    def wiring(self) -> Wiring:
        """The tasks by number."""
        return Wiring.of(self.tasks, self.needs)

    def taking(self, seconds: Mapping[Task, float]) -> Work:
        """The same tasks with these seconds."""
        other = Work(self.tasks, self.needs, seconds)
        other.__dict__["wiring"] = self.wiring
        return other


@dataclass(frozen=True)
class Wiring:
    """Tasks by number, for runs of a step: `place` of each, counted from 0; the number of its prerequisites; its
    dependents, with the bytes to transfer."""

    number: Mapping[Task, int]
    places: Sequence[Location]
    place: Sequence[int]
    missing: Sequence[int]
    after: Sequence[Sequence[tuple[int, int]]]

    @staticmethod
    def of(tasks: Sequence[Task], needs: Mapping[Task, Mapping[Task, int]]) -> Wiring:
        number = {task: at for at, task in enumerate(tasks)}
        places = sorted({place for place, _, _ in tasks})
        at = {place: index for index, place in enumerate(places)}
        after: list[list[tuple[int, int]]] = [[] for _ in tasks]
        for later, task in enumerate(tasks):
            for before, size in needs[task].items():
                after[number[before]].append((later, size))
        missing = [len(needs[task]) for task in tasks]
        return Wiring(number, places, [at[place] for place, _, _ in tasks], missing, after)


def lane_work(routes: ValueRoutes, kind: LaneKind, split: bool = False) -> Work:
    """The tasks of a step of such a lane; `split`: with backward passes in halves."""
    half, workload = "I" if split else "B", routes.workload
    tasks: list[Task] = []
    needs: dict[Task, dict[Task, int]] = {}
    seconds: dict[Task, float] = {}
    holders = [_holders(stage, places) for stage, places in zip(kind.stages, kind.places, strict=True)]
    for stage, held in zip(kind.stages, holders, strict=True):
        speeds = [speed for speed, count in zip(stage.speeds, stage.deal, strict=True) for _ in range(count)]
        lo, hi = stage.units.lo, stage.units.hi
        taken = {
            each: tuple(find(workload, lo, hi, *each) for find in (forward_s, backward_s, weights_s))
            for each in set(zip(kind.sizes, speeds, strict=True))
        }
        for (place, own), each in zip(held, zip(kind.sizes, speeds, strict=True), strict=True):
            forward, backward = (place, "F", own), (place, half, own)
            tasks += [forward, backward]
            seconds[forward], seconds[backward], weights_only = taken[each]
            needs[forward], needs[backward] = {}, {forward: 0}
            if split:
                weights = (place, "W", own)
                tasks.append(weights)
                seconds[weights] = weights_only
                seconds[backward] -= weights_only
                needs[weights] = {backward: 0}
    for (source, target), traffic in routes.traffic(kind.borders).items():
        for (a, of_a), (b, of_b), samples in zip(holders[source], holders[target], kind.sizes, strict=True):
            needs[b, "F", of_b][a, "F", of_a] = traffic.bytes(samples)
            if traffic.back is not None:
                needs[a, half, of_a][b, half, of_b] = traffic.back.bytes(samples)
    return Work(tuple(tasks), needs, seconds)


def _holders(stage: StageKind, places: range) -> list[tuple[Location, int]]:
    """(place, its own micro-batch number) of every micro-batch in this stage."""
    return [(place, own) for place, count in zip(places, stage.deal, strict=True) for own in range(count)]


def first_bounds(routes: ValueRoutes, kind: LaneKind) -> dict[Location, int]:
    """Initial bounds of micro-batches in flight: one, plus an even share of those of later stages; one more where the
    next stage has another width, as it takes micro-batches of several ranks alternately. With equal widths this is
    depth minus stage."""
    depth = len(kind.stages)
    of_stage = [1] * depth
    later: defaultdict[int, set[int]] = defaultdict(set)
    for source, target in routes.traffic(kind.borders):
        later[source].add(target)
    for stage in reversed(range(depth)):
        own = len(kind.stages[stage].deal)
        widths = {t: len(kind.stages[t].deal) for t in later[stage]}
        of_stage[stage] = 1 + max((-(-of_stage[t] * w // own) + (w != own) for t, w in widths.items()), default=0)
    return {
        place: min(of_stage[number], count)
        for number, (stage, places) in enumerate(zip(kind.stages, kind.places, strict=True))
        for place, count in zip(places, stage.deal, strict=True)
    }


def find_schedule(work: Work, bounds: Mapping[Location, int]) -> Schedule:
    """The order per place; bounds too narrow to run to the end are widened where they block ranks.

    Raise PlanError if tasks wait for each other in a circle, which no bound can break.
    """
    bounds = dict(bounds)
    while True:
        run = _Run(work, bounds)
        if run.to_end():
            return {place: tuple(order) for place, order in run.order.items()}
        held_up = run.held_up()
        if not held_up:
            raise PlanError(f"schedule: {run.waiting()} never get what they wait for; needs must not form a circle")
        for place in held_up:
            bounds[place] += 1


TICKS = {"F": 1.0, "B": 2.0}
"""The clock on which an order is found."""


class _Run:
    """One abstract run of a step: an event simulation on the clock of `TICKS`."""

    def __init__(self, work: Work, bounds: Mapping[Location, int]) -> None:
        self._tasks, self._wiring = work.tasks, work.wiring
        places = self._wiring.places
        self._bounds = [bounds[place] for place in places]
        self._missing = list(self._wiring.missing)
        self._orders: list[list[Action]] = [[] for _ in places]
        # By kind and place: (ready since, number of the micro-batch, task).
        self._ready: dict[str, list[list[tuple[float, int, int]]]] = {kind: [[] for _ in places] for kind in "FB"}
        self._in_flight = [0] * len(places)
        self._now = 0.0
        for task, missing in enumerate(self._missing):
            if missing == 0:
                self._offer(task)

    @property
    def order(self) -> Mapping[Location, Sequence[Action]]:
        """Begun tasks, by place."""
        return dict(zip(self._wiring.places, self._orders, strict=True))

    def to_end(self) -> bool:
        """Run until all is done or no task can run. Return whether all is done."""
        idle = set(range(len(self._orders)))
        events: list[tuple[float, int]] = []
        done = 0
        while True:
            for place in sorted(idle):
                task = self._choose(place)
                if task is not None:
                    idle.discard(place)
                    heapq.heappush(events, (self._now + TICKS[self._tasks[task][1]], task))
            if not events:
                return done == len(self._tasks)
            self._now = events[0][0]
            while events and events[0][0] == self._now:
                task = heapq.heappop(events)[1]
                idle.add(self._wiring.place[task])
                done += 1
                self._finish(task)

    def held_up(self) -> list[Location]:
        """Places that could run a task with a wider bound."""
        return [
            place
            for at, place in enumerate(self._wiring.places)
            if self._ready["F"][at] and self._in_flight[at] >= self._bounds[at]
        ]

    def waiting(self) -> str:
        """The first few tasks that were not reached, in words."""
        left = [task for task, missing in zip(self._tasks, self._missing, strict=True) if missing > 0]
        return ", ".join(f"{kind}{index} of place {place}" for place, kind, index in left[:4])

    def _offer(self, task: int) -> None:
        _, kind, index = self._tasks[task]
        heapq.heappush(self._ready[kind][self._wiring.place[task]], (self._now, index, task))

    def _choose(self, place: int) -> int | None:
        if self._ready["B"][place]:
            kind = "B"
        elif self._ready["F"][place] and self._in_flight[place] < self._bounds[place]:
            kind = "F"
            self._in_flight[place] += 1
        else:
            return None
        _, index, task = heapq.heappop(self._ready[kind][place])
        self._orders[place].append((kind, index))
        return task

    def _finish(self, task: int) -> None:
        if self._tasks[task][1] == "B":
            self._in_flight[self._wiring.place[task]] -= 1
        for later, _ in self._wiring.after[task]:
            self._missing[later] -= 1
            if self._missing[later] == 0:
                self._offer(later)


def most_in_flight(order: Sequence[Action]) -> int:
    """The most micro-batches between forward and backward, or its first half, at the same time."""
    return max((in_flight for in_flight, _ in levels(order)), default=0)


def levels(order: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Micro-batches between forward and backward, and between the halves of backward, after each action."""
    in_flight = waiting = 0
    for kind, _ in order:
        in_flight += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        waiting += {"F": 0, "B": 0, "I": 1, "W": -1}[kind]
        yield in_flight, waiting


def makespan_s(work: Work, schedule: Schedule, link: LinkOf) -> float:
    """Seconds from the first forward to the last backward, including transfers between places.

    Raise PlanError with the waiting tasks if the orders block each other.
    """
    wiring, tasks, seconds = work.wiring, work.tasks, work.seconds
    places, place_of, after = wiring.places, wiring.place, wiring.after
    orders = [[wiring.number[place, kind, index] for kind, index in schedule.get(place, ())] for place in places]
    missing = list(wiring.missing)
    arrived = [0.0] * len(tasks)  # when the last piece so far of a task's inputs arrives
    position, free = [0] * len(places), [0.0] * len(places)
    links = _Links(link, places)
    waiting = list(range(len(places)))  # places that may be able to run a task
    while waiting:
        place = waiting.pop()
        order, at, now = orders[place], position[place], free[place]
        while at < len(order):
            task = order[at]
            if missing[task]:
                break
            at += 1
            now = max(now, arrived[task]) + seconds[tasks[task]]
            for later, size in after[task]:
                missing[later] -= 1
                target = place_of[later]
                if target == place:
                    continue
                there = links.arrival_s(place, target, size, now)
                if there > arrived[later]:
                    arrived[later] = there
                if not missing[later]:
                    waiting.append(target)
        position[place], free[place] = at, now
    stuck = [tasks[order[at]] for order, at in zip(orders, position, strict=True) if at < len(order)]
    if stuck:
        names = ", ".join(f"{kind}{index} of place {place}" for place, kind, index in stuck)
        raise PlanError(f"schedule: {names} wait for each other; the orders of neighbouring ranks must agree")
    return max(free, default=0.0)


class _Links:
    """The links of one abstract run, places counted from 0: messages on a link pass one after another, in the order of
    requests."""

    def __init__(self, link: LinkOf, places: Sequence[Location]) -> None:
        self._link, self._places = link, places
        self._known: dict[tuple[int, int], Link] = {}
        self._free_s: dict[tuple[int, int], float] = {}

    def arrival_s(self, source: int, target: int, size: int, sent_s: float) -> float:
        """Arrival of a message sent at `sent_s`."""
        pair = (source, target)
        if pair not in self._known:
            self._known[pair] = self._link(self._places[source], self._places[target])
        link = self._known[pair]
        passed_s = max(sent_s, self._free_s.get(pair, 0.0)) + size / link.bytes_per_s
        self._free_s[pair] = passed_s
        return passed_s + link.latency_s
