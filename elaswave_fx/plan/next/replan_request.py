"""News since a plan was made, for the planner to consider in the next one.

ReplanRequest(speeds={2: 0.5}, leaving=(3,))        rank 2 has half of its speed, rank 3 is draining
ReplanRequest(reshape=ReshapeRequest(dp=2, pp=2))   the user wants 2 lanes of 2 stages
ReplanRequest(probation={2: 0.2})                   assume 0.2 of its speed for rank 2, if that gives it work
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_fx.plan.work.topology import Rank


@dataclass(frozen=True)
class ReshapeRequest:
    """A user's request to a running job: `dp` lanes of `pp` stages each, or with neither the best layout."""

    dp: int | None = None
    pp: int | None = None

    @property
    def is_best(self) -> bool:
        """Whether the planner chooses the layout."""
        return self.dp is None or self.pp is None

    def words(self) -> str:
        """The request in the user's notation."""
        return "best" if self.is_best else f"parallel.dp={self.dp} parallel.pp={self.pp}"


@dataclass(frozen=True)
class ReplanRequest:
    """`speeds`: of ranks whose measured speed differs from the plan's. `leaving`: draining ranks; `overdue`: those of
    them past their deadline; both ascending. `reshape`: a request made under this plan. `probation`: assumed speeds of
    ranks that were too slow for any work."""

    speeds: Mapping[Rank, float] = field(default_factory=dict[Rank, float])
    leaving: tuple[Rank, ...] = ()
    overdue: tuple[Rank, ...] = ()
    reshape: ReshapeRequest | None = None
    probation: Mapping[Rank, float] = field(default_factory=dict[Rank, float])
