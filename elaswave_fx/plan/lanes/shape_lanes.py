"""Lanes from lane shapes: cuts of the units, samples of each lane, and micro-batches.

In: a workload, lane shapes (the ranks of each stage), a micro-batch size. Out: lanes with the earliest last
finish, or None where no cut fits the memory of the ranks. `planner.py` has those of a user's layout, `policies/` the
candidates after a change.

    LaneShaper(workload, topology).shape((LaneShape(((m0, m1), (m2,))),), size=4, table)  ->  rank 2 has fewer units
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from elaswave_fx.plan.lanes.balance import Timed, balanced
from elaswave_fx.plan.lanes.lane_cuts import LaneCuts, lane_kind
from elaswave_fx.plan.lanes.lane_shapes import Cut, LaneShape, LaneShapes, Part, Run, ShapeBounds
from elaswave_fx.plan.lanes.partition import Reach, crossing_bytes, minimax, slowest_stage
from elaswave_fx.plan.lanes.shares import ShareKind, deal, piece_sizes, share_by_kind
from elaswave_fx.plan.order.schedule import LaneKind
from elaswave_fx.plan.predict.lane_times import LaneTimes
from elaswave_fx.plan.predict.memory import MemoryTable, UnitSums
from elaswave_fx.plan.work.cost import ROUNDING, Workload
from elaswave_fx.plan.work.spans import Span, consecutive
from elaswave_fx.plan.work.tiling import Lane, Stage, split_micro_batches
from elaswave_fx.plan.work.topology import Topology

MICRO_BATCHES_PER_STAGE = 2
"""Target of micro-batches per stage of a pipeline: bubbles of (p - 1) / (3p - 1), with large kernels still."""


FEW_TASKS = 128
"""Lanes with more forward and backward passes keep their cut: those hide the fill time, and take longer to simulate."""

WORTHWHILE = 1.01
"""A lane keeps its cut, too, if it takes less than this multiple of its time with perfectly equal stages."""


class LaneShaper:
    """Cuts and shares for one workload and topology; runs and cuts of lanes are cached."""

    def __init__(self, workload: Workload, topology: Topology, is_hurried: bool = False) -> None:
        """`is_hurried`: do not try every cut, even of a program of few units."""
        self._workload, self._topology = workload, topology
        self._sums = UnitSums(workload)
        self._crossing = crossing_bytes(workload)
        # Where backward passes may be split, a pipeline waits at most for its forward passes.
        whole = sum(u.forward_s + u.backward_s for u in workload.units)
        forward = sum(u.forward_s for u in workload.units)
        self._waits = 1.0 if workload.options.schedule == "1f1b" or not whole else forward / whole
        speeds = [member.speed for member in topology.members]
        self._strength = sum(speeds), max(speeds)
        self._costs: dict[int, tuple[float, ...]] = {}
        self._sums_of_costs: dict[int, float] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        self._tables: dict[tuple[int, int, int], MemoryTable] = {}
        self._least_depths: dict[int, int] = {}
        self.times = LaneTimes(workload, topology, self._sums)
        self.cuts = LaneCuts(workload, self.times, is_hurried)

    def table(self, shapes: LaneShapes | ShapeBounds, replicas: int) -> MemoryTable:
        """Memory of tiles of such lanes."""
        bounds = ShapeBounds.of(shapes)
        key = bounds.owners, replicas, bounds.ranks
        if key not in self._tables:
            self._tables[key] = MemoryTable(self._sums, *key)
        return self._tables[key]

    def sizes(self, shapes: LaneShapes | ShapeBounds) -> Iterator[int]:
        """Micro-batches to try with these lanes, in samples, largest first."""
        bounds = ShapeBounds.of(shapes)
        across = -(-self._workload.granules // bounds.across)
        return micro_batch_sizes(self._workload, across, bounds.deepest)

    # --- Bounds, cheapest first

    def bound_s(self, bounds: ShapeBounds, size: int) -> float:
        """Approximate lower bound, at most `least_s`, of the seconds of any lanes of all ranks within these bounds."""
        strength, fastest = self._strength
        per_micro_batch = size / self._workload.options.granule
        idle = self._waits * max(0.0, strength / fastest - bounds.across) * per_micro_batch
        return (self._workload.granules + idle) * self._through_s(size) / per_micro_batch / strength

    def cannot_fit(self, bounds: ShapeBounds, size: int) -> bool:
        """Whether a lane has fewer stages than could ever hold the program."""
        return bounds.shallowest < self._least_depth(size)

    def least_s(self, shapes: LaneShapes, size: int) -> float:
        """Approximate lower bound of the seconds of lanes of these ranks: perfect cuts, and granules shared
        continuously so that all lanes end together."""
        granules, rate = float(self._workload.granules), 0.0
        for shape in shapes:
            pace_s, fill_s = self._perfectly_cut(shape, size)
            granules += fill_s / pace_s
            rate += 1 / pace_s
        return granules / rate

    def _perfectly_cut(self, shape: LaneShape, size: int) -> tuple[float, float]:
        """Seconds of a granule, and seconds to fill the lane, if all of its stages took equally long."""
        micro_batch_s, strength = self._through_s(size), sum(shape.strengths)
        fill_s = 0.0
        if len(shape.stages) > 1:
            fastest = max(member.speed for stage in shape.stages for member in stage)
            fill_s = max(0.0, micro_batch_s / fastest - shape.width * micro_batch_s / strength) * self._waits
        return micro_batch_s * self._workload.options.granule / size / strength, fill_s

    def least_cut_s(self, cut: Cut) -> float:
        """`least_s` for lanes with fixed cuts. A stage waits until the stages in front of it have passed a micro-batch,
        maybe a smaller one, and then takes all of its own."""
        granules, rate = float(self._workload.granules), 0.0
        runs, borders, size, shares = cut
        for run, own, (share, _) in zip(runs, borders, shares, strict=True):
            pace_s, fill_s = self._latest_stage(run.shape, own, size, share)
            if self.may_be_cut_better(Part(run, own, share, 1), size):
                pace_s, fill_s = self._perfectly_cut(run.shape, size)
            granules += run.count * fill_s / pace_s
            rate += run.count / pace_s
        first = Part(runs[0], borders[0], self._workload.granules, 1)
        is_alone = len(runs) == 1 and runs[0].count == 1 and not self.may_be_cut_better(first, size)
        return max(granules / rate, self._least_wide_s(first, size) if is_alone else 0.0)

    def may_end_by(self, cut: Cut, limit_s: float) -> bool:
        """Whether lanes with these cuts might all end within `limit_s`. Each lane with wide stages is run with the
        granules that the slowest stages of the others have no time for. True where backward passes may be split and not
        all cuts are tried."""
        runs, borders, size, shares = cut
        if self.cuts.tries_all:
            granules = self._workload.granules
            return sum(r.count * self.cuts.most_granules(r, size, limit_s, granules) for r in runs) >= granules
        if self._workload.options.schedule != "1f1b":
            return True
        most: list[int] = []
        for run, own, (share, _) in zip(runs, borders, shares, strict=True):
            pace_s, fill_s = self._latest_stage(run.shape, own, size, share)
            most.append(max(0, int((limit_s - fill_s) / pace_s)))
        left = self._workload.granules - sum(run.count * each for run, each in zip(runs, most, strict=True))
        for run, own, each in zip(runs, borders, most, strict=True):
            part = Part(run, own, max(left + each, run.shape.width), 1)
            is_wide = run.shape.width > 1 and not self.may_be_cut_better(part, size)
            if is_wide and self._ends_later(self.kind(part, size), limit_s):
                return False
        return True

    def _ends_later(self, kind: LaneKind, limit_s: float) -> bool:
        """Whether a lane with whole backward passes takes longer; it is only run where the bound does not decide."""
        return self.times.least_whole_of(kind) > limit_s or self.times.whole_of(kind).seconds > limit_s

    def _least_wide_s(self, part: Part, size: int) -> float:
        """Approximate lower bound of `seconds`: whole micro-batches are dealt to the ranks of a stage, and the rank
        with the most work has the smallest ones."""
        shape, stages = part.run.shape, itertools.pairwise(part.borders)
        sizes = piece_sizes(part.granules, size, self._workload.options.granule, shape.width)
        small, large = min(sizes), max(sizes)
        smallest = sizes.count(small)
        before_s = latest_s = 0.0
        for (lo, hi), stage in zip(stages, shape.stages, strict=True):
            small_s, large_s = sum(self.costs(small)[lo:hi]), sum(self.costs(large)[lo:hi])
            for count, member in zip(deal(len(sizes), stage), stage, strict=True):
                taken_s = small_s * min(count, smallest) + large_s * max(0, count - smallest)
                latest_s = max(latest_s, before_s + taken_s / member.speed)
            before_s += self._waits * small_s / max(member.speed for member in stage)
        return latest_s

    def _latest_stage(self, shape: LaneShape, cut: Sequence[int], size: int, share: int) -> tuple[float, float]:
        """Lower bounds for the stage of a lane that ends last: seconds of a granule, and seconds before the first
        one."""
        whole = share * self._workload.options.granule // size
        part = whole / (whole + 1)
        costs, per_micro_batch = self.costs(size), max(1, size // self._workload.options.granule)
        before_s = latest_s = 0.0
        found = (1.0, 0.0)
        for (lo, hi), stage in zip(itertools.pairwise(cut), shape.stages, strict=True):
            taken_s = sum(costs[lo:hi])
            pace_s = taken_s / sum(member.speed for member in stage) / per_micro_batch
            if before_s + share * pace_s > latest_s:
                found, latest_s = (pace_s, before_s), before_s + share * pace_s
            before_s += self._waits * part * taken_s / max(member.speed for member in stage)
        return found

    # --- Shapes

    def shape(
        self, shapes: LaneShapes, size: int, table: MemoryTable, shares: Sequence[int] | None = None
    ) -> tuple[Lane, ...] | None:
        """Lanes with micro-batches of at most `size`, and `shares` granules each or the best number; None if units do
        not fit or samples do not suffice."""
        runs = self.runs(shapes, shares)
        cut = self.cut(runs, size, table)
        if cut is None:
            return None
        parts = self.parts(cut, table, shares)
        return None if parts is None else self.lanes(shapes, parts, size)

    def runs(self, shapes: LaneShapes, shares: Sequence[int] | None = None) -> list[Run]:
        """Runs of neighbouring shapes that are alike and have equal shares."""
        found: list[Run] = []
        last: object = None
        for number, shape in enumerate(shapes):
            links = self._topology.links_among([member.rank for member in shape.members])
            stages = [[(member.speed, member.memory_bytes) for member in stage] for stage in shape.stages]
            alike = (stages, shape.borders, links, shares and shares[number])
            if found and alike == last:
                found[-1] = found[-1]._replace(count=found[-1].count + 1)
            else:
                found.append(Run(shape, 1, links))
            last = alike
        return found

    def cut(self, runs: Sequence[Run], size: int, table: MemoryTable) -> Cut | None:
        """Borders of each run and granules of each lane; None if units do not fit or samples do not suffice."""
        if sum(run.count * run.shape.width for run in runs) > self._workload.granules:
            return None
        found: list[tuple[int, ...]] = []
        for run in runs:
            borders = self.borders(run.shape, size, table)
            if borders is None and self.cuts.tries_all and len(run.shape.stages) <= len(self._workload.units):
                # Few micro-batches may fit although as many as there are stages do not.
                borders = minimax(self.costs(size), run.shape.strengths, None, self._crossing)
            if borders is None:
                return None
            found.append(borders)
        return Cut(runs, found, size, self._shares(runs, found, size))

    def parts(self, cut: Cut, table: MemoryTable, shares: Sequence[int] | None = None) -> list[Part] | None:
        """Parts with the best number of granules, recut where there are few micro-batches; None if the given `shares`
        are too few."""
        runs, borders, size, best = cut
        if shares is not None:
            firsts = itertools.accumulate((run.count for run in runs[:-1]), initial=0)
            given = [shares[first] for first in firsts]
            if any(share < run.shape.width for share, run in zip(given, runs, strict=True)):
                return None
            fixed = [Part(r, b, n, r.count) for r, b, n in zip(runs, borders, given, strict=True)]
            return balanced(fixed, (), _LanesOfSize(self, size, table, tries_all=False))
        found: list[Part] = []
        for run, own, (share, more) in zip(runs, borders, best, strict=True):
            found += [
                Part(run, own, granules, count)
                for granules, count in ((share + 1, more), (share, run.count - more))
                if count
            ]
        amounts = sorted({max(1, size // self._workload.options.granule), 1}, reverse=True)
        return balanced(found, amounts, _LanesOfSize(self, size, table, self.cuts.tries_all))

    def lanes(self, shapes: LaneShapes, parts: Sequence[Part], size: int) -> tuple[Lane, ...]:
        """The lanes of these shapes, cut and sharing as in `parts`."""
        each = [part for part in parts for _ in range(part.count)]
        samples = consecutive([part.granules * self._workload.options.granule for part in each])
        return tuple(self.lane(s, p.borders, span, size) for s, p, span in zip(shapes, each, samples, strict=True))

    def kind(self, part: Part, size: int) -> LaneKind:
        """The kind of the part's lanes."""
        return lane_kind(self._workload, part, size)

    def borders(self, shape: LaneShape, size: int, table: MemoryTable) -> tuple[int, ...] | None:
        """The shape's own borders, or the cut with the fastest slowest stage; None if no cut fits with as many
        micro-batches as stages."""
        if shape.borders is not None:
            return shape.borders
        limits, strengths = _limits(shape), shape.strengths
        free = (None, strengths, (), size)
        if free not in self._cuts:
            self._cuts[free] = minimax(self.costs(size), strengths, None, self._crossing)
        found = self._cuts[free]
        if found is None or _has_room(found, limits, table, size):
            return found  # memory fit need not be known: that cut is then the best of those that fit, too
        kind = (table, strengths, limits, size)
        if kind not in self._cuts:
            self._cuts[kind] = minimax(self.costs(size), strengths, self._reach(limits, table, size), self._crossing)
        return self._cuts[kind]

    def costs(self, size: int) -> tuple[float, ...]:
        """Seconds of a micro-batch of `size` samples through each unit."""
        if size not in self._costs:
            self._costs[size] = unit_seconds(self._workload, size)
        return self._costs[size]

    def _through_s(self, size: int) -> float:
        """Seconds of a micro-batch of `size` samples through all units."""
        if size not in self._sums_of_costs:
            self._sums_of_costs[size] = sum(self.costs(size))
        return self._sums_of_costs[size]

    def _reach(self, limits: Sequence[int | None], table: MemoryTable, size: int) -> Reach | None:
        """The longest runs of units that fit the smallest rank of each stage; None if memory is unbounded
        everywhere."""
        bounds = [limit for limit in limits if limit is not None]
        whole = Span(0, len(self._workload.units))
        if not bounds or table.total(whole, size, len(limits)) <= min(bounds):
            return None
        return [
            None if limit is None else table.reach(size, len(limits) - stage, limit)
            for stage, limit in enumerate(limits)
        ]

    def _least_depth(self, size: int) -> int:
        """Lower bound of the stages that hold all units in ranks like the largest, if each kept an even share of state
        and received nothing: stages are filled from the last one, which holds one micro-batch."""
        if size in self._least_depths:
            return self._least_depths[size]
        limits = [member.memory_bytes for member in self._topology.members]
        most = None if None in limits else max(limit for limit in limits if limit is not None)
        depth, end = 0, len(self._workload.units)
        while end > 0 and depth <= len(self._workload.units):
            depth, lo = depth + 1, end
            while lo > 0 and (most is None or self._sums.least_bytes(lo - 1, end, depth * size, len(limits)) <= most):
                lo -= 1
            end = lo
        self._least_depths[size] = depth
        return depth

    def _paces(self, runs: Sequence[Run], borders: Sequence[tuple[int, ...]], size: int) -> list[tuple[float, float]]:
        """Seconds of a granule through the slowest stage, and seconds to fill and drain a lane, by run."""
        costs = self.costs(size)
        per_micro_batch = max(1, size // self._workload.options.granule)
        found = []
        for run, cut in zip(runs, borders, strict=True):
            shape = run.shape
            slowest = slowest_stage(costs, shape.strengths, cut)
            through = sum(
                sum(costs[lo:hi]) / max(member.speed for member in stage)
                for (lo, hi), stage in zip(itertools.pairwise(cut), shape.stages, strict=True)
            )
            found.append((slowest / per_micro_batch, max(0.0, through - slowest * shape.width)))
        return found

    def _shares(self, runs: Sequence[Run], borders: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, int]]:
        """Granules of each lane, and how many of its lanes have one more, by run. The slowest stage sets the pace, all
        stages the time to fill and drain."""
        paces = self._paces(runs, borders, size)
        kinds = [ShareKind(p, f, r.shape.width, r.count) for r, (p, f) in zip(runs, paces, strict=True)]
        return share_by_kind(self._workload.granules, kinds)

    def seconds(self, part: Part, size: int) -> float:
        """Seconds of a step of a lane of the part, with whole backward passes."""
        return self.times.whole_of(self.kind(part, size)).seconds

    def least_part_s(self, part: Part, size: int) -> float:
        """Approximate lower bound of `seconds`: work of the stage that ends last, and its waiting time."""
        is_narrow = part.run.shape.width == 1
        return self.times.least_of(self.kind(part, size)) if is_narrow else self._least_wide_s(part, size)

    def may_be_cut_better(self, part: Part, size: int, seconds: float = math.inf) -> bool:
        """Whether to try other cuts of a lane of the part that takes `seconds`."""
        shape = part.run.shape
        pieces = len(piece_sizes(part.granules, size, self._workload.options.granule, shape.width))
        if shape.borders is not None or 2 * len(shape.stages) * pieces > FEW_TASKS:
            return False
        pace_s, fill_s = self._perfectly_cut(shape, size)
        return seconds > WORTHWHILE * (fill_s + part.granules * pace_s)

    def may_become(self, part: Part, other: Part, size: int, table: MemoryTable) -> bool:
        """Whether units cut as in `other` fit the ranks of every stage. Where split backward passes hide the fill time,
        the slowest stage must not become slower either."""
        shape = other.run.shape
        if self._workload.options.schedule != "1f1b":
            slowest, before = (slowest_stage(self.costs(size), shape.strengths, p.borders) for p in (other, part))
            if slowest > before * (1 + ROUNDING):
                return False
        return _has_room(other.borders, _limits(shape), table, size)

    def lane(self, shape: LaneShape, borders: tuple[int, ...], samples: Span, size: int) -> Lane:
        """The lane of the shape's members for these samples."""
        pieces = split_micro_batches(samples, size, self._workload.options.granule, shape.width)
        stages = tuple(
            Stage(Span(lo, hi), tuple(m.rank for m in members), deal(len(pieces), members))
            for (lo, hi), members in zip(itertools.pairwise(borders), shape.stages, strict=True)
        )
        return Lane(stages, pieces)


