"""Tilings of the work plane: which rank computes which units for which samples.

The plane is units x samples of one step. It is cut into *lanes*: a lane is a run of stages, of one or more ranks each,
with its own cuts of the units and its own samples. Its samples are cut into micro-batches once, for all its stages, and
the ranks of a stage are dealt whole ones. Pipelines side by side are lanes of width 1; stages of their own widths, for
all samples, are one lane.

    Lane(stages (Stage([0, 2), ranks (0, 1), deal (2, 2)), Stage([2, 4), ranks (2,), deal (4,))),
         micro_batches [0, 4) [4, 8) [8, 12) [12, 16))
        ->  rank 0: units [0, 2) x samples [0, 8), rank 1: units [0, 2) x samples [8, 16),
            rank 2: units [2, 4) x samples [0, 16)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.spans import Runs, Span, WorkSpan, consecutive, even_split
from elaswave_fx.plan.work.topology import Rank


@dataclass(frozen=True)
class Tile:
    """The part of the work plane that one rank computes: runs of units for runs of samples, which count within the
    step. `micro_batches` ascend and need not adjoin. A rank in no lane has no units and no samples."""

    rank: Rank
    units: Runs
    micro_batches: tuple[Span, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The samples, in as few spans as can be."""
        return Runs.of(*self.micro_batches).spans

    @property
    def work(self) -> tuple[WorkSpan, ...]:
        """Rectangles, by units, then by samples: what the rank's vote says when it has computed just that."""
        return tuple(WorkSpan(units, samples) for units in self.units.spans for samples in self.spans)

    @cached_property
    def sample_count(self) -> int:
        """How many samples that are."""
        return sum(len(m) for m in self.micro_batches)


Tiling = tuple[Tile, ...]
"""One tile per rank, in rank order; together they cover the plane exactly once, some of them with nothing."""


@dataclass(frozen=True)
class Stage:
    """Units of a lane, and its ranks. `deal`: how many of the lane's micro-batches each of them runs, one after the
    other: the first rank the first ones, and so on."""

    units: Span
    ranks: tuple[Rank, ...]
    deal: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.deal):
            raise PlanError(f"stage of units {self.units}: {len(self.deal)} shares for {len(self.ranks)} ranks")


@dataclass(frozen=True)
class Lane:
    """A run of stages with its own samples; `micro_batches` ascend and are the same for all stages."""

    stages: tuple[Stage, ...]
    micro_batches: tuple[Span, ...]

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """Stage by stage, in the order in which micro-batches are dealt: places of the lane."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def borders(self) -> tuple[int, ...]:
        """Borders of its stages' units, one more than stages."""
        return (self.stages[0].units.lo, *(stage.units.hi for stage in self.stages))

    @property
    def tiles(self) -> Iterable[Tile]:
        """Those of its ranks, stage by stage."""
        for stage in self.stages:
            units = Runs.of(stage.units)
            for rank, dealt in zip(stage.ranks, consecutive(stage.deal), strict=True):
                yield Tile(rank, units, self.micro_batches[dealt.lo : dealt.hi])


def tiles_of(lanes: Iterable[Lane], ranks: Iterable[Rank] = ()) -> Tiling:
    """The tiles of all ranks of the lanes, and empty ones of others among `ranks`, in their order."""
    found = {tile.rank: tile for lane in lanes for tile in lane.tiles}
    idle = {rank: Tile(rank, Runs(), ()) for rank in ranks if rank not in found}
    return tuple(sorted((*found.values(), *idle.values()), key=lambda tile: tile.rank))


def split_micro_batches(samples: Span, most: int, granule: int, least: int = 1) -> tuple[Span, ...]:
    """Micro-batches of `samples`: as few and as equal as `most` samples at once allow, whole granules each; at least
    `least` of them, which there must be granules for."""
    granules = len(samples) // granule
    count = max(least, -(-granules // max(1, most // granule)))
    return consecutive([size * granule for size in even_split(granules, count)], samples.lo)
