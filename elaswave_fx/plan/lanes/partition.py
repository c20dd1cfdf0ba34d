"""The contiguous partition of units that minimizes the slowest stage.

minimax([1, 1, 1, 3], speeds=[1.0, 1.0])  ->  (0, 3, 4)
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from elaswave_fx.plan.work.cost import ROUNDING, Workload, value_samples

_Choice = tuple[float, float, tuple[int, ...]]
"""(bytes across borders, sum of squares of stage times, borders) of a partition of the first units."""

Reach = Sequence[Sequence[int] | None]
"""[stage][first unit] = end of the longest run of units that fits the stage's rank, as all shorter runs then do; None:
everything fits."""


def minimax(
    costs: Sequence[float],
    speeds: Sequence[float],
    reach: Reach | None = None,
    crossing: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """Borders (one more than stages) of the best contiguous partition into `len(speeds)` non-empty stages, or None if
    none fits.

    `costs`: seconds per unit at speed 1; stage s takes the sum of its units over `speeds[s]`. Ties between equally fast
    slowest stages go to the fewest bytes across borders (`crossing[i]` before unit i), then the most even partition,
    then the earliest borders.

    Dynamic programming over (stages, units): the chains-on-chains problem (Pinar and Aykanat, "Fast optimal load
    balancing algorithms for 1D partitioning", JPDC 64, 2004, section 3), which ElasWave (arXiv 2510.00606) names
    minimax layer partition.
    """
    prefix = list(accumulate(costs, initial=0.0))
    reach = reach or [None] * len(speeds)
    known: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # of lists that stages share
    for ends in reach:
        known.setdefault(id(ends), _runs(len(costs), ends))
    stages = [_Stage(speed, *known[id(ends)]) for speed, ends in zip(speeds, reach, strict=True)]
    # Without a bound on memory the slowest stage has about a unit more than its share, at most.
    limit_s = prefix[-1] / sum(speeds) + max(costs) / min(speeds)
    while (slowest := _slowest_stage(prefix, stages, limit_s)) > limit_s:
        limit_s = slowest
    if math.isinf(slowest):
        return None
    return _cheapest_borders(prefix, stages, crossing or [0] * (len(costs) + 1), slowest * (1 + ROUNDING))


def slowest_stage(costs: Sequence[float], speeds: Sequence[float], borders: Sequence[int]) -> float:
    return max(sum(costs[lo:hi]) / speed for lo, hi, speed in zip(borders, borders[1:], speeds, strict=False))


def crossing_bytes(workload: Workload) -> tuple[int, ...]:
    """Per border (before unit i, 0..units): bytes per sample of the values that must cross it, both ways."""
    totals = [0] * (len(workload.units) + 1)
    for value in workload.values:
        size = value.bytes_per_sample * value_samples(value, 1) * (2 if value.has_grad else 1)
        for border in range(value.producer + 1, value.consumers[-1] + 1):
            totals[border] += size
    return tuple(totals)


class _Stage(NamedTuple):
    """`ends`: by first unit, the end of the longest run that fits; `firsts`: by end, the first unit of the longest
    run."""

    speed: float
    ends: Sequence[int]
    firsts: Sequence[int]


def _runs(units: int, ends: Sequence[int] | None) -> tuple[Sequence[int], Sequence[int]]:
    if ends is None:
        return [units] * units, [0] * (units + 1)
    firsts = list(range(units + 1))
    for lo in reversed(range(units)):
        firsts[lo + 1 : ends[lo] + 1] = [lo] * (ends[lo] - lo)
    return ends, firsts


def _windows(prefix: Sequence[float], stages: Sequence[_Stage], limit_s: float) -> list[tuple[int, int]]:
    """Least and largest place of each border, from 0 to the last, in any partition whose stages all stay within
    `limit_s`. The windows are slightly wider, for rounding. A later first unit never makes a run end earlier."""
    units, count, slack = len(prefix) - 1, len(stages), ROUNDING * prefix[-1]
    most, least = [0], [units]
    for number, (speed, ends, _) in enumerate(stages):
        lo = most[-1]
        farthest = min(bisect.bisect_right(prefix, prefix[lo] + limit_s * speed + slack) - 1, ends[lo])
        most.append(min(farthest, units - (count - number - 1)))
    for number, (speed, _, firsts) in reversed(list(enumerate(stages))):
        hi = least[-1]
        nearest = max(bisect.bisect_left(prefix, prefix[hi] - limit_s * speed - slack), firsts[hi])
        least.append(max(nearest, number))
    return list(zip(reversed(least), most, strict=True))


def _slowest_stage(prefix: Sequence[float], stages: Sequence[_Stage], limit_s: float) -> float:
    """The least possible time of the slowest stage if that is within `limit_s`; else that of any partition found, or
    infinite."""
    units = len(prefix) - 1
    windows = _windows(prefix, stages, limit_s)
    best = [0.0] + [math.inf] * units
    for stage, (speed, ends, firsts) in enumerate(stages):
        extended = [math.inf] * (units + 1)
        (first, last), (least, most) = windows[stage], windows[stage + 1]
        for hi in range(max(least, stage + 1), most + 1):
            for lo in range(min(hi - 1, last), max(first, firsts[hi]) - 1, -1):
                seconds = (prefix[hi] - prefix[lo]) / speed
                if seconds >= extended[hi]:
                    break
                slowest = best[lo] if best[lo] > seconds else seconds
                if slowest < extended[hi] and hi <= ends[lo]:
                    extended[hi] = slowest
        best = extended
    return best[units]


def _cheapest_borders(
    prefix: Sequence[float], stages: Sequence[_Stage], crossing: Sequence[int], limit_s: float
) -> tuple[int, ...]:
    """Borders with the least (bytes, unevenness) among the partitions whose stages all stay within `limit_s`."""
    units = len(prefix) - 1
    windows = _windows(prefix, stages, limit_s)
    never: _Choice = (math.inf, math.inf, ())
    start: _Choice = (0.0, 0.0, (0,))
    best: list[_Choice] = [start, *([never] * units)]
    for stage, (speed, ends, firsts) in enumerate(stages):
        extended: list[_Choice] = [never] * (units + 1)
        (first, last), (least, most) = windows[stage], windows[stage + 1]
        for hi in range(max(least, stage + 1), most + 1):
            for lo in range(min(hi - 1, last), max(first, firsts[hi]) - 1, -1):
                seconds = (prefix[hi] - prefix[lo]) / speed
                if seconds > limit_s:
                    break
                sent, uneven, borders = best[lo]
                if not borders or hi > ends[lo] or sent + crossing[lo] > extended[hi][0]:
                    continue
                candidate: _Choice = (sent + crossing[lo], uneven + seconds * seconds, (*borders, hi))
                if candidate < extended[hi]:
                    extended[hi] = candidate
        best = extended
    return best[units][2]
