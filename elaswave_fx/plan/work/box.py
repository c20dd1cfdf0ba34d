"""Boxes: the pieces in which a job's state is kept, replicated and moved between ranks.

Box(bucket=3, span=[0, 500), owner=0, holders=(2,), catching_up=(), readers=(0, 2))
    rank 0 updates elements [0, 500) of bucket 3, rank 2 keeps a replica, ranks 0 and 2 compute with them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NewType, cast

from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank

BoxId = NewType("BoxId", int)
"""Index of a box in `Plan.boxes`, fixed for the whole job."""


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
