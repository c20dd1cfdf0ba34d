"""One clock per rank: the shortest step under the power cap, and among equally short steps the least energy.

    choose_clocks(work, schedule, topology)  ->  Clocks({0: 1500 MHz, 1: 1200 MHz}, seconds=0.81, energy_j=412.0)
    with_clocks(plan)                        ->  the plan with its ranks' clocks, and predictions that hold at them

Perseus (Chung et al., arXiv 2312.06902) lowers the clocks of computations off a pipeline's critical path, one clock per
computation; EnvPipe (Choi et al., USENIX ATC 2023) does so for computations next to bubbles. Here a rank keeps one
clock for the whole step, as a change costs milliseconds. Clocks above the nominal one count too: raising a bottleneck's
clock competes with moving cuts, by the length of the simulated step.

A lower clock never shortens a step (its order is fixed), so a run with all undecided ranks at their fastest bounds
every choice from below. Branch and bound over ranks with that bound is exact; where it would take too long, the result
of a greedy descent is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.order.schedule import Location, Schedule, Work, makespan_s
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.lane_times import plan_work
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power
from elaswave_fx.plan.work.topology import Link, Rank, Topology
from elaswave_fx.words import number_ranges

PACES = 6
"""Common paces of all ranks that are tried under a cap before single ranks are changed."""

TASKS_MOST = 50_000
"""Upper bound of tasks run abstractly for one plan, in search of better clocks than the greedy ones."""

_Choice = tuple[int, ...]
"""The place of each rank's point among the operating points, ranks in the order of the schedule."""


@dataclass(frozen=True)
class Clocks:
    """A point for every rank, the seconds of the pipeline at these, and the joules of all ranks in that time."""

    points: Mapping[Location, OperatingPoint]
    seconds: float
    energy_j: float


def choose_clocks(work: Work, schedule: Schedule, topology: Topology, tasks_most: int = TASKS_MOST) -> Clocks:
    """The best clocks under the cap of `topology.power`; PlanError if even the lowest draw more."""
    power = topology.power
    assert power is not None, "the topology has operating points"
    least_w = power.least_w * len(schedule)
    if power.cap_w is not None and least_w > power.cap_w:
        raise PlanError(
            f"clocks: {len(schedule)} ranks draw at least {least_w:g} W, and all may draw {power.cap_w:g} W together"
        )
    budget = _Budget(tasks_most)
    if power.cap_w is None or power.cap_w >= max(p.watts for p in power.points) * len(schedule):
        groups = [_Group(work, schedule, topology, ranks, budget) for ranks in _independent(work, schedule)]
    else:  # Ranks share the cap: their clocks are chosen together.
        groups = [_Group(work, schedule, topology, tuple(schedule), budget)]
    floor_s = max(group.least_s() for group in groups)
    found: dict[tuple[object, ...], _Choice] = {}
    points: dict[Location, OperatingPoint] = {}
    for group in groups:
        if group.kind not in found:
            found[group.kind] = group.best(floor_s)
        points |= {rank: power.points[at] for rank, at in zip(group.ranks, found[group.kind], strict=True)}
    seconds = max(group.seconds(found[group.kind]) for group in groups)
    energy_j = math.fsum(group.energy_j(found[group.kind], seconds) for group in groups)
    return Clocks(points, seconds, energy_j)


def with_clocks(plan: Plan, tasks_most: int = TASKS_MOST) -> Plan:
    """The plan, made for nominal clocks, with a clock for each of its ranks."""
    schedule: Schedule = {int(rank): order for rank, order in plan.schedule.items()}
    work = plan_work(plan.workload, plan.topology, plan.lanes, schedule)
    clocks, power = choose_clocks(work, schedule, plan.topology, tasks_most), plan.topology.power
    assert power is not None
    nominal_s = {rank: math.fsum(work.seconds[rank, *action] for action in plan.schedule[rank]) for rank in plan.ranks}
    costs = {
        rank: replace(cost, busy_s=nominal_s[rank] * power.slowdown(clocks.points[rank]))
        for rank, cost in plan.predicted.ranks.items()
    }
    predicted = replace(plan.predicted, pipeline_s=clocks.seconds, ranks=costs, energy_j=clocks.energy_j)
    points = {Rank(rank): point for rank, point in clocks.points.items()}
    return replace(plan, clocks=points, predicted=predicted)


