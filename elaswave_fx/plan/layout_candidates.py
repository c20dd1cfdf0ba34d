"""Shapes of tilings: pipelines side by side, or stages one after the other, cut as evenly as costs allow.

In: a workload, ranks in the order of their places, a micro-batch size. Out: the tiling, or None where no cut fits the
memory of the ranks. `planner.py` tries sizes for a wanted shape, `resplit_samples.py` tries shapes for the ranks that
are left.

    cut_rows(workload, stages=((m0, m1), (m2,)), size=4, table)  ->  rank 2 has fewer units, for all samples
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import Workload
from elaswave_fx.plan.memory import MemoryTable
from elaswave_fx.plan.partition import crossing_bytes, minimax, slowest_stage
from elaswave_fx.plan.tiling import Column, Row, Tiling, columns, consecutive, rows
from elaswave_fx.plan.topology import Member

MICRO_BATCHES_PER_STAGE = 2
"""A pipeline gets about this many micro-batches per stage: bubbles of (p - 1) / (3p - 1) and large kernels still."""


class Shaped(NamedTuple):
    """A tiling, and the borders of its units: of each pipeline, or of all samples alike."""

    tiles: Tiling
    cuts: tuple[tuple[int, ...], ...]


def cut_columns(
    workload: Workload, pipelines: Sequence[Sequence[Member]], size: int, table: MemoryTable
) -> Shaped | None:
    """Each pipeline with its own cuts and its own share of samples."""
    costs, crossing = unit_seconds(workload, size), crossing_bytes(workload)
    known: dict[tuple[tuple[float, int | None], ...], tuple[int, ...] | None] = {}
    found = []
    for pipeline in pipelines:
        kind = tuple((m.speed, m.memory_bytes) for m in pipeline)
        if kind not in known:
            known[kind] = _cut(pipeline, costs, crossing, size, table)
        cut = known[kind]
        if cut is None:
            return None
        found.append(cut)
    slowest = [slowest_stage(costs, speeds(p), c) for p, c in zip(pipelines, found, strict=True)]
    shares = share_granules(workload.granules, slowest)
    samples = consecutive([share * workload.granule for share in shares])
    parts = [Column(tuple(m.rank for m in p), c, s) for p, c, s in zip(pipelines, found, samples, strict=True)]
    return Shaped(columns(parts, size, workload.granule), tuple(found))


def cut_rows(workload: Workload, stages: Sequence[Sequence[Member]], size: int, table: MemoryTable) -> Shaped | None:
    """All samples cut at the same units; the ranks of a stage share the samples by their speed."""
    strength = [sum(speeds(stage)) for stage in stages]
    costs = unit_seconds(workload, size)
    bounds = minimax(costs, strength, _fits_row(stages, table, size), crossing_bytes(workload))
    if bounds is None:
        return None
    parts = [
        Row(tuple(m.rank for m in stage), Span(lo, hi), sample_shares(workload, stage))
        for stage, (lo, hi) in zip(stages, itertools.pairwise(bounds), strict=True)
    ]
    return Shaped(rows(parts, size, workload.granule), (bounds,))


def sample_shares(workload: Workload, stage: Sequence[Member]) -> tuple[int, ...]:
    """Samples of each rank of a stage, whole granules, by speed."""
    return tuple(n * workload.granule for n in share_granules(workload.granules, [1 / m.speed for m in stage]))


def unit_seconds(workload: Workload, micro_batch: int) -> tuple[float, ...]:
    """Seconds of forward and backward of one micro-batch through each unit at speed 1."""
    return tuple(2 * u.fixed_s + (u.forward_s + u.backward_s) * micro_batch for u in workload.units)


def share_granules(granules: int, paces: Sequence[float]) -> tuple[int, ...]:
    """Granules per worker, at least one each, so that the last to finish finishes first.

    `paces`: time per granule, in any unit. Equal paces give an even split, remainders to the first, one each.
    """
    shares = [1] * len(paces)
    finish = [(2 * pace, index) for index, pace in enumerate(paces)]
    heapq.heapify(finish)
    for _ in range(granules - len(paces)):
        _, index = finish[0]
        shares[index] += 1
        heapq.heapreplace(finish, ((shares[index] + 1) * paces[index], index))
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


def _cut(
    pipeline: Sequence[Member], costs: Sequence[float], crossing: Sequence[int], size: int, table: MemoryTable
) -> tuple[int, ...] | None:
    """The borders of one pipeline, None if no partition fits its ranks."""
    return minimax(costs, speeds(pipeline), _fits_row([[m] for m in pipeline], table, size), crossing)


def _fits_row(stages: Sequence[Sequence[Member]], table: MemoryTable, size: int) -> Callable[[int, Span], bool] | None:
    """Whether units fit the smallest rank of a stage; None if memory bounds nobody."""
    limits = [min((m.memory_bytes for m in stage if m.memory_bytes is not None), default=None) for stage in stages]
    if all(limit is None for limit in limits):
        return None

    def fits(stage: int, units: Span) -> bool:
        limit = limits[stage]
        return limit is None or table.total(units, size, len(stages) - stage) <= limit

    return fits


def speeds(members: Sequence[Member]) -> list[float]:
    """Their speeds, in order."""
    return [m.speed for m in members]
