"""Objectives of plans: the steps committed by the end of the topology's expected life.

In: the step of a draft, and the stall before its first one. Out: steps. Terms common to all drafts are left out, so
that rounding does not hide differences.

    AtOnce(life_s=3600).steps(2.0, stall_s=10)                           ->  1795
    OnTheWay(target_s=2.0, target_stall_s=10, sync_s=30).steps(2.4, 0.0) ->  17.5, of which 12.5 before the target
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

PAUSE_S = 0.05
"""Cost of a planned reconfiguration without transfers, beside a step: ranks report, and install a plan."""


class Objective(Protocol):
    """More is better."""

    def steps(self, step_s: float, stall_s: float) -> float:
        """Committed steps of `step_s` seconds each, after a stall."""
        ...

    def longest_s(self, steps: float) -> float:
        """Seconds of a step that commit `steps` without a stall; infinite if any length does."""
        ...


@dataclass(frozen=True)
class AtOnce:
    """Steps of a draft that stays for the whole life of the topology."""

    life_s: float

    def steps(self, step_s: float, stall_s: float) -> float:
        return max(self.life_s - stall_s, 0.0) / step_s

    def longest_s(self, steps: float) -> float:
        return self.life_s / steps if steps else math.inf


@dataclass(frozen=True)
class OnTheWay:
    """Steps of an intermediate draft, left for a target layout of steps of `target_s` once replicas are in sync. The
    horizon is a stall of `target_stall_s`, the sync and a planned reconfiguration, one after the other."""

    target_s: float
    target_stall_s: float
    sync_s: float

    @property
    def steps_without(self) -> float:
        """Committed steps if the target is taken without an intermediate draft."""
        return (self.sync_s + PAUSE_S) / self.target_s

    def steps(self, step_s: float, stall_s: float) -> float:
        return self.sync_s / step_s + max(self.target_stall_s - stall_s, 0.0) / self.target_s

    def longest_s(self, steps: float) -> float:
        before = steps - self.target_stall_s / self.target_s
        return self.sync_s / before if before > 0 else math.inf


@dataclass(frozen=True)
class InBackground:
    """Steps of a target layout reached from steps of `now_s` by background sync, which lasts `ratio` times the stall
    that fetching its parameters would cause."""

    life_s: float
    now_s: float
    ratio: float

    def steps(self, step_s: float, stall_s: float) -> float:
        sync_s = min(stall_s * self.ratio, self.life_s)
        return sync_s / self.now_s + max(self.life_s - sync_s - PAUSE_S, 0.0) / step_s

    def longest_s(self, steps: float) -> float:
        return self.life_s / steps if steps else math.inf
