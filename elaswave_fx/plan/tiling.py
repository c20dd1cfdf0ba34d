"""Tilings of the work plane: which rank computes which units for which samples.

The plane is units x samples of one step. *Columns*: each pipeline has its own cuts and its own share of samples.
*Rows*: all samples are cut at the same units, stages have their own width, so sample cuts of neighbouring stages
need not line up.

    columns(granule 1, [Column(ranks (0, 1), bounds (0, 2, 4), samples [0, 8))], micro 4)
        ->  rank 0: units [0, 2) x samples [0, 8), rank 1: units [2, 4) x samples [0, 8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.topology import Rank


@dataclass(frozen=True)
class Tile:
    """The sub-rectangle of the work plane that one rank computes; samples count within the step."""

    rank: Rank
    units: Span
    samples: Span
    micro_batches: tuple[Span, ...]


Tiling = tuple[Tile, ...]
"""One tile per rank, in rank order; together they cover the plane exactly once."""


@dataclass(frozen=True)
class Column:
    """One pipeline: `ranks` from first to last stage, `bounds` its unit borders (one more than ranks)."""

    ranks: tuple[Rank, ...]
    bounds: tuple[int, ...]
    samples: Span


@dataclass(frozen=True)
class Row:
    """One stage of every pipeline: `units` for all samples, `shares` samples for each of `ranks`."""

    ranks: tuple[Rank, ...]
    units: Span
    shares: tuple[int, ...]


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """`parts` sizes that add up to `total`; the first ones are larger by one where it does not divide."""
    base, rest = divmod(total, parts)
    return tuple(base + (i < rest) for i in range(parts))


def consecutive(sizes: Sequence[int], first: int = 0) -> tuple[Span, ...]:
    """Spans of these sizes one after the other, from `first`."""
    spans = []
    for size in sizes:
        spans.append(Span(first, first + size))
        first += size
    return tuple(spans)


def split_micro_batches(samples: Span, most: int, granule: int) -> tuple[Span, ...]:
    """Micro-batches of `samples`: as few and as equal as `most` samples at once allow, whole granules each."""
    granules = len(samples) // granule
    count = -(-granules // max(1, most // granule))
    return consecutive([size * granule for size in even_split(granules, count)], samples.lo)


def columns(pipelines: Sequence[Column], micro_batch: int, granule: int) -> Tiling:
    """The tiling of pipelines side by side, each with at most `micro_batch` samples at once."""
    tiles = []
    for pipeline in pipelines:
        pieces = split_micro_batches(pipeline.samples, micro_batch, granule)
        for stage, rank in enumerate(pipeline.ranks):
            units = Span(pipeline.bounds[stage], pipeline.bounds[stage + 1])
            tiles.append(Tile(rank, units, pipeline.samples, pieces))
    return tuple(sorted(tiles, key=lambda tile: tile.rank))


def rows(stages: Sequence[Row], micro_batch: int, granule: int) -> Tiling:
    """The tiling of stages of their own widths, each rank with at most `micro_batch` samples at once."""
    tiles = []
    for stage in stages:
        for rank, samples in zip(stage.ranks, consecutive(stage.shares), strict=True):
            tiles.append(Tile(rank, stage.units, samples, split_micro_batches(samples, micro_batch, granule)))
    return tuple(sorted(tiles, key=lambda tile: tile.rank))
