"""Orders of work for backward passes in halves, by list scheduling on modelled seconds.

The previous stage waits for gradients of values (I). Gradients of parameters (W) are needed only by the reduction, so
they fill idle time (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024). A free rank takes a ready I or F; else it
takes a W, unless an I or F is about to become ready. F in flight and kept bytes are bounded: a rank without room for
another F takes a W. Two preferences, two patiences and a few bounds are tried; the planner takes the shortest step.

    rank 0 of 2, 3 micro-batches  ->  F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1 of 2, 3 micro-batches  ->  F0 I0 F1 I1 W0 F2 I2 W1 W2
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elaswave_fx.plan.order.schedule import Action, LinkOf, Location, Schedule, Task, Work
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.topology import Link

_WIDTHS = ((0.0, 1.0), (0.0, 1.5), (0.5, 1.5), (1.0, 2.0))
"""(micro-batches in flight beyond 1F1B, in depths of the rank; bytes kept, in the bytes of 1F1B's fullest rank). The
first needs no more memory than 1F1B, the last fills every gap of equal stages."""

_PREFERENCES = ("FI", "IF")

_PATIENCE = (0.1, 0.5)
"""A W is postponed for an I or F that becomes ready within this fraction of its duration."""


@dataclass(frozen=True)
class Room:
    """A rank's memory for activations: bytes of a micro-batch before I and after it, and bytes available (None:
    unbounded)."""

    saved: int
    held: int
    bytes: int | None = None


@dataclass(frozen=True)
class _Rule:
    """A rule of choice: kinds by preference, patience, and per rank the bounds of micro-batches in flight and of bytes
    kept."""

    preference: str
    patience: float
    in_flight: Mapping[Location, int]
    kept: Mapping[Location, float]


def split_schedules(
    work: Work,
    first: Schedule,
    bounds: Mapping[Location, int],
    rooms: Mapping[Location, Room],
    link: LinkOf,
    enough_s: Callable[[], float] = lambda: math.inf,
) -> Iterator[Schedule]:
    """Orders of the tasks of `work`, which has halves, by distinct rules, least memory first. An order is dropped once
    it is known to take `enough_s` or longer; that limit may change meanwhile.

    `first`: the orders of the same step with whole backward passes. W follow the order of its B, so that sums have the
    same bits. `bounds`: micro-batches in flight in it.
    """
    weights = {place: tuple(mb for kind, mb in order if kind == "B") for place, order in first.items()}
    deepest = max(bounds.values(), default=1)
    steps = _Steps(work, link)
    tried: list[tuple[Mapping[Location, int], Mapping[Location, float]]] = []  # alike where memory is short
    for ahead, room in _WIDTHS:
        in_flight = {place: bound + round(ahead * (bound - 1)) for place, bound in bounds.items()}
        kept = {place: _limit(rooms[place], room * deepest) for place in bounds}
        if (in_flight, kept) not in tried:
            tried.append((in_flight, kept))
    unbounded: set[tuple[float, str]] = set()  # a wider bound does not change this
    for (in_flight, kept), patience, preference in itertools.product(tried, _PATIENCE, _PREFERENCES):
        if (patience, preference) in unbounded:
            continue
        run = _Run(steps, weights, rooms, _Rule(preference, patience, in_flight, kept), enough_s() * (1 + ROUNDING))
        schedule = run.to_end()
        if not run.was_bounded:
            unbounded.add((patience, preference))
        if sum(map(len, schedule.values())) == len(work.tasks):  # memory and time were enough to reach the end
            yield schedule


def shortest_s(work: Work) -> float:
    """Lower bound of all orders: each rank's earliest first F plus all its work."""
    begin: dict[Task, float] = {}
    waiting = deque(task for task in work.tasks if task[1] == "F")
    while waiting:
        task = waiting.popleft()
        if all(before in begin for before in work.needs[task]):
            begin[task] = max((begin[before] + work.seconds[before] for before in work.needs[task]), default=0.0)
        else:
            waiting.append(task)
    busy: dict[Location, float] = defaultdict(float)
    first: dict[Location, float] = {}
    for task in work.tasks:
        busy[task[0]] += work.seconds[task]
        first[task[0]] = min(first.get(task[0], float("inf")), begin.get(task, float("inf")))
    return max(first[rank] + seconds for rank, seconds in busy.items())


def _limit(room: Room, most: float) -> float:
    """Bytes of `most` micro-batches in flight, at most those available."""
    wanted = most * room.saved
    return wanted if room.bytes is None else min(wanted, room.bytes)


class _Steps:
    """Data shared by all runs of a step: tasks by number, their seconds, and dependents with the seconds of transfer on
    a free link."""

    def __init__(self, work: Work, link: LinkOf) -> None:
        self.tasks, wiring = work.tasks, work.wiring
        self.places, self.place, self.missing = wiring.places, wiring.place, wiring.missing
        self.seconds = [work.seconds[task] for task in work.tasks]
        self._link = link
        self._links: dict[tuple[int, int], Link] = {}
        self.after = [
            [(later, self._way_s(self.place[task], self.place[later], size)) for later, size in waiting]
            for task, waiting in enumerate(wiring.after)
        ]

    def _way_s(self, source: int, target: int, size: int) -> float:
        if source == target:
            return 0.0
        if (source, target) not in self._links:
            self._links[source, target] = self._link(self.places[source], self.places[target])
        link = self._links[source, target]
        return link.latency_s + size / link.bytes_per_s


