"""Orders of work for backward passes in halves, by list scheduling on modelled seconds.

The stage before waits for gradients of values (I); for those of parameters (W) nobody waits before the reduction, so
they are done where a rank would else be idle (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). A rank that is
free takes an I or an F that is there. Else it takes a W, unless an I or F is about to come. How far F may run ahead and
how much may be kept is bounded: a rank without room for another F takes a W. Two preferences, two kinds of patience and
a few bounds are tried; the planner takes the shortest step.

    rank 0 of 2, 3 micro-batches  ->  F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1 of 2, 3 micro-batches  ->  F0 I0 F1 I1 W0 F2 I2 W1 W2
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elaswave_fx.plan.schedule import Action, LinkOf, Place, Schedule, Task, Work

_WIDTHS = ((0.0, 1.0), (0.0, 1.5), (0.5, 1.5), (1.0, 2.0))
"""How many more micro-batches than in 1F1B may be in flight, in depths of the rank; and what a rank may keep, in what
the fullest rank of 1F1B keeps. The first takes no more memory than that, the last fills every gap of equal stages."""

_PREFERENCES = ("FI", "IF")

_PATIENCE = (0.1, 0.5)
"""A W is put off for an I or F that will be there within this fraction of its duration."""


@dataclass(frozen=True)
class Room:
    """A rank's memory for activations: bytes of a micro-batch before I and after it, and of all at once (None: any)."""

    saved: int
    held: int
    bytes: int | None = None


@dataclass(frozen=True)
class _Rule:
    """How ranks choose: the kinds in order of preference, patience, and per rank the bounds of micro-batches in flight
    and of bytes kept."""

    preference: str
    patience: float
    in_flight: Mapping[Place, int]
    kept: Mapping[Place, float]


def split_schedules(
    work: Work, first: Schedule, bounds: Mapping[Place, int], rooms: Mapping[Place, Room], link: LinkOf
) -> Iterator[Schedule]:
    """Orders of the tasks of `work`, which has halves; those that keep least come first.

    `first`: the orders of the same step with whole backward passes; W follow the order of its B, so that sums have the
    same bits. `bounds`: how many micro-batches are in flight in it.
    """
    weights = {place: tuple(mb for kind, mb in order if kind == "B") for place, order in first.items()}
    deepest = max(bounds.values(), default=1)
    tried: list[tuple[Mapping[Place, int], Mapping[Place, float]]] = []  # alike where memory is short
    for ahead, room in _WIDTHS:
        in_flight = {place: bound + round(ahead * (bound - 1)) for place, bound in bounds.items()}
        kept = {place: _limit(rooms[place], room * deepest) for place in bounds}
        if (in_flight, kept) not in tried:
            tried.append((in_flight, kept))
    for (in_flight, kept), patience, preference in itertools.product(tried, _PATIENCE, _PREFERENCES):
        schedule = _Run(work, weights, rooms, _Rule(preference, patience, in_flight, kept), link).to_end()
        if sum(map(len, schedule.values())) == len(work.tasks):  # there was room enough to get to the end
            yield schedule


def shortest_s(work: Work) -> float:
    """No order is shorter: of each rank, when its first F can begin, and all that it has to do."""
    begin: dict[Task, float] = {}
    waiting = deque(task for task in work.tasks if task[1] == "F")
    while waiting:
        task = waiting.popleft()
        if all(before in begin for before in work.needs[task]):
            begin[task] = max((begin[before] + work.seconds[before] for before in work.needs[task]), default=0.0)
        else:
            waiting.append(task)
    busy: dict[Place, float] = defaultdict(float)
    first: dict[Place, float] = {}
    for task in work.tasks:
        busy[task[0]] += work.seconds[task]
        first[task[0]] = min(first.get(task[0], float("inf")), begin.get(task, float("inf")))
    return max(first[rank] + seconds for rank, seconds in busy.items())


def _limit(room: Room, most: float) -> float:
    """Bytes of `most` micro-batches in flight, but no more than there are."""
    wanted = most * room.saved
    return wanted if room.bytes is None else min(wanted, room.bytes)


