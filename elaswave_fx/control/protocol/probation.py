"""Probation of ranks that were too slow for any work: when they get work again, and at which assumed speed. Pure.

In: the ranks that a plan leaves without work for their speeds, and the time. Out: speeds that the planner may assume.

    probation = Probation().seen(SlowRanks({2: DrainedRank(0.1, 1.0)}), now_s=0.0)
    probation.speeds(59.0)   ->  {}
    probation.speeds(61.0)   ->  {2: 0.2}       then 0.4 after 120 s, 0.8, 1.0

A rank without work is not measured, so its recovery would not be detected. Its assumed speed doubles every `wait_s`
until the planner has work for it: the least that pays, so that a rank that is still slow delays the others little. Then
it is measured: if it loses its work again, `wait_s` doubles; if it is faster, its share follows the measurement. The
plan lists the ranks on probation; their waiting times are lost with the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elaswave_fx.plan.work.topology import Rank

WAIT_S = 60.0
"""Time before a rank's first probation."""

MOST_WAIT_S = 3600.0
"""Longest time before another probation of a rank that was slow again and again."""


@dataclass(frozen=True, slots=True)
class DrainedRank:
    """A rank without work: its `speed`, and the highest speed of working ranks, which bounds the assumed one."""

    speed: float
    highest: float


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """A plan's slow ranks. `on_trial`: those that it gives work on probation."""

    drained: Mapping[Rank, DrainedRank] = field(default_factory=dict[Rank, DrainedRank])
    on_trial: frozenset[Rank] = frozenset()


@dataclass(frozen=True, slots=True)
class Probation:
    """`drained`: ranks without work now; `since_s`: when they had work last; `wait_s`: also of ranks on probation."""

    drained: Mapping[Rank, DrainedRank] = field(default_factory=dict[Rank, DrainedRank])
    since_s: Mapping[Rank, float] = field(default_factory=dict[Rank, float])
    wait_s: Mapping[Rank, float] = field(default_factory=dict[Rank, float])

    def seen(self, slow: SlowRanks, now_s: float) -> Probation:
        """Return the state after a look at the plan in force."""
        since_s = {rank: self.since_s.get(rank, now_s) for rank in slow.drained}
        wait_s = {rank: self.wait_s.get(rank, WAIT_S) for rank in slow.on_trial}
        for rank in slow.drained:
            known_s = self.wait_s.get(rank, WAIT_S)
            has_failed = rank in self.wait_s and rank not in self.since_s  # its probation has just ended
            wait_s[rank] = min(2 * known_s, MOST_WAIT_S) if has_failed else known_s
        return Probation(slow.drained, since_s, wait_s)

    def speeds(self, now_s: float) -> Mapping[Rank, float]:
        """Return assumed speeds, higher than the plan's, of ranks whose probation is due."""
        found: dict[Rank, float] = {}
        for rank, each in self.drained.items():
            waits = int((now_s - self.since_s[rank]) // self.wait_s[rank])
            if waits > 0:
                found[rank] = min(each.speed * 2.0 ** min(waits, 64), each.highest)
        return found