class _Run:
    """One run of a step by a rule, on the clock of its seconds, links included. Places count from 0."""

    def __init__(
        self,
        steps: _Steps,
        weights: Mapping[Location, Sequence[int]],
        rooms: Mapping[Location, Room],
        rule: _Rule,
        enough_s: float,
    ) -> None:
        """`enough_s`: abandon the run when it cannot end earlier."""
        self._steps, places = steps, steps.places
        self._preference, self._patience = rule.preference, rule.patience
        self._most_in_flight = [rule.in_flight[place] for place in places]
        self._most_kept = [rule.kept[place] for place in places]
        self._saved, self._held = [rooms[place].saved for place in places], [rooms[place].held for place in places]
        self._missing = list(steps.missing)
        self._arrival = [0.0] * len(steps.tasks)
        self._order: list[list[Action]] = [[] for _ in places]
        self._weights = [deque(weights[place]) for place in places]
        # By kind and place: number of the micro-batch -> task, once the arrival of all its inputs is known.
        self._coming: dict[str, list[dict[int, int]]] = {kind: [{} for _ in places] for kind in "FIW"}
        self._in_flight, self._kept = [0] * len(places), [0] * len(places)
        self.was_bounded = False
        self._left_s = [0.0] * len(places)  # tasks left for each rank
        for task, place in enumerate(steps.place):
            self._left_s[place] += steps.seconds[task]
        self._enough_s = enough_s
        self._events: list[tuple[float, int, bool]] = []  # when a task has ended, or all its inputs have arrived

    def to_end(self) -> Schedule:
        """The orders in which tasks ran, until no task could run."""
        events, place_of = self._events, self._steps.place
        for task, missing in enumerate(self._missing):
            if missing == 0:
                self._announce(task)
        busy: set[int] = set()
        while events:
            now, free = events[0][0], set[int]()
            while events and events[0][0] == now:
                _, task, ended = heapq.heappop(events)
                free.add(place_of[task])
                if ended:
                    busy.discard(place_of[task])
                    self._release(task)
            for place in sorted(free - busy):
                task = self._choose(place, now)
                if task is not None:
                    if now + self._left_s[place] >= self._enough_s:
                        return {}
                    busy.add(place)
                    self._start(task, now)
        return {place: tuple(order) for place, order in zip(self._steps.places, self._order, strict=True)}

    def _announce(self, task: int) -> None:
        """Record a task whose last input has a known arrival."""
        _, kind, mb = self._steps.tasks[task]
        self._coming[kind][self._steps.place[task]][mb] = task
        heapq.heappush(self._events, (self._arrival[task], task, False))

    def _start(self, task: int, now: float) -> None:
        steps, place = self._steps, self._steps.place[task]
        _, kind, mb = steps.tasks[task]
        del self._coming[kind][place][mb]
        if kind == "F":
            self._in_flight[place] += 1
            self._kept[place] += self._saved[place]
        elif kind == "I":
            self._in_flight[place] -= 1
            self._kept[place] += self._held[place]
        self._order[place].append((kind, mb))
        self._left_s[place] -= steps.seconds[task]
        end = now + steps.seconds[task]
        heapq.heappush(self._events, (end, task, True))
        missing, arrival = self._missing, self._arrival
        for later, way_s in steps.after[task]:
            if end + way_s > arrival[later]:
                arrival[later] = end + way_s
            missing[later] -= 1
            if missing[later] == 0:
                self._announce(later)

    def _release(self, task: int) -> None:
        place, kind = self._steps.place[task], self._steps.tasks[task][1]
        if kind == "I":
            self._kept[place] -= self._saved[place]
        elif kind == "W":
            self._kept[place] -= self._held[place]

    def _choose(self, place: int, now: float) -> int | None:
        """The next task of a free rank; None if it waits."""
        soonest = math.inf
        for kind in self._preference:
            coming = self._coming[kind][place]
            if not coming:
                continue
            if not self._allowed(place, kind):
                self.was_bounded = True
                continue
            at, mb = min((max(now, self._arrival[task]), mb) for mb, task in coming.items())
            if at == now:
                return coming[mb]
            soonest = min(soonest, at)
        weights = self._weights[place]
        task = self._coming["W"][place].get(weights[0]) if weights else None
        if task is None or self._arrival[task] > now:
            return None
        if soonest - now < self._patience * self._steps.seconds[task]:
            return None
        weights.popleft()
        return task

    def _allowed(self, place: int, kind: str) -> bool:
        """Whether the bounds have room for an F, or for what an I leaves."""
        saved, kept, in_flight = self._saved[place], self._kept[place], self._in_flight[place]
        if kind == "I":
            waits_for_none = kept == in_flight * saved
            return waits_for_none or kept + self._held[place] - saved <= self._most_kept[place]
        return in_flight < self._most_in_flight[place] and (kept == 0 or kept + saved <= self._most_kept[place])