class _Run:
    """One run of a step by a rule, on the clock of its seconds, links included."""

    def __init__(
        self,
        work: Work,
        weights: Mapping[Place, Sequence[int]],
        rooms: Mapping[Place, Room],
        rule: _Rule,
        link: LinkOf,
    ) -> None:
        self._work, self._rooms, self._rule, self._link = work, rooms, rule, link
        self._missing = {task: len(work.needs[task]) for task in work.tasks}
        self._after: dict[Task, list[tuple[Task, int]]] = defaultdict(list)
        for task in work.tasks:
            for before, size in work.needs[task].items():
                self._after[before].append((task, size))
        self._order: dict[Place, list[Action]] = {task[0]: [] for task in work.tasks}
        self._weights = {place: deque(weights[place]) for place in self._order}
        self._coming: dict[tuple[Place, str], dict[int, float]] = {(r, k): {} for r in self._order for k in "FIW"}
        self._arrival = dict.fromkeys(work.tasks, 0.0)
        self._in_flight = dict.fromkeys(self._order, 0)
        self._kept = dict.fromkeys(self._order, 0)

    def to_end(self) -> Schedule:
        """The orders in which tasks ran, until nothing moved any more."""
        events: list[tuple[float, Task, bool]] = []  # when a task has ended, or all that it needs is there
        for task in self._work.tasks:
            if self._missing[task] == 0:
                self._announce(task, events)
        busy: set[Place] = set()
        while events:
            now, free = events[0][0], set[Place]()
            while events and events[0][0] == now:
                _, task, ended = heapq.heappop(events)
                free.add(task[0])
                if ended:
                    busy.discard(task[0])
                    self._release(task)
            for place in sorted(free - busy):
                task = self._choose(place, now)
                if task is not None:
                    busy.add(place)
                    self._start(task, now, events)
        return {place: tuple(order) for place, order in self._order.items()}

    def _announce(self, task: Task, events: list[tuple[float, Task, bool]]) -> None:
        """It is known when all that the task needs will be there."""
        self._coming[task[0], task[1]][task[2]] = self._arrival[task]
        heapq.heappush(events, (self._arrival[task], task, False))

    def _start(self, task: Task, now: float, events: list[tuple[float, Task, bool]]) -> None:
        place, kind, mb = task
        del self._coming[place, kind][mb]
        self._in_flight[place] += {"F": 1, "I": -1, "W": 0}[kind]
        self._kept[place] += {"F": self._rooms[place].saved, "I": self._rooms[place].held, "W": 0}[kind]
        self._order[place].append((kind, mb))
        end = now + self._work.seconds[task]
        heapq.heappush(events, (end, task, True))
        for later, size in self._after[task]:
            self._arrival[later] = max(self._arrival[later], end + self._way_s(place, later[0], size))
            self._missing[later] -= 1
            if self._missing[later] == 0:
                self._announce(later, events)

    def _way_s(self, source: Place, target: Place, size: int) -> float:
        """How long a message is under way on a link that is free."""
        if source == target:
            return 0.0
        link = self._link(source, target)
        return link.latency_s + size / link.bytes_per_s

    def _release(self, task: Task) -> None:
        place, kind, _ = task
        self._kept[place] -= {"F": 0, "I": self._rooms[place].saved, "W": self._rooms[place].held}[kind]

    def _choose(self, place: Place, now: float) -> Task | None:
        """What a free rank does next; None if it waits."""
        soonest = float("inf")
        for kind in self._rule.preference:
            coming = self._coming[place, kind]
            if not coming or not self._allowed(place, kind):
                continue
            at, mb = min((max(now, at), mb) for mb, at in coming.items())
            if at == now:
                return place, kind, mb
            soonest = min(soonest, at)
        weights = self._weights[place]
        if not weights or self._coming[place, "W"].get(weights[0], float("inf")) > now:
            return None
        task = (place, "W", weights[0])
        if soonest - now < self._rule.patience * self._work.seconds[task]:
            return None
        weights.popleft()
        return task

    def _allowed(self, place: Place, kind: str) -> bool:
        """Whether the bounds have room for an F, or for what an I leaves."""
        room, kept, in_flight = self._rooms[place], self._kept[place], self._in_flight[place]
        if kind == "I":
            waits_for_none = kept == in_flight * room.saved
            return waits_for_none or kept + room.held - room.saved <= self._rule.kept[place]
        return in_flight < self._rule.in_flight[place] and (kept == 0 or kept + room.saved <= self._rule.kept[place])
