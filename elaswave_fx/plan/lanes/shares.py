"""Shares of granules, and their micro-batches.

share_granules(9, [1.0, 2.0])  ->  (6, 3): the second worker takes twice as long for each
piece_sizes(5, most=4, granule=2, least=1)  ->  (4, 4, 2), of samples
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from elaswave_fx.plan.work.spans import even_split
from elaswave_fx.plan.work.topology import Member


def piece_sizes(granules: int, most: int, granule: int, least: int) -> tuple[int, ...]:
    """Samples of the micro-batches that `split_micro_batches` makes of so many granules."""
    count = max(least, -(-granules // max(1, most // granule)))
    return tuple(size * granule for size in even_split(granules, count))


def deal(count: int, members: Sequence[Member]) -> tuple[int, ...]:
    """Micro-batches of each rank of a stage, by speed."""
    return (count,) if len(members) == 1 else share_granules(count, [1 / member.speed for member in members])


class ShareKind(NamedTuple):
    """`count` consecutive workers that are alike: time per granule in any unit, fixed time, and least number of
    granules."""

    pace: float
    fill: float = 0.0
    least: int = 1
    count: int = 1


def share_by_kind(granules: int, kinds: Sequence[ShareKind]) -> list[tuple[int, int]]:
    """Granules of each worker, and how many of the first workers have one more, by kind, so that the last worker
    finishes as early as possible. Ties go to the first worker."""
    shares, more = [kind.least for kind in kinds], [0] * len(kinds)
    left = granules - sum(kind.least * kind.count for kind in kinds)
    finish = [(kind.fill + (kind.least + 1) * kind.pace, number) for number, kind in enumerate(kinds)]
    heapq.heapify(finish)
    while left > 0:
        number = finish[0][1]
        kind = kinds[number]
        if kind.count > left:
            more[number] = left
            break
        left -= kind.count
        shares[number] += 1
        heapq.heapreplace(finish, (kind.fill + (shares[number] + 1) * kind.pace, number))
    return list(zip(shares, more, strict=True))


def share_granules(granules: int, paces: Sequence[float]) -> tuple[int, ...]:
    """Granules per worker, at least one each, so that the last worker finishes as early as possible.

    `paces`: time per granule, in any unit. Equal paces give an even split; the first workers get the remainder.
    """
    return tuple(share for share, _ in share_by_kind(granules, [ShareKind(pace) for pace in paces]))
