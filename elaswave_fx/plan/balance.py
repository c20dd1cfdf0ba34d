"""Lanes made better by their simulated runs, once cuts and shares have been reckoned.

Granules go from the lane that ends last to one of those that end first, as long as that makes the last one end earlier.
Where it does not, the lane that ends last hands units across its borders: the cut whose slowest stage is fastest is not
always the best where a lane has few micro-batches, for then the time to fill it counts as much as its pace. In: parts,
and what tells how long one takes and whether it fits. Out: parts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from elaswave_fx.plan.cost import ROUNDING
from elaswave_fx.plan.sketches import Part

MOVES = 32
"""Granules or units are handed on at most so often; mostly a few times do."""

RECEIVERS = 3
"""So many lanes that end first, each with a share of its own, are tried: the very first may be a slow one, which would
end last with a granule more."""


class Lanes(Protocol):
    """What is known of lanes to be."""

    def seconds(self, part: Part) -> float:
        """Of a step of a lane of the part."""
        ...

    def least_s(self, part: Part) -> float:
        """No more than that, and known without a run."""
        ...

    def may_be_cut_better(self, part: Part, seconds: float) -> bool:
        """Whether other cuts of a lane that takes so long are to be tried."""
        ...

    def may_become(self, part: Part, other: Part) -> bool:
        """Whether the part may have the cut of another, which is shorter."""
        ...


class _Timed(NamedTuple):
    part: Part
    seconds: float


_Changes = dict[int, _Timed]
"""By place: what becomes of as many of its lanes."""


def balanced(parts: Sequence[Part], amounts: Sequence[int], lanes: Lanes) -> list[Part]:
    """Parts of the same ranks and granules whose last lane ends no later. `amounts` of granules are handed on at once,
    the first one that helps."""
    timed = [_Timed(part, lanes.seconds(part)) for part in parts]
    for _ in range(MOVES):
        last = max(range(len(timed)), key=lambda place: timed[place].seconds)
        changes = _hand_on(timed, last, amounts, lanes) or _cut_better(timed[last], last, lanes)
        if not changes:
            break
        for place, changed in sorted(changes.items(), reverse=True):
            part, seconds = timed[place]
            rest = part._replace(count=part.count - changed.part.count)
            timed[place : place + 1] = [changed, _Timed(rest, seconds)] if rest.count else [changed]
    return [part for part, _ in timed]


def _hand_on(timed: Sequence[_Timed], last: int, amounts: Sequence[int], lanes: Lanes) -> _Changes:
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
        less_s, more_s = lanes.seconds(less), lanes.seconds(more)
        if max(less_s, more_s) < latest_s:
            return {last: _Timed(less, less_s), place: _Timed(more, more_s)}
    return {}


def _cut_better(late: _Timed, last: int, lanes: Lanes) -> _Changes:
    """The first cut near the one that all lanes of the part have that is better."""
    part, seconds = late
    if not lanes.may_be_cut_better(part, seconds):
        return {}
    enough_s = seconds * (1 - ROUNDING)
    for borders in near_cuts(part.borders):
        other = part._replace(borders=borders)
        if lanes.least_s(other) < enough_s and lanes.may_become(part, other):
            other_s = lanes.seconds(other)
            if other_s < enough_s:
                return {last: _Timed(other, other_s)}
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
