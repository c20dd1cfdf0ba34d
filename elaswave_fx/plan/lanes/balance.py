"""Lanes improved by simulated runs, once cuts and shares are estimated.

Granules move from the lane that ends last to a lane that ends first, as long as the last end becomes earlier. Where
that does not help, the last lane moves units across its borders: with few micro-batches the time to fill the lane
counts as much as its pace, so the cut with the fastest slowest stage is not always best. In: parts, and a `Lanes` that
predicts their time and memory fit. Out: parts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from elaswave_fx.plan.lanes.lane_shapes import Part
from elaswave_fx.plan.work.cost import ROUNDING

MOVES = 32
"""Upper bound of moves of granules or units; a few usually suffice."""

RECEIVERS = 3
"""Receivers tried among the lanes that end first, each with a different share: the very first may be slow, and end last
with one granule more."""


FEW_LANES = 16
"""Up to this many lanes, all shares are tried where all cuts are."""


class Timed(NamedTuple):
    """Lanes and the seconds of one of them; infinite if its ranks lack memory."""

    part: Part
    seconds: float


class Lanes(Protocol):
    """Predictions for candidate lanes. `tries_all`: whether all of their cuts are tried."""

    @property
    def tries_all(self) -> bool: ...

    def timed(self, part: Part) -> Timed:
        """The part with the seconds of a step, cut as given; with the best cut, where all cuts are tried."""
        ...

    def least_s(self, part: Part) -> float:
        """Lower bound of `timed`, computed without a run."""
        ...

    def most_granules(self, part: Part, limit_s: float, most: int) -> int:
        """Upper bound, at most `most`, of the granules that a lane of the part can finish within `limit_s`."""
        ...

    def may_be_cut_better(self, part: Part, seconds: float) -> bool:
        """Whether to try other cuts of a lane that takes `seconds`."""
        ...

    def may_become(self, part: Part, other: Part) -> bool:
        """Whether the part may take the cut of `other`, which is shorter."""
        ...


_Changes = dict[int, Timed]
"""Place -> its replacement, for the same number of lanes."""


def balanced(parts: Sequence[Part], amounts: Sequence[int], lanes: Lanes) -> list[Part] | None:
    """Parts of the same ranks and granules whose last lane ends no later; None if a lane does not fit.

    `amounts`: granules to move in one step; the first amount that helps is taken.
    """
    timed = [lanes.timed(part) for part in parts]
    for _ in range(MOVES):
        last = max(range(len(timed)), key=lambda place: timed[place].seconds)
        changes = _hand_on(timed, last, amounts, lanes) or _cut_better(timed[last], last, lanes)
        if not changes:
            break
        for place, changed in sorted(changes.items(), reverse=True):
            part, seconds = timed[place]
            rest = part._replace(count=part.count - changed.part.count)
            timed[place : place + 1] = [changed, Timed(rest, seconds)] if rest.count else [changed]
    if lanes.tries_all:
        timed = _best_of_all(timed, lanes)
    return None if math.isinf(max(each.seconds for each in timed)) else [part for part, _ in timed]


def _best_of_all(timed: list[Timed], lanes: Lanes) -> list[Timed]:
    """Shares of few lanes, changed while the last lane ends earlier; lanes that are all alike keep equal shares."""
    if len(timed) == 1 or sum(part.count for part, _ in timed) > FEW_LANES:
        return timed
    each = [Timed(part._replace(count=1), seconds) for part, seconds in timed for _ in range(part.count)]
    while (better := _ending_before(each, max(one.seconds for one in each) * (1 - ROUNDING), lanes)) is not None:
        each = better
    found: list[Timed] = []
    for one in each:
        if found and found[-1].part._replace(count=1) == one.part:
            found[-1] = Timed(one.part._replace(count=found[-1].part.count + 1), one.seconds)
        else:
            found.append(one)
    return found


def _ending_before(timed: Sequence[Timed], limit_s: float, lanes: Lanes) -> list[Timed] | None:
    """Lanes with shares that all end before `limit_s`, or None. `spare`: how much the sum of the upper bounds exceeds
    the granules; no lane is below its upper bound by more."""
    total = sum(part.granules for part, _ in timed)
    most: list[int] = []
    known: dict[tuple[Part, int], Timed] = {}

    def with_share(part: Part, granules: int) -> Timed:
        own = part._replace(granules=granules)
        if (own, granules) not in known:
            known[own, granules] = lanes.timed(own)
        return known[own, granules]

    for part, _ in timed:
        granules = lanes.most_granules(part, limit_s, total)
        while granules >= part.run.shape.width and with_share(part, granules).seconds >= limit_s:
            granules -= 1
        if granules < part.run.shape.width:
            return None
        most.append(granules)
    spare = sum(most) - total
    if spare < 0:
        return None
    # Keyed by the spare used so far: shares of the first lanes.
    found: dict[int, list[Timed]] = {0: []}
    for (part, _), granules in zip(timed, most, strict=True):
        longer: dict[int, list[Timed]] = {}
        for (spared, before), less in itertools.product(found.items(), range(spare + 1)):
            if spared + less > spare or granules - less < part.run.shape.width or spared + less in longer:
                continue
            one = with_share(part, granules - less)
            if one.seconds < limit_s:
                longer[spared + less] = [*before, one]
        found = longer
    return found.get(spare)


def _hand_on(timed: Sequence[Timed], last: int, amounts: Sequence[int], lanes: Lanes) -> _Changes:
    """A move of granules between two lanes after which both end earlier than the last lane does now."""
    giver, latest_s = timed[last]
    by_end = {(each.seconds, each.part.granules): place for place, each in reversed(list(enumerate(timed)))}
    for amount, end in itertools.product(amounts, heapq.nsmallest(RECEIVERS, by_end)):
        place = by_end[end]
        taker, taker_s = timed[place]
        if giver.granules - amount < giver.run.shape.width or taker_s == latest_s:
            continue
        less = giver._replace(granules=giver.granules - amount, count=1)
        more = taker._replace(granules=taker.granules + amount, count=1)
        shorter, longer = lanes.timed(less), lanes.timed(more)
        if max(shorter.seconds, longer.seconds) < latest_s:
            return {last: shorter, place: longer}
    return {}


def _cut_better(late: Timed, last: int, lanes: Lanes) -> _Changes:
    """The first better cut near the common cut of the part's lanes."""
    part, seconds = late
    if not lanes.may_be_cut_better(part, seconds):
        return {}
    enough_s = seconds * (1 - ROUNDING)
    for borders in near_cuts(part.borders):
        other = part._replace(borders=borders)
        if lanes.least_s(other) < enough_s and lanes.may_become(part, other):
            found = lanes.timed(other)
            if found.seconds < enough_s:
                return {last: found}
    return {}


def near_cuts(borders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Cuts that shift a border, or several neighbouring borders, by one unit; no stage becomes empty."""
    inner = len(borders) - 2
    for number in range(1, inner + 1):
        for lo, way in itertools.product(range(1, inner - number + 2), (-1, 1)):
            hi = lo + number
            moved = (*borders[:lo], *(border + way for border in borders[lo:hi]), *borders[hi:])
            if moved[lo - 1] < moved[lo] and moved[hi - 1] < moved[hi]:
                yield moved
