"""How fast ranks are beside what their plan takes them for, from what they say of the steps that they have committed.

In: for each committed step, the seconds in which each rank's units computed. Out: the speeds that the planner should
reckon with from now on, or None while they are about those that it knows. Pure.

    meter = SpeedMeter.of(expected={0: Expected(1.0, 0.8, kind), ...})      what the plan of the epoch says
    meter = meter.heard({0: 0.81, 1: 1.62, ...})                            after each step
    meter.speeds()  ->  None, ..., {0: 1.0, 1: 0.5, ...}

A rank's pace in a step is its expected seconds over the measured ones, beside the paces of all ranks in that step: what
they have in common (a machine that is shared, costs that were measured in another hour) says nothing. It is held
against the paces of ranks that run the same units, or, where no other does, against its own in the first steps of the
epoch: so costs that are wrong for some units say nothing either. The speed of a rank on trial is assumed: no other is
held against it, nor it against its own first steps, but against ranks whose speeds are known. Nor do a few slow steps
count, or some that are over before a busy machine has given every process its turn: steps count in samples of a quarter
of a second, and a rank as slower, or as faster, when nearly all of the last samples say so.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from elaswave_fx.plan.work.topology import Rank

WINDOW = 15
"""Samples that are looked at; a change is known after as many at the latest."""

SAMPLE_S = 0.25
"""Short steps make one sample together, in which the slowest rank is busy for so long. Processes that share a processor
take turns much more often."""

AGREEING = 14
"""So many of them must say that a rank is slower, or faster."""

CHANGED = 1.25
"""By so much, at least. Below that a new plan rarely shortens a step by the hundredths that moving samples is worth."""

STEADY = 0.1
"""Speeds that differ by less from what was found before are the same."""

DIGITS = 2
"""Of a speed; more of them are noise."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a plan takes a rank for: its speed, and the seconds of its units in a step at that speed. Ranks that run the
    same units are of one `kind`. `on_trial`: the speed is assumed."""

    speed: float
    busy_s: float
    kind: Hashable
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class SpeedMeter:
    """Of one epoch. `paces`: of each rank in the last samples; `began`: in the first ones. `open`: what makes the next
    sample so far, busy seconds of each rank and how many steps."""

    expected: Mapping[Rank, Expected]
    paces: Mapping[Rank, tuple[float, ...]]
    began: Mapping[Rank, tuple[float, ...]]
    open: tuple[Mapping[Rank, float], int]

    @staticmethod
    def of(expected: Mapping[Rank, Expected]) -> SpeedMeter:
        """Nothing is heard yet. Ranks without units have no pace."""
        known = {rank: each for rank, each in expected.items() if each.busy_s > 0}
        return SpeedMeter(known, dict.fromkeys(known, ()), dict.fromkeys(known, ()), (dict.fromkeys(known, 0.0), 0))

    def heard(self, busy_s: Mapping[Rank, float]) -> SpeedMeter:
        """After a committed step. One of which some rank does not know how long it took is left out: where durations
        are not known, speeds are not."""
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
        """Of all ranks with units, if those of some have changed; None if not, or while too few steps are known."""
        if not self.expected or len(next(iter(self.paces.values()))) < WINDOW:
            return None
        ratios = self._ratios()
        found = {
            rank: _rounded(each.speed * statistics.median(ratios[rank])) if _has_changed(ratios[rank]) else each.speed
            for rank, each in self.expected.items()
        }
        return None if all(found[rank] == each.speed for rank, each in self.expected.items()) else found

    def _ratios(self) -> Mapping[Rank, tuple[float, ...]]:
        """Of each rank in each step: its pace over what it is held against."""
        usual = self._usual()
        return {rank: tuple(pace / usual[rank] for pace in paces) for rank, paces in self.paces.items()}

    def _usual(self) -> Mapping[Rank, float]:
        """What the pace of each rank is held against."""
        kinds: defaultdict[Hashable, list[Rank]] = defaultdict(list)
        for rank in self._known:
            kinds[self.expected[rank].kind].append(rank)
        of_kind = {
            kind: statistics.median_high(statistics.median(self.paces[rank]) for rank in ranks)
            for kind, ranks in kinds.items()
        }
        # What ranks of known speeds have in common is a pace of 1.
        found = {rank: of_kind.get(each.kind, 1.0) for rank, each in self.expected.items()}
        alone = (ranks[0] for ranks in kinds.values() if len(ranks) == 1)
        return found | {rank: statistics.median(self.began[rank]) for rank in alone}

    @property
    def _known(self) -> tuple[Rank, ...]:
        """Ranks whose speed is not assumed."""
        return tuple(rank for rank, each in self.expected.items() if not each.on_trial)


def steadied(before: Mapping[Rank, float], found: Mapping[Rank, float]) -> Mapping[Rank, float]:
    """What was known before, unless what was found now is another thing: plans are made for each."""
    if before.keys() == found.keys() and all(abs(found[rank] / speed - 1) < STEADY for rank, speed in before.items()):
        return before
    return found


def _has_changed(ratios: tuple[float, ...]) -> bool:
    slower = sum(ratio * CHANGED <= 1 for ratio in ratios)
    faster = sum(ratio >= CHANGED for ratio in ratios)
    return max(slower, faster) >= AGREEING


def _rounded(speed: float) -> float:
    return round(speed, DIGITS - 1 - math.floor(math.log10(speed)))
