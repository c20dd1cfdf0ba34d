"""Transfers between the stages of a lane: every micro-batch's values forward, their gradients back.

In: a workload and a lane. Out: its hops, sorted, or those of one of its ranks. A value visits the stages of its users
in the order of units, each time from the rank that has the micro-batch to the rank that has it in the next stage.

    lane_hops(ValueRoutes(workload), lane)  ->  Hop(value 0, source 0, source_micro_batch 1, target 2, …), …
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Rank


class Hop(NamedTuple):
    """A value of one micro-batch between neighbouring stages of its users; its gradient takes the way back.

    `value` is an index into the workload's values; each of the two ranks counts its own micro-batches; `samples` are
    those of the micro-batch, within the step. A value without a sample axis is sent whole.
    """

    value: int
    source: Rank
    source_micro_batch: int
    target: Rank
    target_micro_batch: int
    samples: Span


class Traffic(NamedTuple):
    """Bytes of all values from one stage to another, per micro-batch; `back`: of their gradients, None if there are
    none."""

    fixed: int
    per_sample: int
    back: Traffic | None = None

    def bytes(self, samples: int) -> int:
        """Bytes of a micro-batch of `samples` samples."""
        return self.fixed + self.per_sample * samples


Borders = tuple[int, ...]
"""Borders of the units of a lane's stages, one more than stages."""


class ValueRoutes:
    """The stages that values visit, cached for each cut of the units."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._stages: dict[Borders, list[tuple[int, ...]]] = {}
        self._ways: dict[Borders, list[list[tuple[int, int, int]]]] = {}
        self._traffic: dict[Borders, dict[tuple[int, int], Traffic]] = {}

    def stages(self, borders: Borders) -> list[tuple[int, ...]]:
        """Per value the stages of its users, ascending."""
        if borders not in self._stages:
            stage_of = [stage for stage, (lo, hi) in enumerate(itertools.pairwise(borders)) for _ in range(lo, hi)]
            self._stages[borders] = [
                tuple(dict.fromkeys([stage_of[value.producer], *(stage_of[unit] for unit in value.consumers)]))
                for value in self.workload.values
            ]
        return self._stages[borders]

    def ways(self, borders: Borders) -> list[list[tuple[int, int, int]]]:
        """(value, source stage, target stage) of every value that a stage sends or receives, by stage."""
        if borders not in self._ways:
            found: list[list[tuple[int, int, int]]] = [[] for _ in borders[1:]]
            for value, stages in enumerate(self.stages(borders)):
                for source, target in itertools.pairwise(stages):
                    found[source].append((value, source, target))
                    found[target].append((value, source, target))
            self._ways[borders] = found
        return self._ways[borders]

    def traffic(self, borders: Borders) -> dict[tuple[int, int], Traffic]:
        if borders not in self._traffic:
            self._traffic[borders] = self._find_traffic(borders)
        return self._traffic[borders]

    def _find_traffic(self, borders: Borders) -> dict[tuple[int, int], Traffic]:
        found: dict[tuple[int, int], Traffic] = {}
        for value, stages in zip(self.workload.values, self.stages(borders), strict=True):
            size = value.bytes_per_sample
            sent = Traffic(size, 0) if value.sample_axis is None else Traffic(0, size)
            for pair in itertools.pairwise(stages):
                before = found.get(pair, Traffic(0, 0))
                back = _plus(before.back or Traffic(0, 0), sent) if value.has_grad else before.back
                found[pair] = _plus(before, sent)._replace(back=back)
        return found


def _plus(a: Traffic, b: Traffic) -> Traffic:
    return Traffic(a.fixed + b.fixed, a.per_sample + b.per_sample)


def find_hops(routes: ValueRoutes, lanes: Iterable[Lane]) -> tuple[Hop, ...]:
    """The hops of all lanes, sorted."""
    return tuple(sorted(itertools.chain.from_iterable(lane_hops(routes, lane) for lane in lanes)))


def lane_hops(routes: ValueRoutes, lane: Lane) -> Iterator[Hop]:
    """The hops of a lane, by value, then by micro-batch."""
    holders = [_holders(stage.ranks, stage.deal) for stage in lane.stages]
    for index, stages in enumerate(routes.stages(lane.borders)):
        for number, samples in enumerate(lane.micro_batches):
            for source, target in itertools.pairwise(stages):
                (a, of_a), (b, of_b) = holders[source][number], holders[target][number]
                yield Hop(index, a, of_a, b, of_b, samples)


def rank_hops(routes: ValueRoutes, lane: Lane, rank: Rank) -> Iterator[Hop]:
    """The hops of a lane in which the rank takes part, by value, then by micro-batch."""
    own = next(number for number, stage in enumerate(lane.stages) if rank in stage.ranks)
    stage = lane.stages[own]
    at = stage.ranks.index(rank)
    first = sum(stage.deal[:at])
    numbers = range(first, first + stage.deal[at])
    here = [(rank, number - first) for number in numbers]
    holders = {own: here}
    for value, source, target in routes.ways(lane.borders)[own]:
        for other in (source, target):
            if other not in holders:
                holders[other] = _holders_of(lane.stages[other].ranks, lane.stages[other].deal, numbers)
        for number, (a, of_a), (b, of_b) in zip(numbers, holders[source], holders[target], strict=True):
            yield Hop(value, a, of_a, b, of_b, lane.micro_batches[number])


def _holders(ranks: Sequence[Rank], deal: Sequence[int]) -> list[tuple[Rank, int]]:
    """(rank, its own micro-batch number) of every micro-batch of the lane in this stage."""
    return [(rank, own) for rank, count in zip(ranks, deal, strict=True) for own in range(count)]


def _holders_of(ranks: Sequence[Rank], deal: Sequence[int], numbers: range) -> list[tuple[Rank, int]]:
    if len(ranks) == 1:
        return [(ranks[0], number) for number in numbers]
    firsts = list(itertools.accumulate(deal, initial=0))
    places = [bisect_right(firsts, number) - 1 for number in numbers]
    return [(ranks[place], number - firsts[place]) for place, number in zip(places, numbers, strict=True)]
