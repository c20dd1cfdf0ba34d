"""Boxes, layouts, and routing from one layout to another: the intersection of boxes, nothing else.

route({0: [0,6)}, {0: [0,3), 1: [3,6)})  ->  (Move(source=0, target=0, box=[0,3)), Move(0, 1, [3,6)))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.topology import Rank


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range [lo, hi) of one axis."""

    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo <= self.hi:
            raise PlanError(f"span [{self.lo}, {self.hi}) is not a range; 0 <= lo <= hi")

    def __len__(self) -> int:
        return self.hi - self.lo

    def __bool__(self) -> bool:
        return self.hi > self.lo

    def __contains__(self, position: object) -> bool:
        return isinstance(position, int) and self.lo <= position < self.hi

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.lo, self.hi))

    def __str__(self) -> str:
        return f"[{self.lo}, {self.hi})"

    def intersect(self, other: Span) -> Span | None:
        """The common part, None if there is none."""
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        return Span(lo, hi) if lo < hi else None

    def relative_to(self, origin: Span) -> Span:
        """This span in coordinates in which `origin` starts at 0; this must lie within `origin`."""
        if not (origin.lo <= self.lo and self.hi <= origin.hi):
            raise PlanError(f"span {self} does not lie within {origin}")
        return Span(self.lo - origin.lo, self.hi - origin.lo)


@dataclass(frozen=True, order=True)
class Box:
    """An axis-aligned region of a logical tensor, one span per axis."""

    spans: tuple[Span, ...]

    @property
    def volume(self) -> int:
        """Elements in the box (1 for a box without axes)."""
        volume = 1
        for span in self.spans:
            volume *= len(span)
        return volume

    def __str__(self) -> str:
        return "x".join(str(s) for s in self.spans)

    def intersect(self, other: Box) -> Box | None:
        """The common part, None if there is none; PlanError if the boxes have different numbers of axes."""
        if len(self.spans) != len(other.spans):
            raise PlanError(f"box {self} and box {other} belong to tensors with different numbers of axes")
        common = [a.intersect(b) for a, b in zip(self.spans, other.spans, strict=True)]
        if any(c is None for c in common):
            return None
        return Box(tuple(c for c in common if c is not None))

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """What is left of this box without `other`: disjoint boxes, at most two per axis."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.volume else ()
        pieces: list[Box] = []
        core = list(self.spans)
        for axis, (mine, cut) in enumerate(zip(self.spans, common.spans, strict=True)):
            for side in (Span(mine.lo, cut.lo), Span(cut.hi, mine.hi)):
                if side:
                    pieces.append(Box((*core[:axis], side, *core[axis + 1 :])))
            core[axis] = cut
        return tuple(piece for piece in pieces if piece.volume)


def box(*spans: tuple[int, int]) -> Box:
    """A box from (lo, hi) pairs."""
    return Box(tuple(Span(lo, hi) for lo, hi in spans))


@dataclass(frozen=True)
class Layout:
    """Which rank holds which box of one logical tensor; a rank may hold several, boxes may be held twice."""

    parts: tuple[tuple[Rank, Box], ...]

    def covers_once(self, whole: Box) -> bool:
        """Whether the boxes lie within `whole`, do not overlap, and leave nothing out."""
        return (
            all(b.intersect(whole) == b for _, b in self.parts if b.volume)
            and sum(b.volume for _, b in self.parts) == whole.volume
            and not difference([whole], [b for _, b in self.parts])
        )


@dataclass(frozen=True, order=True)
class Move:
    """`source` holds `box` and `target` shall hold it; both are the same rank where nothing has to travel."""

    source: Rank
    target: Rank
    box: Box


def difference(boxes: Iterable[Box], without: Iterable[Box]) -> tuple[Box, ...]:
    """What is left of `boxes` when all of `without` is taken away."""
    left = tuple(boxes)
    for other in without:
        left = tuple(piece for b in left for piece in b.subtract(other))
    return left


def route(old: Layout, new: Layout) -> tuple[Move, ...]:
    """The moves that turn `old` into `new`, each wanted element exactly once, in order of `new`.

    A rank takes what it holds itself first, then from the others in order of `old`. PlanError names the first
    box that nobody holds.
    """
    moves: list[Move] = []
    for target, wanted in new.parts:
        missing: Sequence[Box] = (wanted,) if wanted.volume else ()
        for source, held in sorted(old.parts, key=lambda part: part[0] != target):
            for piece in missing:
                common = piece.intersect(held)
                if common is not None:
                    moves.append(Move(source, target, common))
            missing = difference(missing, [held])
        if missing:
            raise PlanError(f"route: rank {target} wants {missing[0]}, which no rank holds")
    return tuple(moves)
