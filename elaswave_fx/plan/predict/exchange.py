"""Estimated exchange between ranks beside the pipeline's values, before the owners of boxes are known.

In: stages. Out: seconds of reduce, copy and gather, with every bucket owned evenly by the ranks that read it; and the
bytes of parameters that are new to ranks.

    ExchangeEstimate(workload, topology).seconds([(Span(0, 2), 3), (Span(2, 4), 3)], replicas=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from elaswave_fx.plan.work.cost import GRADIENT_BYTES, Workload
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank, Topology

Stages = tuple[Span, int]
"""(units, number of ranks that run them)."""

PHASES = 3
"""Reduce, copy and gather: each waits for its last message."""


class ExchangeEstimate:
    """Estimates for one workload and topology. A tied bucket counts once for each of its users."""

    def __init__(self, workload: Workload, topology: Topology) -> None:
        self._workload, self._topology, self._link = workload, topology, topology.between_hosts
        elements, parameters = [0] * len(workload.units), [0] * len(workload.units)
        for bucket in workload.buckets:
            for user in bucket.users:
                elements[user] += bucket.numel
                parameters[user] += bucket.work_bytes
        self._elements, self._parameters = elements, parameters  # by unit; the latter in bytes
        self._until = list(accumulate(parameters, initial=0))

    def seconds(self, stages: Iterable[Stages], replicas: int) -> float:
        """Seconds of the rank that sends most, over the default links between hosts."""
        work, stages = self._workload, list(stages)
        readers = [0] * len(work.units)
        for units, ranks in stages:
            for unit in range(units.lo, units.hi):
                readers[unit] += ranks
        ranks = sum(ranks for _, ranks in stages)
        per_unit = [
            count * (work.sum_bytes * (1 - 1 / n) + GRADIENT_BYTES * min(replicas, ranks - 1) / n) + size * (n - 1) / n
            for count, size, n in zip(self._elements, self._parameters, readers, strict=True)
        ]  # fmt: skip
        until = list(accumulate(per_unit, initial=0.0))
        most = max(until[units.hi] - until[units.lo] for units, _ in stages)
        return most / self._link.bytes_per_s + (PHASES * self._link.latency_s if ranks > 1 else 0.0)

    def moved(self, before: Mapping[Rank, Span], after: Iterable[tuple[Rank, Span]]) -> dict[Rank, int]:
        """Bytes by rank of the parameters of its new units."""
        moved: dict[Rank, int] = {}
        until, nothing = self._until, Span(0, 0)
        for rank, units in after:
            had = before.get(rank, nothing)
            lo, hi = max(units.lo, had.lo), min(units.hi, had.hi)
            common = until[hi] - until[lo] if lo < hi else 0
            moved[rank] = until[units.hi] - until[units.lo] - common
        return moved

    def stall_s(self, before: Mapping[Rank, Span], after: Iterable[tuple[Rank, Span]]) -> float:
        """Seconds until the last rank has the parameters of its new units. With measured links between hosts, each unit
        is fetched from its former rank with the fastest link."""
        if not self._topology.links:
            return max(self.moved(before, after).values(), default=0) / self._link.bytes_per_s
        alive = {rank: units for rank, units in before.items() if rank in self._topology.ranks}
        return max((self._fetch_s(alive, rank, units) for rank, units in after), default=0.0)

    def _fetch_s(self, before: Mapping[Rank, Span], rank: Rank, units: Span) -> float:
        had, took_s = before.get(rank, Span(0, 0)), 0.0
        for unit in range(units.lo, units.hi):
            if not had.lo <= unit < had.hi:
                rates = (
                    self._topology.link(rank, other).bytes_per_s
                    for other, has in before.items()
                    if has.lo <= unit < has.hi
                )
                fastest = max(rates, default=self._link.bytes_per_s)
                took_s += self._parameters[unit] / fastest
        return took_s
