"""Small workloads and lanes that the plan tests share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span, consecutive, even_split
from elaswave_fx.plan.work.tiling import Lane, Stage, split_micro_batches
from elaswave_fx.plan.work.topology import Rank


def chain(
    units: int = 4,
    global_batch: int = 16,
    granule: int = 1,
    costs: Sequence[float] | None = None,
    batch_coupled: bool = False,
) -> Workload:
    """Units in a chain; besides: a skip from the first unit to the last, a mask that all read (no gradient), a bias
    without a sample axis (with gradient), a bucket per unit, cut into two boxes, and one tied between the first and
    the last unit."""
    costs = costs or [1e-3] * units
    later = tuple(range(1, units))
    values = [Value(f"h{i}", i, (i + 1,), 100) for i in range(units - 1)]
    if units > 2:
        values += [
            Value("skip", 0, (units // 2, units - 1), 40),
            Value("mask", 0, later, 8, has_grad=False),
            Value("bias", 0, later, 64, has_grad=True, sample_axis=None),
        ]
    buckets = [Bucket(f"u{i}", 100 + i, (i,)) for i in range(units)]
    if units > 1:
        buckets.append(Bucket("tied", 3, (0, units - 1)))
    return Workload(
        tuple(UnitCost(c, 2 * c, c / 100, 400, 50) for c in costs),
        tuple(values),
        tuple(buckets),
        PlanOptions(global_batch, granule),
        batch_coupled,
        least_elements=48,
    )


def two_towers(global_batch: int = 12) -> Workload:
    """Units 0 and 1 are independent, 2 reads both; unit 3 has a frozen table of its own."""
    return Workload(
        tuple(UnitCost(c, 2 * c, 0.0, 40, 5) for c in (3e-3, 1e-3, 2e-3, 1e-3)),
        (Value("left", 0, (2,), 30), Value("right", 1, (2,), 50), Value("joined", 2, (3,), 20)),
        (Bucket("a", 10, (0,)), Bucket("b", 7, (1,)), Bucket("c", 5, (2,))),
        PlanOptions(global_batch),
    )


def asking(workload: Workload, **options: Any) -> Workload:
    """The workload with other options."""
    return replace(workload, options=replace(workload.options, **options))


def even_lanes(workload: Workload, dp: int, pp: int, micro_batch: int) -> tuple[Lane, ...]:
    """Equal lanes of one rank a stage; units and samples must divide."""
    per_stage, share = len(workload.units) // pp, workload.options.global_batch // dp
    return tuple(
        lane([((c * pp + s,), (s * per_stage, (s + 1) * per_stage)) for s in range(pp)],
             split_micro_batches(Span(c * share, (c + 1) * share), micro_batch, workload.options.granule))
        for c in range(dp)
    )  # fmt: skip


def lane(stages: Sequence[tuple[Sequence[int], tuple[int, int]]], micro_batches: tuple[Span, ...]) -> Lane:
    """Stages of (ranks, units); each rank of a stage is dealt as many micro-batches, the first ones one more."""
    return Lane(
        tuple(
            Stage(Span(*units), tuple(map(Rank, ranks)), even_split(len(micro_batches), len(ranks)))
            for ranks, units in stages
        ),
        micro_batches,
    )


@st.composite
def _parts(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    """`count` positive sizes that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1))) if count > 1 else []
    borders = [0, *cuts, total]
    return tuple(hi - lo for lo, hi in itertools.pairwise(borders))


@st.composite
def uneven_lanes(draw: st.DrawFn) -> tuple[Workload, tuple[Lane, ...]]:
    """Random lanes side by side, each with cuts, widths and a micro-batch size of its own; samples of a lane need not
    adjoin."""
    granule = draw(st.integers(1, 2))
    granules = draw(st.integers(2, 12))
    units = draw(st.integers(1, 6))
    workload = chain(
        units,
        granules * granule,
        granule,
        draw(st.lists(st.sampled_from((1e-3, 3e-3, 7e-3)), min_size=units, max_size=units)),
    )
    pieces: list[list[Span]] = [[] for _ in range(draw(st.integers(1, min(3, granules))))]
    for number, block in enumerate(consecutive(draw(_parts(granules, draw(st.integers(len(pieces), granules)))))):
        mine = pieces[number if number < len(pieces) else draw(st.integers(0, len(pieces) - 1))]
        samples = Span(block.lo * granule, block.hi * granule)
        mine += split_micro_batches(samples, draw(st.integers(1, 4)) * granule, granule)
    lanes, rank = [], 0
    for micro_batches in pieces:
        stages = []
        for span in consecutive(draw(_parts(units, draw(st.integers(1, units))))):
            width = draw(st.integers(1, min(3, len(micro_batches))))
            deal = draw(_parts(len(micro_batches), width))
            stages.append(Stage(span, tuple(Rank(rank + i) for i in range(width)), deal))
            rank += width
        lanes.append(Lane(tuple(stages), tuple(micro_batches)))
    return workload, tuple(lanes)


def world(lanes: Sequence[Lane]) -> int:
    """Their ranks."""
    return sum(len(each.ranks) for each in lanes)


def wide_lane(workload: Workload, micro_batch: int = 2) -> tuple[Lane, ...]:
    """Three ranks, then two, over 4 units and all samples."""
    pieces = split_micro_batches(Span(0, workload.options.global_batch), micro_batch, workload.options.granule)
    return (lane([((0, 1, 2), (0, 2)), ((3, 4), (2, 4))], pieces),)
