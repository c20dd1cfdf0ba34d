"""Lanes made better by their simulated runs, once cuts and shares have been reckoned.

Granules go from the lane that ends last to one of those that end first, as long as that makes the last one end earlier.
Where it does not, the lane that ends last hands units across its borders: the cut whose slowest stage is fastest is not
always the best where a lane has few micro-batches, for then the time to fill it counts as much as its pace. In: parts,
and what tells how long one takes and whether it fits. Out: parts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from elaswave_fx.plan.lanes.sketches import Part
from elaswave_fx.plan.work.cost import ROUNDING

MOVES = 32
"""Granules or units are handed on at most so often; mostly a few times do."""

RECEIVERS = 3
"""So many lanes that end first, each with a share of its own, are tried: the very first may be a slow one, which would
end last with a granule more."""


FEW_LANES = 16
"""Of so many lanes, or fewer, all shares are looked at in the end, where all cuts are."""


class Timed(NamedTuple):
    """Lanes, and how long one of them takes; infinite if its ranks have no room for it."""

    part: Part
    seconds: float


class Lanes(Protocol):
    """What is known of lanes to be. `tries_all`: whether all of their cuts are tried."""

    @property
    def tries_all(self) -> bool: ...

    def timed(self, part: Part) -> Timed:
        """A step of a lane of the part, cut as it is; or as is best, where all cuts are tried."""
        ...

    def least_s(self, part: Part) -> float:
        """No more than that, and known without a run."""
        ...

    def most_granules(self, part: Part, limit_s: float, most: int) -> int:
        """At least as many, of `most`, as a lane of the part can take and end by then."""
        ...

    def may_be_cut_better(self, part: Part, seconds: float) -> bool:
        """Whether other cuts of a lane that takes so long are to be tried."""
        ...

    def may_become(self, part: Part, other: Part) -> bool:
        """Whether the part may have the cut of another, which is shorter."""
        ...


_Changes = dict[int, Timed]
"""By place: what becomes of as many of its lanes."""


def balanced(parts: Sequence[Part], amounts: Sequence[int], lanes: Lanes) -> list[Part] | None:
    """Parts of the same ranks and granules whose last lane ends no later. `amounts` of granules are handed on at once,
    the first one that helps. None if some lane does not fit."""
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
    """Other shares of few lanes as long as there are any with which the last one ends earlier; lanes that are all alike
    keep equal ones."""
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
    """Lanes with other shares that all end before then; None if there are none. What the lanes could take at most is
    more than there is by `spare`, so that none has less than its most by more."""
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
        while granules >= part.run.sketch.width and with_share(part, granules).seconds >= limit_s:
            granules -= 1
        if granules < part.run.sketch.width:
            return None
        most.append(granules)
    spare = sum(most) - total
    if spare < 0:
        return None
    # By what has been spared so far: the shares of the lanes that come first.
    found: dict[int, list[Timed]] = {0: []}
    for (part, _), granules in zip(timed, most, strict=True):
        longer: dict[int, list[Timed]] = {}
        for (spared, before), less in itertools.product(found.items(), range(spare + 1)):
            if spared + less > spare or granules - less < part.run.sketch.width or spared + less in longer:
                continue
            one = with_share(part, granules - less)
            if one.seconds < limit_s:
                longer[spared + less] = [*before, one]
        found = longer
    return found.get(spare)


def _hand_on(timed: Sequence[Timed], last: int, amounts: Sequence[int], lanes: Lanes) -> _Changes:
    """One lane gives granules to another, if both end earlier than it does now."""
    giver, latest_s = timed[last]
    by_end = {(each.seconds, each.part.granules): place for place, each in reversed(list(enumerate(timed)))}
    for amount, end in itertools.product(amounts, heapq.nsmallest(RECEIVERS, by_end)):
        place = by_end[end]
        taker, taker_s = timed[place]
        if giver.granules - amount < giver.run.sketch.width or taker_s == latest_s:
            continue
        less = giver._replace(granules=giver.granules - amount, count=1)
        more = taker._replace(granules=taker.granules + amount, count=1)
        shorter, longer = lanes.timed(less), lanes.timed(more)
        if max(shorter.seconds, longer.seconds) < latest_s:
            return {last: shorter, place: longer}
    return {}


def _cut_better(late: Timed, last: int, lanes: Lanes) -> _Changes:
    """The first cut near the one that all lanes of the part have that is better."""
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
    """Cuts in which a border, or several neighbouring ones, are a unit earlier or later; no stage is empty."""
    inner = len(borders) - 2
    for number in range(1, inner + 1):
        for lo, way in itertools.product(range(1, inner - number + 2), (-1, 1)):
            hi = lo + number
            moved = (*borders[:lo], *(border + way for border in borders[lo:hi]), *borders[hi:])
            if moved[lo - 1] < moved[lo] and moved[hi - 1] < moved[hi]:
                yield moved
