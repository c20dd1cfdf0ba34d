"""Exhaustive search of lane cuts for programs of few units: the best cut that fits, for a share of the samples.

With few micro-batches the time to fill a lane counts as much as its pace, so the cut with the fastest slowest stage is
not always best. A bound rules out most cuts without a run. In: a run of lanes, granules, the size of micro-batches.
Out: borders and seconds.

    LaneCuts(workload, times).best(part, size=2, table)  ->  (Part(..., borders=(0, 3, 8)), 0.021)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from elaswave_fx.plan.lanes.balance import Timed
from elaswave_fx.plan.lanes.lane_shapes import LaneShape, Part, Run
from elaswave_fx.plan.lanes.shares import deal, piece_sizes
from elaswave_fx.plan.order.schedule import LaneKind, StageKind, most_in_flight
from elaswave_fx.plan.predict.lane_times import LaneTimes
from elaswave_fx.plan.predict.memory import MemoryTable
from elaswave_fx.plan.work.cost import ROUNDING, Workload
from elaswave_fx.plan.work.spans import Span, consecutive

ALL_CUTS = 40
"""All cuts are tried for programs with at most this many cuts over all depths: up to 8 units."""

ALL_TASKS = 512
"""Lanes with more forward and backward passes keep their cut: those passes hide the cost of filling the lane."""


def lane_kind(workload: Workload, part: Part, size: int) -> LaneKind:
    """The kind of a part's lanes, with micro-batches of at most `size` samples."""
    shape = part.run.shape
    sizes = piece_sizes(part.granules, size, workload.options.granule, shape.width)
    return LaneKind(
        tuple(
            StageKind(Span(lo, hi), deal(len(sizes), members), tuple(member.speed for member in members))
            for (lo, hi), members in zip(itertools.pairwise(part.borders), shape.stages, strict=True)
        ),
        sizes,
        part.run.links,
    )