class _LanesOfSize:
    """The `Lanes` of `balance.py` for one micro-batch size."""

    def __init__(self, shaper: LaneShaper, size: int, table: MemoryTable, tries_all: bool) -> None:
        """`tries_all`: all shares are tried, too."""
        self._shaper, self._size, self._table, self.tries_all = shaper, size, table, tries_all

    def timed(self, part: Part) -> Timed:
        cuts = self._shaper.cuts
        if cuts.tries_all:
            return cuts.best(part, self._size, self._table)
        return Timed(part, self._shaper.seconds(part, self._size))

    def most_granules(self, part: Part, limit_s: float, most: int) -> int:
        return self._shaper.cuts.most_granules(part.run, self._size, limit_s, most)

    def least_s(self, part: Part) -> float:
        return self._shaper.least_part_s(part, self._size)

    def may_be_cut_better(self, part: Part, seconds: float) -> bool:
        return not self._shaper.cuts.tries_all and self._shaper.may_be_cut_better(part, self._size, seconds)

    def may_become(self, part: Part, other: Part) -> bool:
        return self._shaper.may_become(part, other, self._size, self._table)


def _limits(shape: LaneShape) -> tuple[int | None, ...]:
    """Memory of the smallest rank of every stage; None: unbounded."""
    return tuple(
        min((m.memory_bytes for m in stage if m.memory_bytes is not None), default=None) for stage in shape.stages
    )


