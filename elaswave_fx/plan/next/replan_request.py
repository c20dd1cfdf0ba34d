"""What has become known since a plan was made, and the planner should reckon with in the next one.

ReplanRequest(speeds={2: 0.5}, leaving=(3,))    rank 2 has half of its speed, rank 3 was told to leave
ReplanRequest(reshape=ReshapeRequest(dp=2, pp=2))            the user wants 2 lanes of 2 stages
ReplanRequest(probation={2: 0.2})                  rank 2 may have 0.2 of its speed by now, if there is work for it then
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_fx.plan.work.topology import Rank


@dataclass(frozen=True)
class ReshapeRequest:
    """What a user wants a running job to do: `dp` lanes of `pp` stages each, or with neither what is best."""

    dp: int | None = None
    pp: int | None = None

    @property
    def is_best(self) -> bool:
        """Whether the planner is to choose."""
        return self.dp is None or self.pp is None

    def words(self) -> str:
        """As users write it."""
        return "best" if self.is_best else f"parallel.dp={self.dp} parallel.pp={self.pp}"


@dataclass(frozen=True)
class ReplanRequest:
    """`speeds`: of ranks that are slower, or faster, than the plan takes them for. `leaving`: those that were told to
    leave; `overdue`: of these, those that should have left by now. Both ascending. `reshape`: of the user's, if it was
    uttered under this plan. `probation`: speeds that may be assumed of ranks which theirs has left without work."""

    speeds: Mapping[Rank, float] = field(default_factory=dict[Rank, float])
    leaving: tuple[Rank, ...] = ()
    overdue: tuple[Rank, ...] = ()
    reshape: ReshapeRequest | None = None
    probation: Mapping[Rank, float] = field(default_factory=dict[Rank, float])
