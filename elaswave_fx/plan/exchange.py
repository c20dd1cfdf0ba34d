"""What ranks send each other besides values of the pipeline, before it is known who owns which box.

In: lanes. Out: seconds of reduce, copy and gather, with every bucket owned evenly by the ranks that read it; and the
bytes of parameters that ranks have to get which did not compute with them before.

    ExchangeEstimate(workload, topology).seconds(lanes, copies=1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import GRADIENT_BYTES, Workload
from elaswave_fx.plan.tiling import Lane
from elaswave_fx.plan.topology import Rank, Topology

PHASES = 3
"""Reduce, copy and gather: each waits for its last message."""


class ExchangeEstimate:
    """For one workload and topology. A tied bucket counts once for each of its users."""

    def __init__(self, workload: Workload, topology: Topology) -> None:
        self._workload, self._link = workload, topology.between_hosts
        elements = [0] * len(workload.units)
        for bucket in workload.buckets:
            for user in bucket.users:
                elements[user] += bucket.numel
        self._elements = elements
        self._until = list(accumulate(elements, initial=0))

    def seconds(self, lanes: Sequence[Lane], copies: int) -> float:
        """Of the rank that sends most, over the links that hosts have if nothing else is known of them."""
        work = self._workload
        readers = [0] * len(work.units)
        for lane in lanes:
            for stage in lane.stages:
                for unit in stage.units:
                    readers[unit] += len(stage.ranks)
        ranks = sum(len(lane.ranks) for lane in lanes)
        per_unit = [
            count * (work.sum_bytes * (1 - 1 / n) + work.work_bytes_per_element * (n - 1) / n
                     + GRADIENT_BYTES * min(copies, ranks - 1) / n)
            for count, n in zip(self._elements, readers, strict=True)
        ]  # fmt: skip
        until = list(accumulate(per_unit, initial=0.0))
        most = max(until[s.units.hi] - until[s.units.lo] for lane in lanes for s in lane.stages)
        return most / self._link.bytes_per_s + (PHASES * self._link.latency_s if ranks > 1 else 0.0)

    def moved(self, before: Sequence[Lane], after: Sequence[Lane]) -> dict[Rank, int]:
        """By rank: bytes of parameters of units that it runs now and did not run before."""
        had: dict[Rank, Span] = {rank: stage.units for lane in before for stage in lane.stages for rank in stage.ranks}
        moved: dict[Rank, int] = {}
        for lane in after:
            for stage in lane.stages:
                for rank in stage.ranks:
                    common = stage.units.intersect(had.get(rank, Span(0, 0)))
                    elements = self._between(stage.units) - (self._between(common) if common else 0)
                    moved[rank] = self._workload.work_bytes_per_element * elements
        return moved

    def seconds_of(self, moved: Mapping[Rank, int]) -> float:
        """Until the last rank has what it fetches, all at once."""
        return max(moved.values(), default=0) / self._link.bytes_per_s

    def _between(self, units: Span) -> int:
        return self._until[units.hi] - self._until[units.lo]