class LaneCuts:
    """Best cuts for one workload and topology, cached for lanes that are alike."""

    def __init__(self, workload: Workload, times: LaneTimes, is_hurried: bool = False) -> None:
        """`is_hurried`: try no other cuts, whatever the program."""
        self._workload, self._times = workload, times
        units = workload.units
        few_cuts = math.comb(len(units) - 1, (len(units) - 1) // 2) <= ALL_CUTS
        self.tries_all = few_cuts and not is_hurried
        self._fixed = _until(u.fixed_s for u in units)
        self._forward = _until(u.forward_s for u in units)
        self._backward = _until(u.backward_s for u in units)
        # Where every unit reads an output of its predecessor, every stage waits for the previous stage.
        handed_on = {v.producer for v in workload.values if v.has_grad and v.consumers[0] == v.producer + 1}
        self._is_chain = len(handed_on) == len(units) - 1
        self._is_whole = workload.options.schedule == "1f1b"
        self._known: dict[tuple[object, ...], tuple[tuple[int, ...], float]] = {}
        self._floors: dict[tuple[object, ...], float] = {}

    def best(self, part: Part, size: int, table: MemoryTable) -> Timed:
        """The part with the cut of the shortest step; its own cut if no other is shorter."""
        key = (_alike(part.run), part.borders, part.granules, size, table)
        if key not in self._known:
            found = self._search(part, size, table)
            self._known[key] = found.part.borders, found.seconds
        borders, seconds = self._known[key]
        return Timed(part._replace(borders=borders), seconds)

    def _search(self, part: Part, size: int, table: MemoryTable) -> Timed:
        shape, own_s = part.run.shape, self._seconds(part, size, table)
        best = Timed(part, own_s)
        sizes = piece_sizes(part.granules, size, self._workload.options.granule, shape.width)
        if shape.borders is not None or 2 * len(shape.stages) * len(sizes) > ALL_TASKS:
            return best
        deals = [deal(len(sizes), members) for members in shape.stages]
        cuts = ((0, *cut, part.borders[-1]) for cut in _inner(part.borders[-1], len(shape.stages)))
        for least_s, borders in sorted((self._least_s(shape, borders, sizes, deals), borders) for borders in cuts):
            enough_s = best.seconds * (1 - ROUNDING)
            if least_s >= enough_s:
                break
            other = part._replace(borders=borders)
            seconds = math.inf if borders == part.borders else self._seconds(other, size, table)
            if seconds < enough_s:
                best = Timed(other, seconds)
        return best

    def _seconds(self, part: Part, size: int, table: MemoryTable) -> float:
        """Seconds of a step of a lane of the part; infinite if a rank lacks memory."""
        kind, members = lane_kind(self._workload, part, size), part.run.shape.members
        is_bounded = any(member.memory_bytes is not None for member in members)
        if not self._is_whole:
            run = self._times.about(kind, members, table.kept_evenly)
            return run.seconds if run.fits or not is_bounded else math.inf
        run = self._times.whole_of(kind)
        if is_bounded:
            place = 0
            for stage in kind.stages:
                for dealt in consecutive(stage.deal):
                    largest = max(kind.sizes[dealt.lo : dealt.hi])
                    needed = table.total(stage.units, largest, most_in_flight(run.orders[place]))
                    limit = members[place].memory_bytes
                    if limit is not None and needed > limit:
                        return math.inf
                    place += 1
        return run.seconds

    # --- Bounds

    def _least_s(
        self, shape: LaneShape, borders: Sequence[int], sizes: Sequence[int], deals: Sequence[Sequence[int]]
    ) -> float:
        """Lower bound of the step of a lane with this cut. Every rank waits for the first forward pass of earlier
        stages, does its own work, and whole backward passes follow its last one. With 1F1B it also waits for the first
        micro-batch to return, as its forward passes in flight are bounded."""
        small, large, count = sizes[-1], sizes[0], len(sizes)
        waits_s = least_s = 0.0
        stages: list[tuple[float, float, float]] = []  # forward and backward of the smallest, forward of the largest
        for lo, hi, members, dealt in zip(borders, borders[1:], shape.stages, deals, strict=False):
            fixed, forward = self._fixed[hi] - self._fixed[lo], self._forward[hi] - self._forward[lo]
            backward = self._backward[hi] - self._backward[lo]
            first = 0
            for member, pieces in zip(members, dealt, strict=True):
                samples = sum(sizes[first : first + pieces])
                taken_s = (2 * fixed * pieces + (forward + backward) * samples) / member.speed
                least_s = max(least_s, waits_s + taken_s)
                first += pieces
            fastest = max(member.speed for member in members)
            passes = (
                (fixed + forward * small) / fastest,
                (fixed + backward * small) / fastest,
                (fixed + forward * large) / fastest,
            )
            stages.append(passes)
            if self._is_chain:
                waits_s += passes[0] + (passes[1] if self._is_whole else 0.0)
        if not self._is_chain or not self._is_whole or shape.width > 1:
            return least_s
        before_s = 0.0
        for place, (forward_s, backward_s, largest_s) in enumerate(stages):
            lo, hi = borders[place], borders[place + 1]
            per_sample = self._forward[hi] - self._forward[lo] + self._backward[hi] - self._backward[lo]
            taken_s = 2 * (self._fixed[hi] - self._fixed[lo]) * count + per_sample * sum(sizes)
            ahead = min(len(stages) - place, count)
            come_back_s = max(0.0, waits_s - before_s - backward_s - ahead * largest_s)
            least_s = max(least_s, before_s + taken_s / shape.stages[place][0].speed + come_back_s)
            before_s += forward_s + backward_s
        return least_s

    def most_granules(self, run: Run, size: int, limit_s: float, most: int) -> int:
        """Upper bound, at most `most`, of the granules that a lane of the run could finish within `limit_s`; 0 if none.
        More granules can take less time, where they make one more micro-batch."""
        strength = sum(run.shape.strengths)
        work_s = sum(2 * u.fixed_s / size + u.forward_s + u.backward_s for u in self._workload.units)
        granule_s = work_s * self._workload.options.granule / strength
        granules = most if granule_s * most <= limit_s else int(limit_s / granule_s * (1 + ROUNDING))
        while granules >= run.shape.width and self._floor_s(run, granules, size) > limit_s:
            granules -= 1
        return granules if granules >= run.shape.width else 0

    def _floor_s(self, run: Run, granules: int, size: int) -> float:
        """Lower bound of the seconds of a lane with so many granules, however it is cut."""
        key = (_alike(run), granules, size)
        if key not in self._floors:
            self._floors[key] = self._find_floor_s(run.shape, granules, size)
        return self._floors[key]

    def _find_floor_s(self, shape: LaneShape, granules: int, size: int) -> float:
        """Lower bound over all cuts. A stage of strength a ends no earlier than its own work x / a plus the fill time
        of the stages before it: `limit >= x / a + sum of w x_j / v_j`.

        x: work of the stage at speed 1; x_j: work of stage j before it; w: the smallest micro-batch as a fraction of
        the work; v_j: speed of the fastest rank of stage j. Weights are chosen so that every x has a factor of 1 or
        more in the weighted sum over stages. Then limit times the sum of weights is at least the work of the whole
        program.
        """
        sizes = piece_sizes(granules, size, self._workload.options.granule, shape.width)
        if shape.borders is not None:
            return self._least_s(shape, shape.borders, sizes, [deal(len(sizes), each) for each in shape.stages])
        samples, small = sum(sizes), sizes[-1]
        waits = 0.0
        if self._is_chain and len(shape.stages) > 1:
            waits = min(self._part_of_work(unit, small, len(sizes), samples) for unit in range(len(self._fixed) - 1))
        work_s = 2 * self._fixed[-1] * len(sizes) + (self._forward[-1] + self._backward[-1]) * samples
        weights = 0.0
        for members in reversed(shape.stages):
            strength, fastest = sum(m.speed for m in members), max(m.speed for m in members)
            weights += max(0.0, 1 - waits / fastest * weights) * strength
        return work_s / weights

    def _part_of_work(self, unit: int, small: int, count: int, samples: int) -> float:
        """Fraction of a unit's work in a step that the smallest micro-batch, run before others can start, takes."""
        cost = self._workload.units[unit]
        passed_s = cost.fixed_s + cost.forward_s * small
        if self._is_whole:
            passed_s += cost.fixed_s + cost.backward_s * small
        work_s = 2 * cost.fixed_s * count + (cost.forward_s + cost.backward_s) * samples
        return passed_s / work_s if work_s else 1.0


def _until(values: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))


def _inner(units: int, stages: int) -> Iterable[tuple[int, ...]]:
    """The inner borders of every cut."""
    return itertools.combinations(range(1, units), stages - 1)


def _alike(run: Run) -> tuple[object, ...]:
    """Key of lanes that take equally long and fit alike."""
    shape = run.shape
    return tuple(tuple((m.speed, m.memory_bytes) for m in stage) for stage in shape.stages), shape.borders, run.links
