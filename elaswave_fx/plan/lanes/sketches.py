"""Ranks in places: lanes to be, before anybody knows where their units are cut and which samples they get.

Sketch(((m0, m1), (m2,)))             a lane of two stages, the first one two ranks wide
SideBySide(members, (3, 2))           two lanes one rank wide, the first one three stages deep
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

from elaswave_fx.plan.work.topology import Link, Member


@dataclass(frozen=True)
class Sketch:
    """A lane to be: its members, stage by stage; `borders` of its units, None where they are to be found."""

    stages: tuple[tuple[Member, ...], ...]
    borders: tuple[int, ...] | None = None

    @cached_property
    def width(self) -> int:
        """Of its widest stage: so many micro-batches it needs at least."""
        return max(len(stage) for stage in self.stages)

    @property
    def members(self) -> list[Member]:
        """All of them, stage by stage."""
        return [member for stage in self.stages for member in stage]

    @cached_property
    def strengths(self) -> tuple[float, ...]:
        """Of its stages: the speeds of their ranks together."""
        return tuple(sum(member.speed for member in stage) for stage in self.stages)


Sketches = Sequence[Sketch]


class SideBySide(Sequence[Sketch]):
    """Lanes of these depths, one rank wide, whose early stages are early in `order`; drawn when they are looked at."""

    def __init__(self, order: Sequence[Member], depths: Sequence[int]) -> None:
        self.order, self.depths = order, depths

    def __len__(self) -> int:
        return len(self.depths)

    @overload
    def __getitem__(self, place: int) -> Sketch: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sketch]: ...
    def __getitem__(self, place: int | slice) -> Sketch | Sequence[Sketch]:
        return self._drawn[place]

    @cached_property
    def _drawn(self) -> tuple[Sketch, ...]:
        depths = self.depths
        places = sorted(((stage + 0.5) / depth, lane) for lane, depth in enumerate(depths) for stage in range(depth))
        lanes: list[list[Member]] = [[] for _ in depths]
        for member, (_, lane) in zip(self.order, places, strict=True):
            lanes[lane].append(member)
        return tuple(Sketch(tuple((member,) for member in lane)) for lane in lanes)


class Outline(NamedTuple):
    """What bounds need to know of sketches: their ranks, how many share a unit at least, how many micro-batches there
    are at least, and the stages of the shallowest and of the deepest."""

    ranks: int
    owners: int
    across: int
    shallowest: int
    deepest: int

    @staticmethod
    def of(sketches: Sketches | Outline) -> Outline:
        """Without drawing them."""
        if isinstance(sketches, Outline):
            return sketches
        if isinstance(sketches, SideBySide):
            depths, count = sketches.depths, len(sketches)
            return Outline(sum(depths), count, count, min(depths), max(depths))
        return Outline(
            sum(len(stage) for sketch in sketches for stage in sketch.stages),
            sum(min(len(stage) for stage in sketch.stages) for sketch in sketches),
            sum(sketch.width for sketch in sketches),
            min(len(sketch.stages) for sketch in sketches),
            max(len(sketch.stages) for sketch in sketches),
        )


class Run(NamedTuple):
    """`count` sketches, one after the other, that are alike; `sketch` is the first of them. `links` as in LaneKind."""

    sketch: Sketch
    count: int
    links: tuple[Link, ...] = (Link(),)


class Cut(NamedTuple):
    """Runs with micro-batches of at most `size` samples. By run: `borders` of its units, and as many granules as are
    best for each lane, with how many of its lanes get one more."""

    runs: Sequence[Run]
    borders: Sequence[tuple[int, ...]]
    size: int
    shares: Sequence[tuple[int, int]]


class Part(NamedTuple):
    """`count` lanes to be, one after the other, that are alike but for their ranks: as `run` says, cut at `borders`,
    with so many granules each."""

    run: Run
    borders: tuple[int, ...]
    granules: int
    count: int