def clock_words(plan: Plan) -> tuple[str, ...]:
    """The clocks and their gain; empty without a choice of clocks."""
    power = plan.topology.power
    if power is None or not plan.clocks:
        return ()
    sharing: dict[OperatingPoint, list[Rank]] = {}
    for rank in plan.ranks:
        sharing.setdefault(plan.clocks[rank], []).append(rank)
    named = [f"{point.mhz:g} MHz on {_ranks(sharing[point])}" for point in sorted(sharing, key=lambda p: p.mhz)]
    drawn_w = math.fsum(point.watts for point in plan.clocks.values())
    cap = f" of {power.cap_w:g} W" if power.cap_w is not None else ""
    energy_j = plan.predicted.energy_j
    tokens = plan.workload.sample_tokens
    of_one = f"{energy_j / plan.workload.samples / max(1, tokens):.3g} J a {'token' if tokens else 'sample'}"
    joules = f"{energy_j:.4g} J in a step's pipeline, {of_one}"
    return (f"clocks: {', '.join(named)}; they draw {drawn_w:g} W{cap} at most, {joules}",)


def _ranks(ranks: Sequence[Rank]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"


def _independent(work: Work, schedule: Schedule) -> list[tuple[Location, ...]]:
    """Groups of ranks that exchange nothing in the pipeline, such as lanes."""
    group_of = {rank: {rank} for rank in schedule}
    for task, needs in work.needs.items():
        for before in needs:
            joined, other = group_of[task[0]], group_of[before[0]]
            if joined is not other:
                joined |= other
                for rank in other:
                    group_of[rank] = joined
    return sorted({tuple(sorted(group)) for group in group_of.values()})


class _Budget:
    def __init__(self, tasks: int) -> None:
        self.left = tasks


class _Group:
    """Ranks whose clocks are chosen together."""

    def __init__(
        self, work: Work, schedule: Schedule, topology: Topology, ranks: tuple[Location, ...], budget: _Budget
    ) -> None:
        assert topology.power is not None
        self.ranks, self._topology, self._budget = ranks, topology, budget
        self._power: Power = topology.power
        tasks = tuple(task for task in work.tasks if task[0] in ranks)
        self._work = replace(
            work,
            tasks=tasks,
            needs={task: work.needs[task] for task in tasks},
            seconds={task: work.seconds[task] for task in tasks},
        )
        self._schedule = {rank: schedule[rank] for rank in ranks}
        self._busy = [math.fsum(work.seconds[rank, *action] for action in schedule[rank]) for rank in ranks]
        self._slowdown = [self._power.slowdown(point) for point in self._power.points]
        self._known: dict[_Choice, float] = {}

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Key of groups with the same best choice."""
        place = {rank: index for index, rank in enumerate(self.ranks)}
        needs = tuple(
            (
                place[task[0]],
                task[1:],
                tuple((place[before[0]], before[1:], size) for before, size in before_of.items()),
            )
            for task, before_of in self._work.needs.items()
        )
        links = tuple(self._link(a, b) for a in self.ranks for b in self.ranks if a < b)
        order = tuple(self._schedule[rank] for rank in self.ranks)
        return needs, tuple(self._work.seconds.values()), links, order

    def _link(self, a: Location, b: Location) -> Link:
        return self._topology.link(Rank(a), Rank(b))

    def seconds(self, choice: _Choice) -> float:
        """The simulated length of the pipeline."""
        if choice not in self._known:
            self._budget.left -= len(self._work.tasks)
            slow = {rank: self._slowdown[at] for rank, at in zip(self.ranks, choice, strict=True)}
            seconds = {task: taken * slow[task[0]] for task, taken in self._work.seconds.items()}
            self._known[choice] = makespan_s(self._work.taking(seconds), self._schedule, self._link)
        return self._known[choice]

    def energy_j(self, choice: _Choice, step_s: float) -> float:
        return math.fsum(self._joules(place, at, step_s) for place, at in enumerate(choice))

    def least_s(self) -> float:
        """Seconds with all clocks at their highest; 0 under a cap, where only the search can tell."""
        fastest = len(self._power.points) - 1
        return self.seconds((fastest,) * len(self.ranks)) if not self._is_capped else 0.0

    def best(self, floor_s: float) -> _Choice:
        """The choice of the shortest step, but at least `floor_s`, then of least energy."""
        start = self._greedy(floor_s)
        search = _Search(self, floor_s, start)
        search.run((), 0.0)
        return search.choice

    # --- Inputs of the search

    @property
    def _is_capped(self) -> bool:
        cap_w = self._power.cap_w
        return cap_w is not None and cap_w < max(p.watts for p in self._power.points) * len(self.ranks)

    @cached_property
    def watts(self) -> list[float]:
        """Watts of each operating point."""
        return [point.watts for point in self._power.points]

    @property
    def spare(self) -> bool:
        """Whether the budget of tasks allows more trials."""
        return self._budget.left > 0

    def _joules(self, place: int, at: int, step_s: float) -> float:
        return self._power.energy_j(self._busy[place] * self._slowdown[at], step_s, self._power.points[at])

    def least_joules(self, place: int, step_s: float) -> float:
        """The least joules of a rank at any point."""
        return min(self._joules(place, at, step_s) for at in range(len(self._slowdown)))

    def admits(self, drawn_w: float, undecided: int) -> bool:
        """Whether the cap admits `drawn_w` with `undecided` more ranks at the most frugal point."""
        cap_w = self._power.cap_w
        return cap_w is None or drawn_w + undecided * self._power.least_w <= cap_w * (1 + ROUNDING)

    def fastest_admitted(self, drawn_w: float, undecided: int) -> int:
        """The highest point that one undecided rank may have, the others being frugal."""
        return max(at for at, watts in enumerate(self.watts) if self.admits(drawn_w + watts, undecided - 1))

    @cached_property
    def _alike(self) -> list[tuple[int, ...]]:
        """Places of ranks with equal work, the most work first."""
        sharing: dict[float, list[int]] = {}
        for place, busy in enumerate(self._busy):
            sharing.setdefault(round(busy, 12), []).append(place)
        return [tuple(sharing[busy]) for busy in sorted(sharing, reverse=True)]

    # --- Greedy: raised as far as the cap admits, then lowered as far as the step allows

    def _greedy(self, floor_s: float) -> _Choice:
        """The better of two descents: from one clock for all, and from the best common pace."""
        paced = sorted(self._paced(), key=lambda start: max(floor_s, self.seconds(start)))[:1]
        found = [self._improved(start, floor_s) for start in (self._uniform(), *paced)]
        return min(found, key=lambda choice: max(floor_s, self.seconds(choice)))

    def _improved(self, choice: _Choice, floor_s: float) -> _Choice:
        while True:
            lowered = self._lowered(choice, floor_s)
            raised = self._raised(lowered, floor_s)
            if raised is None:
                return lowered
            choice = raised

    def _uniform(self) -> _Choice:
        """All ranks at the highest point that the cap admits."""
        count = len(self.ranks)
        admitted = [at for at in range(len(self.watts)) if self.admits(count * self.watts[at], 0)]
        return (admitted[-1] if admitted else self.watts.index(self._power.least_w),) * count

    def _paced(self) -> list[_Choice]:
        """Choices in which every rank is just fast enough for a common time, for the shortest such times under the cap:
        stages with many units are raised, and stages with few are lowered to pay for it."""
        found: list[_Choice] = []
        if not self._is_capped:
            return found
        for pace_s in sorted({busy * slow for busy in self._busy for slow in self._slowdown}):
            limit_s = pace_s * (1 + ROUNDING)
            enough = [[at for at, slow in enumerate(self._slowdown) if busy * slow <= limit_s] for busy in self._busy]
            if len(found) == PACES or not self.spare:
                break
            if all(enough) and self.admits(math.fsum(self.watts[points[0]] for points in enough), 0):
                found.append(tuple(points[0] for points in enough))
        return found

    def _lowered(self, choice: _Choice, floor_s: float) -> _Choice:
        """Ranks of equal work together, then each rank, at the point of least energy that does not lengthen the
        step."""
        limit_s = max(floor_s, self.seconds(choice)) * (1 + ROUNDING)
        for moved in (*self._alike, *((place,) for place in range(len(choice)))):
            before_j = math.fsum(self._joules(place, choice[place], limit_s) for place in moved)
            for at in sorted(range(len(self.watts)), key=lambda at: self._joules(moved[0], at, limit_s)):
                tried = tuple(at if place in moved else each for place, each in enumerate(choice))
                is_better = math.fsum(self._joules(place, at, limit_s) for place in moved) < before_j
                if not is_better or not self.spare:
                    break
                if self.admits(math.fsum(self.watts[each] for each in tried), 0) and self.seconds(tried) <= limit_s:
                    choice = tried
                    break
        return choice

    def _raised(self, choice: _Choice, floor_s: float) -> _Choice | None:
        """One rank, or all of equal work, a point higher, where that shortens the step most; None if nothing does.
        Where the cap does not admit it, the ranks with the least work become frugal."""
        if not self._is_capped or not self.spare:
            return None
        places = range(len(choice))
        best, best_s = None, max(floor_s, self.seconds(choice)) * (1 - ROUNDING)
        for moved in (*self._alike, *((place,) for place in places), tuple(places)):
            tried = self._within_cap(
                [min(at + (p in moved), len(self.watts) - 1) for p, at in enumerate(choice)], moved
            )
            if tried is not None and self.seconds(tried) < best_s:
                best, best_s = tried, self.seconds(tried)
        return best

    def _within_cap(self, wanted: list[int], kept: Sequence[int]) -> _Choice | None:
        """The choice with as many other ranks lowered as the cap requires; None if that is not enough."""
        frugal = self.watts.index(self._power.least_w)
        for place in sorted(range(len(wanted)), key=lambda p: self._busy[p]):
            if self.admits(math.fsum(self.watts[at] for at in wanted), 0):
                break
            if place not in kept:
                wanted[place] = min(wanted[place], frugal)
        return tuple(wanted) if self.admits(math.fsum(self.watts[at] for at in wanted), 0) else None


class _Search:
    """Branch and bound from a known choice."""

    def __init__(self, group: _Group, floor_s: float, start: _Choice) -> None:
        self._group, self._floor_s = group, floor_s
        self.choice = start
        self._seconds = max(floor_s, group.seconds(start))
        self._joules = group.energy_j(start, self._seconds)

    def run(self, decided: _Choice, drawn_w: float) -> None:
        """Try all choices that begin with `decided` and can be better."""
        group, left = self._group, len(self._group.ranks) - len(decided)
        if not group.spare:
            return
        if left == 0:
            self._take(decided)
            return
        fastest = group.fastest_admitted(drawn_w, left)
        bound_s = max(self._floor_s, group.seconds((*decided, *((fastest,) * left))))
        if bound_s > self._seconds * (1 + ROUNDING):
            return
        bound_j = group.energy_j(decided, bound_s) + math.fsum(
            group.least_joules(place, bound_s) for place in range(len(decided), len(group.ranks))
        )
        if bound_s >= self._seconds * (1 - ROUNDING) and bound_j >= self._joules * (1 - ROUNDING):
            return
        for at in range(fastest, -1, -1):
            if group.admits(drawn_w + group.watts[at], left - 1):
                self.run((*decided, at), drawn_w + group.watts[at])

    def _take(self, choice: _Choice) -> None:
        seconds = max(self._floor_s, self._group.seconds(choice))
        joules = self._group.energy_j(choice, seconds)
        shorter = seconds < self._seconds * (1 - ROUNDING)
        as_short = seconds <= self._seconds * (1 + ROUNDING)
        if shorter or (as_short and joules < self._joules * (1 - ROUNDING)):
            self.choice, self._joules = choice, joules
            self._seconds = min(self._seconds, seconds)
