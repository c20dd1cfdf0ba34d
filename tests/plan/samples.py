"""Small workloads and tilings that the plan tests share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.tiling import Column, Row, Tiling, columns, consecutive, rows
from elaswave_fx.plan.topology import Rank


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
        global_batch,
        granule,
        batch_coupled,
        least_elements=48,
    )


def two_towers(global_batch: int = 12) -> Workload:
    """Units 0 and 1 are independent, 2 reads both; unit 3 has a frozen table of its own."""
    return Workload(
        tuple(UnitCost(c, 2 * c, 0.0, 40, 5) for c in (3e-3, 1e-3, 2e-3, 1e-3)),
        (Value("left", 0, (2,), 30), Value("right", 1, (2,), 50), Value("joined", 2, (3,), 20)),
        (Bucket("a", 10, (0,)), Bucket("b", 7, (1,)), Bucket("c", 5, (2,))),
        global_batch,
    )


def even_columns(workload: Workload, dp: int, pp: int, micro_batch: int) -> Tiling:
    """Equal tiles; units and samples must divide."""
    per_stage, share = len(workload.units) // pp, workload.global_batch // dp
    bounds = tuple(range(0, len(workload.units) + 1, per_stage))
    pipelines = [
        Column(tuple(Rank(c * pp + s) for s in range(pp)), bounds, Span(c * share, (c + 1) * share)) for c in range(dp)
    ]
    return columns(pipelines, micro_batch, workload.granule)


@st.composite
def _parts(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    """`count` positive sizes that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1))) if count > 1 else []
    borders = [0, *cuts, total]
    return tuple(hi - lo for lo, hi in itertools.pairwise(borders))


@st.composite
def uneven_tilings(draw: st.DrawFn) -> tuple[Workload, Tiling]:
    """Random rows, columns, or both side by side, with a micro-batch size of its own for each rank."""
    granule = draw(st.integers(1, 2))
    granules = draw(st.integers(2, 12))
    units = draw(st.integers(1, 6))
    workload = chain(
        units,
        granules * granule,
        granule,
        draw(st.lists(st.sampled_from((1e-3, 3e-3, 7e-3)), min_size=units, max_size=units)),
    )
    blocks = draw(_parts(granules, draw(st.integers(1, min(3, granules)))))
    tiles, rank = [], 0
    for block in consecutive([b * granule for b in blocks]):
        stages = draw(_parts(units, draw(st.integers(1, units))))
        for span in consecutive(stages):
            width = draw(st.integers(1, min(3, len(block) // granule)))
            shares = [g * granule for g in draw(_parts(len(block) // granule, width))]
            for samples in consecutive(shares, block.lo):
                size = draw(st.integers(1, 4)) * granule
                column = Column((Rank(rank),), (span.lo, span.hi), samples)
                tiles += columns([column], size, granule)
                rank += 1
    return workload, tuple(tiles)


def uneven_rows(workload: Workload, micro_batch: int = 2) -> Tiling:
    """Three ranks, then two, over 4 units and 16 samples."""
    return rows(
        [Row((Rank(0), Rank(1), Rank(2)), Span(0, 2), (6, 5, 5)), Row((Rank(3), Rank(4)), Span(2, 4), (8, 8))],
        micro_batch,
        workload.granule,
    )