def _has_room(borders: Sequence[int], limits: Sequence[int | None], table: MemoryTable, size: int) -> bool:
    """Whether each stage fits its smallest rank, with one micro-batch in flight for each stage from it to the last."""
    stages = zip(itertools.pairwise(borders), limits, range(len(limits), 0, -1), strict=True)
    return all(
        limit is None or table.total(Span(lo, hi), size, in_flight) <= limit for (lo, hi), limit, in_flight in stages
    )


def unit_seconds(workload: Workload, micro_batch: int) -> tuple[float, ...]:
    """Forward and backward seconds of one micro-batch through each unit at speed 1."""
    return tuple(2 * u.fixed_s + (u.forward_s + u.backward_s) * micro_batch for u in workload.units)


def micro_batch_sizes(workload: Workload, granules: int, depth: int) -> Iterator[int]:
    """Micro-batches to try, in samples, largest first: the preferred size, then sizes that need less memory.

    `granules` of the largest tile; depth 1 prefers one micro-batch, a pipeline about two per stage.
    """
    if workload.single_granules:
        yield workload.options.granule
        return
    count = 1 if depth == 1 else min(granules, MICRO_BATCHES_PER_STAGE * depth)
    most = workload.options.micro_batch
    largest = granules if most is None else most // workload.options.granule
    last = None
    while count <= granules:
        size = -(-granules // count)
        if size <= largest and size != last:
            last = size
            yield size * workload.options.granule
        if size == 1:
            return
        count = max(count + 1, -(-granules // (size - 1)))
