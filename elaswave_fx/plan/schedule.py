"""The order of micro-batches on every rank, found by running the step abstractly.

Every rank is a worker that may run ("F", mb) once all its pieces are there and ("B", mb) once all gradients are. It
prefers backward, and holds at most its *bound* of micro-batches between forward and backward. Pipelines whose
micro-batches line up run on a clock in which forward takes 1 and backward 2; that gives the 1F1B order (Narayanan et
al., PipeDream, SOSP 2019, section 3.2; with flushes as in Megatron-LM, SC 2021): stage s of p runs p - s forwards,
then backward and forward in turn. Others run on their modelled durations.

    rank 0 of 2, 3 micro-batches  ->  F0 F1 B0 F2 B1 B2
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.cost import Workload, backward_s, forward_s, value_samples
from elaswave_fx.plan.plan import Action, Hop
from elaswave_fx.plan.tiling import Tile
from elaswave_fx.plan.topology import Link, Rank, Topology

Task = tuple[Rank, str, int]
"""An action of a rank: (rank, "F" or "B", micro-batch)."""

Schedule = Mapping[Rank, tuple[Action, ...]]


@dataclass(frozen=True)
class Work:
    """A step as tasks: what each waits for (with the bytes that travel) and how long it takes.

    `ticks` is the clock on which the order is found, `lined_up` whether it is the 1F1B clock on every rank.
    """

    tasks: tuple[Task, ...]
    needs: Mapping[Task, Mapping[Task, int]]
    seconds: Mapping[Task, float]
    ticks: Mapping[Task, float]
    lined_up: bool


def step_work(workload: Workload, topology: Topology, tiles: Sequence[Tile], hops: Sequence[Hop]) -> Work:
    """The tasks of a step of these tiles."""
    tasks: list[Task] = []
    needs: dict[Task, dict[Task, int]] = {}
    seconds: dict[Task, float] = {}
    for tile in tiles:
        speed = topology.member(tile.rank).speed
        for index, samples in enumerate(tile.micro_batches):
            forward, backward = (tile.rank, "F", index), (tile.rank, "B", index)
            tasks += [forward, backward]
            seconds[forward] = forward_s(workload, tile.units.lo, tile.units.hi, len(samples), speed)
            seconds[backward] = backward_s(workload, tile.units.lo, tile.units.hi, len(samples), speed)
            needs[forward], needs[backward] = {}, {forward: 0}
    for hop in hops:
        value = workload.values[hop.value]
        size = value.bytes_per_sample * value_samples(value, len(hop.samples))
        source, target = (hop.source, hop.source_micro_batch), (hop.target, hop.target_micro_batch)
        _add_need(needs, (target[0], "F", target[1]), (source[0], "F", source[1]), size)
        if value.has_grad:
            _add_need(needs, (source[0], "B", source[1]), (target[0], "B", target[1]), size)
    aligned = _aligned_ranks(tiles, hops)
    ticks = {task: (1.0 if task[1] == "F" else 2.0) if task[0] in aligned else seconds[task] for task in tasks}
    return Work(tuple(tasks), needs, seconds, ticks, len(aligned) == len(tiles))


def _add_need(needs: dict[Task, dict[Task, int]], task: Task, before: Task, size: int) -> None:
    needs[task][before] = needs[task].get(before, 0) + size


def _aligned_ranks(tiles: Sequence[Tile], hops: Sequence[Hop]) -> frozenset[Rank]:
    """Ranks that exchange pieces only with ranks of the same micro-batches, directly or over others."""
    pieces = {tile.rank: tile.micro_batches for tile in tiles}
    neighbours: dict[Rank, set[Rank]] = defaultdict(set)
    crooked: set[Rank] = set()
    for hop in hops:
        neighbours[hop.source].add(hop.target)
        neighbours[hop.target].add(hop.source)
        if pieces[hop.source] != pieces[hop.target]:
            crooked.add(hop.source)
    spread = list(crooked)
    while spread:
        for rank in neighbours[spread.pop()] - crooked:
            crooked.add(rank)
            spread.append(rank)
    return frozenset(pieces) - crooked


def first_bounds(tiles: Sequence[Tile], hops: Sequence[Hop], extra: int = 0) -> dict[Rank, int]:
    """In-flight bounds to start from: what all later stages hold, and one of its own, in own micro-batches.

    For equal tiles this is depth minus stage. `extra` micro-batches are added to each bound.
    """
    targets: dict[Rank, set[Rank]] = defaultdict(set)
    for hop in hops:
        targets[hop.source].add(hop.target)
    ahead: dict[Rank, int] = {}
    bounds: dict[Rank, int] = {}
    for tile in sorted(tiles, key=lambda t: -t.units.lo):
        largest = max(len(m) for m in tile.micro_batches)
        ahead[tile.rank] = largest + max((ahead[t] for t in targets[tile.rank]), default=0)
        bounds[tile.rank] = min(len(tile.micro_batches), -(-ahead[tile.rank] // largest) + extra)
    return bounds


def find_schedule(work: Work, bounds: Mapping[Rank, int]) -> Schedule:
    """The order per rank; bounds too narrow to run to the end are widened where ranks are held up by them.

    PlanError if tasks wait for each other in a circle, which no bound can mend.
    """
    bounds = dict(bounds)
    while True:
        run = _Run(work, bounds)
        if run.to_end():
            return {rank: tuple(order) for rank, order in run.order.items()}
        held_up = run.held_up()
        if not held_up:
            raise PlanError(f"schedule: {run.waiting()} never get what they wait for; needs must not form a circle")
        for rank in held_up:
            bounds[rank] += 1


class _Run:
    """One abstract run of a step: an event simulation on the clock of `work.ticks`."""

    def __init__(self, work: Work, bounds: Mapping[Rank, int]) -> None:
        self._work = work
        self._bounds = bounds
        self._missing = {task: len(work.needs[task]) for task in work.tasks}
        self._after: dict[Task, list[Task]] = defaultdict(list)
        for task in work.tasks:
            for before in work.needs[task]:
                self._after[before].append(task)
        self.order: dict[Rank, list[Action]] = {task[0]: [] for task in work.tasks}
        self._ready: dict[tuple[Rank, str], list[int]] = {(r, k): [] for r in self.order for k in "FB"}
        self._in_flight = dict.fromkeys(self.order, 0)
        for task in work.tasks:
            self._offer(task)

    def to_end(self) -> bool:
        """Run until all is done or nothing moves; whether all is done."""
        idle = set(self.order)
        events: list[tuple[float, Task]] = []
        now, done = 0.0, 0
        while True:
            for rank in sorted(idle):
                task = self._choose(rank)
                if task is not None:
                    idle.discard(rank)
                    heapq.heappush(events, (now + self._work.ticks[task], task))
            if not events:
                return done == len(self._work.tasks)
            now = events[0][0]
            while events and events[0][0] == now:
                task = heapq.heappop(events)[1]
                idle.add(task[0])
                done += 1
                self._finish(task)

    def held_up(self) -> list[Rank]:
        """Ranks that could go on if their bound were wider."""
        return [r for r in self.order if self._ready[r, "F"] and self._in_flight[r] >= self._bounds[r]]

    def waiting(self) -> str:
        """The first few tasks that were not reached, in words."""
        left = [task for task in self._work.tasks if self._missing[task] > 0]
        return ", ".join(f"{kind}{index} of rank {rank}" for rank, kind, index in left[:4])

    def _offer(self, task: Task) -> None:
        if self._missing[task] == 0:
            heapq.heappush(self._ready[task[0], task[1]], task[2])

    def _choose(self, rank: Rank) -> Task | None:
        if self._ready[rank, "B"]:
            kind = "B"
        elif self._ready[rank, "F"] and self._in_flight[rank] < self._bounds[rank]:
            kind = "F"
            self._in_flight[rank] += 1
        else:
            return None
        index = heapq.heappop(self._ready[rank, kind])
        self.order[rank].append((kind, index))
        return (rank, kind, index)

    def _finish(self, task: Task) -> None:
        if task[1] == "B":
            self._in_flight[task[0]] -= 1
        for later in self._after[task]:
            self._missing[later] -= 1
            self._offer(later)


def most_in_flight(order: Sequence[Action]) -> int:
    """The most micro-batches that are between forward and backward at once."""
    level = most = 0
    for kind, _ in order:
        level += 1 if kind == "F" else -1
        most = max(most, level)
    return most


def makespan_s(work: Work, schedule: Schedule, topology: Topology) -> float:
    """Seconds from the first forward to the last backward; pieces between ranks take their time on the links.

    PlanError names the waiting tasks if the orders block each other.
    """
    finished: set[Task] = set()
    arrived: dict[Task, float] = defaultdict(float)  # the last piece so far of what a task needs
    position = dict.fromkeys(schedule, 0)
    free = dict.fromkeys(schedule, 0.0)
    after: dict[Task, list[tuple[Task, int]]] = defaultdict(list)
    for task, needs in work.needs.items():
        for before, size in needs.items():
            after[before].append((task, size))
    links = _Links(topology)
    moved = True
    while moved:
        moved = False
        for rank, order in schedule.items():
            while position[rank] < len(order):
                task = (rank, *order[position[rank]])
                if not finished.issuperset(work.needs[task]):
                    break
                free[rank] = max(free[rank], arrived[task]) + work.seconds[task]
                finished.add(task)
                for later, size in after[task]:
                    arrived[later] = max(arrived[later], links.arrival_s(rank, later[0], size, free[rank]))
                position[rank] += 1
                moved = True
    stuck = [(r, *schedule[r][position[r]]) for r in schedule if position[r] < len(schedule[r])]
    if stuck:
        names = ", ".join(f"{kind}{index} of rank {rank}" for rank, kind, index in stuck)
        raise PlanError(f"schedule: {names} wait for each other; the orders of neighbouring ranks must agree")
    return max(free.values())


class _Links:
    """The links of one abstract run: a rank's messages to another go one after another, in the order of asking."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._known: dict[tuple[Rank, Rank], Link] = {}
        self._free_s: dict[tuple[Rank, Rank], float] = {}

    def arrival_s(self, source: Rank, target: Rank, size: int, sent_s: float) -> float:
        """When a message that is sent at `sent_s` is there."""
        if source == target:
            return sent_s
        pair = (source, target)
        if pair not in self._known:
            self._known[pair] = self._topology.link(source, target)
        link = self._known[pair]
        passed_s = max(sent_s, self._free_s.get(pair, 0.0)) + size / link.bytes_per_s
        self._free_s[pair] = passed_s
        return passed_s + link.latency_s
