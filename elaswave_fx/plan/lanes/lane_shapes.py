"""Candidate lanes: ranks in stages, before the cuts of units and the samples are known.

LaneShape(((m0, m1), (m2,)))  a lane of two stages, the first one two ranks wide
SideBySide(members, (3, 2))   two lanes one rank wide, the first one three stages deep
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from elaswave_fx.plan.work.topology import Link, Member


@dataclass(frozen=True)
class LaneShape:
    """A candidate lane: its members, stage by stage; `borders` of its units, None where they are still to be chosen."""

    stages: tuple[tuple[Member, ...], ...]
    borders: tuple[int, ...] | None = None

    @cached_property
    def width(self) -> int:
        """Width of its widest stage, a lower bound of its micro-batches."""
        return max(len(stage) for stage in self.stages)

    @property
    def members(self) -> list[Member]:
        """All members, stage by stage."""
        return [member for stage in self.stages for member in stage]

    @cached_property
    def strengths(self) -> tuple[float, ...]:
        """Sum of the ranks' speeds, by stage."""
        return tuple(sum(member.speed for member in stage) for stage in self.stages)


LaneShapes = Sequence[LaneShape]


class SideBySide(Sequence[LaneShape]):
    """Lanes of these depths, one rank wide, whose early stages are early in `order`; built on access."""

    def __init__(self, order: Sequence[Member], depths: Sequence[int]) -> None:
        self.order, self.depths = order, depths

    def __len__(self) -> int:
        return len(self.depths)

    @overload
    def __getitem__(self, place: int) -> LaneShape: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[LaneShape]: ...
    def __getitem__(self, place: int | slice) -> LaneShape | Sequence[LaneShape]:
        return self._drawn[place]

    @cached_property
    def _drawn(self) -> tuple[LaneShape, ...]:
        depths = self.depths
        places = sorted(((stage + 0.5) / depth, lane) for lane, depth in enumerate(depths) for stage in range(depth))
        lanes: list[list[Member]] = [[] for _ in depths]
        for member, (_, lane) in zip(self.order, places, strict=True):
            lanes[lane].append(member)
        return tuple(LaneShape(tuple((member,) for member in lane)) for lane in lanes)


class ShapeBounds(NamedTuple):
    """Inputs of bounds on lane shapes: their ranks, the least number of ranks that share a unit, the least number of
    micro-batches, and the stages of the shallowest and deepest lane."""

    ranks: int
    owners: int
    across: int
    shallowest: int
    deepest: int

    @staticmethod
    def of(shapes: LaneShapes | ShapeBounds) -> ShapeBounds:
        """The inputs of bounds on the shapes, without building them."""
        if isinstance(shapes, ShapeBounds):
            return shapes
        if isinstance(shapes, SideBySide):
            depths, count = shapes.depths, len(shapes)
            return ShapeBounds(sum(depths), count, count, min(depths), max(depths))
        return ShapeBounds(
            sum(len(stage) for shape in shapes for stage in shape.stages),
            sum(min(len(stage) for stage in shape.stages) for shape in shapes),
            sum(shape.width for shape in shapes),
            min(len(shape.stages) for shape in shapes),
            max(len(shape.stages) for shape in shapes),
        )


class Run(NamedTuple):
    """`count` consecutive lane shapes that are alike; `shape` is the first of them. `links` as in LaneKind."""

    shape: LaneShape
    count: int
    links: tuple[Link, ...] = (Link(),)


class Cut(NamedTuple):
    """Runs with micro-batches of at most `size` samples. By run: `borders` of its units, the best number of granules
    for each lane, and how many of its lanes get one more."""

    runs: Sequence[Run]
    borders: Sequence[tuple[int, ...]]
    size: int
    shares: Sequence[tuple[int, int]]


class Part(NamedTuple):
    """`count` consecutive candidate lanes, alike but for their ranks: `run`, cut at `borders`, with equal granules."""

    run: Run
    borders: tuple[int, ...]
    granules: int
    count: int
