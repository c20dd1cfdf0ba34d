"""Spans of one axis, and boxes: the pieces in which a job's state is kept, replicated and moved between ranks.

Box(bucket=3, span=[0, 500), owner=0, holders=(2,), catching_up=(), readers=(0, 2))
    rank 0 updates elements [0, 500) of bucket 3, rank 2 keeps a replica, ranks 0 and 2 compute with them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType, cast

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.topology import Rank

BoxId = NewType("BoxId", int)
"""Index of a box in `Plan.boxes`, fixed for the whole job."""


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
class Box:
    """A piece of a bucket that is kept, replicated and moved whole; plan, control, engine and checkpoint refer to it.

    `bucket`: an index into the workload's buckets; `span`: its flat elements. The `owner` sums the gradient, updates
    and publishes. The `holders` keep state and record too, and apply the same update; those that are `catching_up` have
    no state yet. The `readers` are the ranks whose units compute with these elements, ascending; they may exclude the
    owner.
    """

    bucket: int
    span: Span
    owner: Rank
    holders: tuple[Rank, ...] = ()
    catching_up: tuple[Rank, ...] = ()
    readers: tuple[Rank, ...] = ()

    @property
    def replica_ranks(self) -> tuple[Rank, ...]:
        """The ranks that have or will get a replica: the owner first."""
        return (self.owner, *self.holders)

    @property
    def local_materializers(self) -> frozenset[Rank]:
        """Ranks that make its working parameters from their own replica; other readers receive the owner's."""
        return frozenset(self.replica_ranks) - frozenset(self.catching_up)


def numbered(boxes: Iterable[Box]) -> Iterator[tuple[BoxId, Box]]:
    """Every box of a plan with its id."""
    return cast("Iterator[tuple[BoxId, Box]]", enumerate(boxes))
