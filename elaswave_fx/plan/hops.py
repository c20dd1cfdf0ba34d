"""What travels between the stages of a lane: for every micro-batch, values forward and their gradients back.

In: a workload and a lane. Out: its hops, sorted. A value goes along the stages of its users in the order of units, from
the rank that has the micro-batch in one stage to the rank that has it in the next.

    lane_hops(workload, lane)  ->  Hop(value 0, source 0, source_micro_batch 1, target 2, …), …
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import Workload
from elaswave_fx.plan.tiling import Lane
from elaswave_fx.plan.topology import Rank


@dataclass(frozen=True, order=True)
class Hop:
    """A value of one micro-batch on its way between neighbouring stages of its users; its gradient takes it back.

    `value` is an index into the workload's values; each of the two ranks counts its own micro-batches; `samples` are
    those of the micro-batch, within the step. A value without a sample axis takes the same way, whole.
    """

    value: int
    source: Rank
    source_micro_batch: int
    target: Rank
    target_micro_batch: int
    samples: Span


def find_hops(workload: Workload, lanes: Iterable[Lane]) -> tuple[Hop, ...]:
    """The hops of all lanes, sorted."""
    return tuple(sorted(itertools.chain.from_iterable(lane_hops(workload, lane) for lane in lanes), key=_place))


def lane_hops(workload: Workload, lane: Lane) -> Iterator[Hop]:
    """The hops of a lane, by value, then by micro-batch."""
    holders = [_holders(stage.ranks, stage.deal) for stage in lane.stages]
    for index, stages in enumerate(value_stages(workload, lane.borders)):
        for number, samples in enumerate(lane.micro_batches):
            for source, target in itertools.pairwise(stages):
                (a, of_a), (b, of_b) = holders[source][number], holders[target][number]
                yield Hop(index, a, of_a, b, of_b, samples)


def value_stages(workload: Workload, borders: Sequence[int]) -> list[tuple[int, ...]]:
    """Per value the stages of its users, ascending, for units that are cut at `borders`."""
    stage_of = [stage for stage, (lo, hi) in enumerate(itertools.pairwise(borders)) for _ in range(lo, hi)]
    return [
        tuple(stage for stage, _ in itertools.groupby(stage_of[u] for u in (value.producer, *value.consumers)))
        for value in workload.values
    ]


def _holders(ranks: Sequence[Rank], deal: Sequence[int]) -> list[tuple[Rank, int]]:
    """Of every micro-batch of the lane: who has it in this stage, and as which of its own."""
    return [(rank, own) for rank, count in zip(ranks, deal, strict=True) for own in range(count)]


def _place(hop: Hop) -> tuple[int, ...]:
    """The order of fields, compared without building a tuple for each comparison."""
    samples = hop.samples
    return hop.value, hop.source, hop.source_micro_batch, hop.target, hop.target_micro_batch, samples.lo, samples.hi
