"""From ranks in places to lanes: where units are cut, which samples each lane gets, in which micro-batches.

In: a workload, sketches of lanes (who is in which stage), a micro-batch size. Out: lanes whose last one to finish
finishes first, or None where no cut fits the memory of the ranks. `planner.py` sketches what a user wants,
`policies/` what could go on after a change.

    LaneShaper(workload, topology).shape((Sketch(((m0, m1), (m2,))),), size=4, table)  ->  rank 2 has fewer units
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import Workload
from elaswave_fx.plan.lane_times import LaneTimes
from elaswave_fx.plan.memory import MemoryTable, UnitSums
from elaswave_fx.plan.partition import crossing_bytes, minimax, slowest_stage
from elaswave_fx.plan.tiling import Lane, Stage, consecutive, split_micro_batches
from elaswave_fx.plan.topology import Member, Topology

MICRO_BATCHES_PER_STAGE = 2
"""A pipeline gets about this many micro-batches per stage: bubbles of (p - 1) / (3p - 1) and large kernels still."""

MOVES = 32
"""Granules are handed from the slowest lane to a faster one at most so often; mostly a few times do."""

RECEIVERS = 3
"""So many lanes that end first, each with a share of its own, are tried: the very first may be a slow one, which would
end last with a granule more."""


@dataclass(frozen=True)
class Sketch:
    """A lane to be: its members, stage by stage; `borders` of its units, None where they are to be found."""

    stages: tuple[tuple[Member, ...], ...]
    borders: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """Of its widest stage: so many micro-batches it needs at least."""
        return max(len(stage) for stage in self.stages)

    @property
    def strengths(self) -> list[float]:
        """Of its stages: the speeds of their ranks together."""
        return [sum(member.speed for member in stage) for stage in self.stages]


Sketches = tuple[Sketch, ...]


class LaneShaper:
    """Cuts and shares for one workload and topology; runs of lanes, and cuts, are known once they have been found."""

    def __init__(self, workload: Workload, topology: Topology) -> None:
        self._workload = workload
        self._sums = UnitSums(workload)
        self._crossing = crossing_bytes(workload)
        # Where backward passes may be split, a pipeline has to wait for no more than its forward passes.
        whole = sum(u.forward_s + u.backward_s for u in workload.units)
        forward = sum(u.forward_s for u in workload.units)
        self._waits = 1.0 if workload.schedule == "1f1b" or not whole else forward / whole
        self._cuts: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        self.times = LaneTimes(workload, topology, self._sums)

    def table(self, sketches: Sketches, copies: int) -> MemoryTable:
        """Of what tiles of such lanes need."""
        owners = sum(min(len(stage) for stage in sketch.stages) for sketch in sketches)
        ranks = sum(len(stage) for sketch in sketches for stage in sketch.stages)
        return MemoryTable(self._sums, owners, copies, ranks)

    def sizes(self, sketches: Sketches, most: int | None) -> Iterator[int]:
        """Micro-batches to try with these lanes, in samples, largest first."""
        across = sum(sketch.width for sketch in sketches)
        depth = max(len(sketch.stages) for sketch in sketches)
        return micro_batch_sizes(self._workload, -(-self._workload.granules // across), depth, most)

    def least_s(self, sketches: Sketches, size: int) -> float:
        """About the fewest seconds that lanes of these ranks can take: each is cut perfectly, and granules are shared
        like water, so that all end at once."""
        micro_batch_s = sum(unit_seconds(self._workload, size))
        granules, rate = float(self._workload.granules), 0.0
        for sketch in sketches:
            strength = sum(sketch.strengths)
            granule_s = micro_batch_s * self._workload.granule / size / strength
            fill_s = 0.0
            if len(sketch.stages) > 1:
                fastest = max(member.speed for stage in sketch.stages for member in stage)
                fill_s = max(0.0, micro_batch_s / fastest - sketch.width * micro_batch_s / strength) * self._waits
            granules += fill_s / granule_s
            rate += 1 / granule_s
        return granules / rate

    def shape(
        self, sketches: Sketches, size: int, table: MemoryTable, shares: Sequence[int] | None = None
    ) -> tuple[Lane, ...] | None:
        """Lanes with micro-batches of at most `size`, and `shares` granules each, or as many as is best; None if units
        do not fit, or samples do not suffice."""
        granules = self._workload.granules
        if sum(sketch.width for sketch in sketches) > granules:
            return None
        borders = [self._borders(sketch, size, table) for sketch in sketches]
        found = [b for b in borders if b is not None]
        if len(found) < len(sketches):
            return None
        if shares is None:
            shares = self._balanced(sketches, found, self._shares(sketches, found, size), size)
        elif any(share < sketch.width for share, sketch in zip(shares, sketches, strict=True)):
            return None
        samples = consecutive([share * self._workload.granule for share in shares])
        return tuple(self._lane(s, b, part, size) for s, b, part in zip(sketches, found, samples, strict=True))

    def _borders(self, sketch: Sketch, size: int, table: MemoryTable) -> tuple[int, ...] | None:
        """Those given, or of the cut whose slowest stage is fastest."""
        if sketch.borders is not None:
            return sketch.borders
        limits = tuple(
            min((m.memory_bytes for m in stage if m.memory_bytes is not None), default=None) for stage in sketch.stages
        )
        kind = (table, tuple(sketch.strengths), limits, size)
        if kind not in self._cuts:
            costs = unit_seconds(self._workload, size)
            self._cuts[kind] = minimax(costs, sketch.strengths, self._fits(limits, table, size), self._crossing)
        return self._cuts[kind]

    def _fits(self, limits: Sequence[int | None], table: MemoryTable, size: int) -> Callable[[int, Span], bool] | None:
        """Whether units fit the smallest rank of a stage; None if memory bounds nobody."""
        bounds = [limit for limit in limits if limit is not None]
        whole = Span(0, len(self._workload.units))
        if not bounds or table.total(whole, size, len(limits)) <= min(bounds):
            return None

        def fits(stage: int, units: Span) -> bool:
            limit = limits[stage]
            return limit is None or table.total(units, size, len(limits) - stage) <= limit

        return fits

    def _shares(self, sketches: Sketches, borders: Sequence[tuple[int, ...]], size: int) -> list[int]:
        """Granules by lane: its slowest stage sets the pace, all of its stages how long it fills and drains."""
        costs = unit_seconds(self._workload, size)
        per_micro_batch = max(1, size // self._workload.granule)
        paces, fills = [], []
        for sketch, cut in zip(sketches, borders, strict=True):
            slowest = slowest_stage(costs, sketch.strengths, cut)
            through = sum(
                sum(costs[lo:hi]) / max(member.speed for member in stage)
                for (lo, hi), stage in zip(itertools.pairwise(cut), sketch.stages, strict=True)
            )
            paces.append(slowest / per_micro_batch)
            fills.append(max(0.0, through - slowest * sketch.width))
        return list(share_granules(self._workload.granules, paces, fills, [s.width for s in sketches]))

    def _balanced(
        self, sketches: Sketches, borders: Sequence[tuple[int, ...]], shares: list[int], size: int
    ) -> list[int]:
        """Granules go from the lane that ends last to one of those that end first, by their simulated runs, as long as
        that makes the last one end earlier."""
        if len(sketches) == 1:
            return shares
        seconds = [self._seconds(s, b, n, size) for s, b, n in zip(sketches, borders, shares, strict=True)]
        amounts = sorted({max(1, size // self._workload.granule), 1}, reverse=True)
        for _ in range(MOVES):
            last = max(range(len(shares)), key=lambda i: seconds[i])
            by_end = {(seconds[i], shares[i]): i for i in reversed(range(len(shares)))}
            for amount, end in itertools.product(amounts, heapq.nsmallest(RECEIVERS, by_end)):
                first = by_end[end]
                if shares[last] - amount < sketches[last].width or seconds[first] == seconds[last]:
                    continue
                less = self._seconds(sketches[last], borders[last], shares[last] - amount, size)
                more = self._seconds(sketches[first], borders[first], shares[first] + amount, size)
                if max(less, more) < seconds[last]:
                    shares[last], shares[first] = shares[last] - amount, shares[first] + amount
                    seconds[last], seconds[first] = less, more
                    break
            else:
                return shares
        return shares

    def _seconds(self, sketch: Sketch, borders: tuple[int, ...], granules: int, size: int) -> float:
        samples = Span(0, granules * self._workload.granule)
        return self.times.whole(self._lane(sketch, borders, samples, size)).seconds

    def _lane(self, sketch: Sketch, borders: tuple[int, ...], samples: Span, size: int) -> Lane:
        pieces = split_micro_batches(samples, size, self._workload.granule, sketch.width)
        stages = tuple(
            Stage(Span(lo, hi), tuple(m.rank for m in members), deal(len(pieces), members))
            for (lo, hi), members in zip(itertools.pairwise(borders), sketch.stages, strict=True)
        )
        return Lane(stages, pieces)


def deal(count: int, members: Sequence[Member]) -> tuple[int, ...]:
    """Micro-batches of each rank of a stage, by speed."""
    return share_granules(count, [1 / member.speed for member in members])


def unit_seconds(workload: Workload, micro_batch: int) -> tuple[float, ...]:
    """Seconds of forward and backward of one micro-batch through each unit at speed 1."""
    return tuple(2 * u.fixed_s + (u.forward_s + u.backward_s) * micro_batch for u in workload.units)


def share_granules(
    granules: int, paces: Sequence[float], fills: Sequence[float] = (), least: Sequence[int] = ()
) -> tuple[int, ...]:
    """Granules per worker, at least one each, so that the last to finish finishes first.

    `paces`: time per granule, in any unit; `fills`: time that does not depend on granules. `least` of each. Equal paces
    give an even split, remainders to the first, one each.
    """
    fills = fills or [0.0] * len(paces)
    shares = list(least or [1] * len(paces))
    finish = [(fill + (n + 1) * pace, i) for i, (n, pace, fill) in enumerate(zip(shares, paces, fills, strict=True))]
    heapq.heapify(finish)
    for _ in range(granules - sum(shares)):
        _, index = finish[0]
        shares[index] += 1
        heapq.heapreplace(finish, (fills[index] + (shares[index] + 1) * paces[index], index))
    return tuple(shares)


def micro_batch_sizes(workload: Workload, granules: int, depth: int, most: int | None) -> Iterator[int]:
    """Micro-batches to try, in samples, largest first: the wanted one, then what less memory needs.

    `granules` of the largest tile; depth 1 wants one micro-batch, a pipeline about two per stage.
    """
    if workload.single_granules:
        yield workload.granule
        return
    count = 1 if depth == 1 else min(granules, MICRO_BATCHES_PER_STAGE * depth)
    largest = granules if most is None else max(1, most // workload.granule)
    last = None
    while count <= granules:
        size = -(-granules // count)
        if size <= largest and size != last:
            last = size
            yield size * workload.granule
        if size == 1:
            return
        count = max(count + 1, -(-granules // (size - 1)))
