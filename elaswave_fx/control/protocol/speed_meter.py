"""Speeds of ranks relative to their plan, from the times that they report for committed steps.

In: for each committed step, the busy seconds of each rank's units. Out: new speeds for the planner, or None while they
are about the known ones. Pure.

    meter = SpeedMeter.of(expected={0: Expected(1.0, 0.8, kind), ...})      from the plan of the epoch
    meter = meter.heard({0: 0.81, 1: 1.62, ...})                            after each step
    meter.speeds()  ->  None, ..., {0: 1.0, 1: 0.5, ...}

A rank's pace in a step is its expected over its measured seconds, relative to all ranks' paces in that step. So common
factors cancel, such as a shared machine or costs that were measured at another time. A pace is compared with those of
ranks that run the same units. Without such ranks it is compared with its own in the first steps of the epoch. So wrong
costs of some units cancel too. The speed of a rank on probation is only assumed: it is compared with ranks of known
speeds, and no rank with it. A few slow steps, or steps shorter than the turns of a busy machine's processes, must not
count. So steps are grouped into samples of 0.25 s, and a rank counts as slower or faster if nearly all of the last
samples agree.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from elaswave_fx.plan.work.topology import Rank

WINDOW = 15
"""Number of samples in a decision; a change is detected after as many at the latest."""

SAMPLE_S = 0.25
"""Busy seconds of a sample's slowest rank: many turns of processes that share a processor."""

AGREEING = 14
"""Number of samples that must agree."""

CHANGED = 1.25
"""Minimum change. Below it a new plan rarely shortens a step by the hundredths that moving samples is worth."""

STEADY = 0.1
"""Relative difference below which speeds count as equal to the ones found before."""

DIGITS = 2
"""Significant digits of a speed; more are noise."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The plan's speed of a rank, and the seconds of its units in a step at that speed. Ranks that run the same units
    are of one `kind`. `on_trial`: the speed is assumed (probation)."""

    speed: float
    busy_s: float
    kind: Hashable
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class SpeedMeter:
    """The measurements of one epoch. `paces`: each rank's in the last samples; `began`: in the first ones. `open`: the
    unfinished sample, as busy seconds of each rank and the number of steps."""

    expected: Mapping[Rank, Expected]
    paces: Mapping[Rank, tuple[float, ...]]
    began: Mapping[Rank, tuple[float, ...]]
    open: tuple[Mapping[Rank, float], int]

    @staticmethod
    def of(expected: Mapping[Rank, Expected]) -> SpeedMeter:
        """A meter without measurements. Ranks without units have no pace."""
        known = {rank: each for rank, each in expected.items() if each.busy_s > 0}
        return SpeedMeter(known, dict.fromkeys(known, ()), dict.fromkeys(known, ()), (dict.fromkeys(known, 0.0), 0))

    def heard(self, busy_s: Mapping[Rank, float]) -> SpeedMeter:
        """Add a committed step. It is ignored if a rank does not know its duration."""
        if any(not busy_s.get(rank, 0.0) > 0 for rank in self.expected):
            return self
        so_far, steps = self.open
        total_s, steps = {rank: seconds + busy_s[rank] for rank, seconds in so_far.items()}, steps + 1
        if not total_s or max(total_s.values()) < SAMPLE_S:
            return replace(self, open=(total_s, steps))
        now = {rank: steps * each.busy_s / total_s[rank] for rank, each in self.expected.items()}
        common = statistics.median_high(now[rank] for rank in self._known or now)
        paces = {rank: (*self.paces[rank], pace / common)[-WINDOW:] for rank, pace in now.items()}
        began = {rank: before if len(before) == WINDOW else paces[rank] for rank, before in self.began.items()}
        return replace(self, paces=paces, began=began, open=(dict.fromkeys(total_s, 0.0), 0))

    def speeds(self) -> Mapping[Rank, float] | None:
        """New speeds of all ranks with units, if some have changed; None if not, or with too few steps."""
        if not self.expected or len(next(iter(self.paces.values()))) < WINDOW:
            return None
        ratios = self._ratios()
        found = {
            rank: _rounded(each.speed * statistics.median(ratios[rank])) if _has_changed(ratios[rank]) else each.speed
            for rank, each in self.expected.items()
        }
        return None if all(found[rank] == each.speed for rank, each in self.expected.items()) else found

    def _ratios(self) -> Mapping[Rank, tuple[float, ...]]:
        """Each rank's paces over the pace that it is compared with."""
        usual = self._usual()
        return {rank: tuple(pace / usual[rank] for pace in paces) for rank, paces in self.paces.items()}

    def _usual(self) -> Mapping[Rank, float]:
        """The pace that each rank is compared with."""
        kinds: defaultdict[Hashable, list[Rank]] = defaultdict(list)
        for rank in self._known:
            kinds[self.expected[rank].kind].append(rank)
        of_kind = {
            kind: statistics.median_high(statistics.median(self.paces[rank]) for rank in ranks)
            for kind, ranks in kinds.items()
        }
        # The common pace of ranks of known speeds is 1.
        found = {rank: of_kind.get(each.kind, 1.0) for rank, each in self.expected.items()}
        alone = (ranks[0] for ranks in kinds.values() if len(ranks) == 1)
        return found | {rank: statistics.median(self.began[rank]) for rank in alone}

    @property
    def _known(self) -> tuple[Rank, ...]:
        """Ranks whose speed is not assumed."""
        return tuple(rank for rank, each in self.expected.items() if not each.on_trial)


def steadied(before: Mapping[Rank, float], found: Mapping[Rank, float]) -> Mapping[Rank, float]:
    """Return `before` unless `found` differs noticeably: each change makes new plans."""
    if before.keys() == found.keys() and all(abs(found[rank] / speed - 1) < STEADY for rank, speed in before.items()):
        return before
    return found


def _has_changed(ratios: tuple[float, ...]) -> bool:
    slower = sum(ratio * CHANGED <= 1 for ratio in ratios)
    faster = sum(ratio >= CHANGED for ratio in ratios)
    return max(slower, faster) >= AGREEING


def _rounded(speed: float) -> float:
    return round(speed, DIGITS - 1 - math.floor(math.log10(speed)))
