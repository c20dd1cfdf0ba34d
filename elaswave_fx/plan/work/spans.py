"""Spans of one axis, runs of them, and rectangles of the work plane: what covers what, and how often.

Span(2, 6).intersect(Span(4, 9))                      ->  Span(4, 6)
Runs.of(Span(0, 2), Span(2, 3), Span(8, 9))           ->  [0, 3) [8, 9)
times_covered(Span(0, 6), [Span(0, 4), Span(2, 6)])   ->  ([0, 2), 1), ([2, 4), 2), ([4, 6), 1)
coverage([(0, 3, 0, 4)], units=3, samples=6)          ->  Coverage(seen=4, skipped=2)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elaswave_fx.errors import PlanError


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


@dataclass(frozen=True)
class Runs:
    """Positions of one axis: as few ascending spans as can be, none of them empty. `len` and iteration are of the
    positions."""

    spans: tuple[Span, ...] = ()

    @staticmethod
    def of(*spans: Span) -> Runs:
        """Those of ascending spans, those that adjoin as one; PlanError if one begins before the end of another."""
        found: list[Span] = []
        for span in filter(None, spans):
            if found and found[-1].hi > span.lo:
                raise PlanError(f"span {span} follows {found[-1]}; runs ascend")
            if found and found[-1].hi == span.lo:
                found[-1] = Span(found[-1].lo, span.hi)
            else:
                found.append(span)
        return Runs(tuple(found))

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __contains__(self, position: object) -> bool:
        for span in self.spans:  # noqa: SIM110 - asked for every unit of every rank: a generator takes twice as long
            if position in span:
                return True
        return False

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.spans)

    def __str__(self) -> str:
        return " ".join(map(str, self.spans)) or "none"


class WorkSpan(NamedTuple):
    """A rectangle of the work plane; samples count within the step."""

    units: Span
    samples: Span

    @property
    def edges(self) -> Edges:
        """How reports and ledger lines tell it."""
        return self.units.lo, self.units.hi, self.samples.lo, self.samples.hi


Edges = tuple[int, int, int, int]
"""First unit, last + 1, first sample, last + 1 of a rectangle."""


@dataclass(frozen=True)
class Coverage:
    """Numbers of samples whose whole work (every unit) was done at least once, more than once, or not at all, for
    example because the plan skipped them."""

    seen: int = 0
    duplicated: int = 0
    skipped: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.seen + other.seen, self.duplicated + other.duplicated, self.skipped + other.skipped)


def coverage(work: Iterable[Edges], units: int, samples: int) -> Coverage:
    """How rectangles cover the work plane of one step, `units` x `samples`.

    A sample is seen when all its units were computed, skipped otherwise; duplicated when a unit was computed twice.
    Within a strip between borders of rectangles all samples are alike, so each strip is counted once.
    """
    work = tuple(work)
    borders = sorted({0, samples, *(min(max(border, 0), samples) for edges in work for border in edges[2:])})
    total = Coverage()
    for lo, hi in itertools.pairwise(borders):
        here = [
            Span(max(first, 0), max(first, last, 0)) for first, last, start, end in work if start <= lo and hi <= end
        ]
        times = [count for _, count in times_covered(Span(0, units), here)]
        width, whole = hi - lo, min(times, default=0) > 0
        total += Coverage(width * whole, width * (max(times, default=0) > 1), width * (not whole))
    return total


def times_covered(whole: Span, spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """The parts of `whole` in order, each with the number of `spans` that cover it; parts that adjoin may have the same
    number."""
    change = Counter({whole.lo: 0, whole.hi: 0})
    for span in spans:
        common = whole.intersect(span)
        if common is not None:
            change[common.lo] += 1
            change[common.hi] -= 1
    count = 0
    for lo, hi in itertools.pairwise(sorted(change)):
        count += change[lo]
        yield Span(lo, hi), count


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
