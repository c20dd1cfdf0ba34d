"""Bytes that a tile needs on its rank, exactly for one tile and quickly for every run of units.

tile_memory(workload, units, micro_batch=4, in_flight=2, kept=2000).total
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from elaswave_fx.plan.box import Span
from elaswave_fx.plan.cost import GRADIENT_BYTES, Workload, value_samples
from elaswave_fx.plan.plan import Plan


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose: working copies, gradient sums, kept boxes, saved activations, receive buffers."""

    params: int
    grads: int
    state: int
    saved: int
    received: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.params + self.grads + self.state + self.saved + self.received


def tile_memory(
    workload: Workload, units: Span, micro_batch: int, in_flight: int, kept: int, waiting: int = 0
) -> Memory:
    """Bytes of a tile of `units` with micro-batches of at most `micro_batch` samples and `kept` bucket elements.

    Kept are owned and held elements alike: a holder has the owner's master copy, optimizer state and record.
    `in_flight` micro-batches keep their saved activations at once, `waiting` ones besides what their weight halves
    need; one more may be arriving.
    """
    touched = sum(b.numel for b in workload.buckets if any(u in units for u in b.users))
    arriving = sum(
        v.bytes_per_sample * value_samples(v, micro_batch)
        for v in workload.values
        if v.producer < units.lo and any(u in units for u in v.consumers)
    )
    return Memory(
        params=sum(u.param_bytes for u in workload.units[units.lo : units.hi]),
        grads=workload.sum_bytes * touched,
        state=workload.state_bytes_per_element * kept,
        saved=micro_batch
        * sum(in_flight * u.saved_bytes + waiting * u.held_bytes for u in workload.units[units.lo : units.hi]),
        received=arriving,
    )


def per_parameter(plan: Plan, mode: str = "log") -> dict[str, float]:
    """Bytes per trained parameter over all ranks together, by purpose, with every box in full at all its replica ranks.

    `records`: what owner and holders keep of a step; `parameters`, `gradients`: of every rank that computes with them.
    `mode`: of copies; holders keep no records where the whole state is sent to them.
    """
    workload = plan.workload
    total = sum(bucket.numel for bucket in workload.buckets)
    base = workload.state_bytes_per_element - GRADIENT_BYTES  # the rest of it is the reduced gradient
    held = sum(len(box.span) * len(box.holders) for box in plan.boxes)
    computed = sum(len(box.span) * len(box.readers) for box in plan.boxes)
    parts = {
        "state": base * total,
        "copies": base * held,
        "records": GRADIENT_BYTES * (total + (held if mode == "log" else 0)),
        "parameters": workload.work_bytes_per_element * computed,
        "gradients": workload.sum_bytes * computed,
    }
    return {name: round(size / max(1, total), 3) for name, size in parts.items()}


class UnitSums:
    """Sums over any run of units of a workload in nearly constant time; made once for all lanes that are tried."""

    def __init__(self, workload: Workload) -> None:
        count = len(workload.units)
        first, every = [0] * count, [0] * count
        self.workload = workload
        self.numel = sum(b.numel for b in workload.buckets)
        self._tied = [b for b in workload.buckets if len(b.users) > 1]
        for bucket in workload.buckets:
            first[bucket.users[0]] += bucket.numel
            for user in bucket.users:
                every[user] += bucket.numel
        self._params = _prefix([u.param_bytes for u in workload.units])
        self._saved = _prefix([u.saved_bytes for u in workload.units])
        self._held = _prefix([u.held_bytes for u in workload.units])
        self._first = _prefix(first)
        self._touched = _prefix(every)
        self._arriving: dict[int, list[tuple[int, int]]] = {}

    def params(self, units: Span) -> int:
        """Bytes of working copies."""
        return _between(self._params, units)

    def saved(self, units: Span) -> int:
        """Bytes kept per sample from forward to backward."""
        return _between(self._saved, units)

    def held(self, units: Span) -> int:
        """Bytes kept per sample between the halves of backward."""
        return _between(self._held, units)

    def first_used(self, units: Span) -> int:
        """Elements of buckets whose first user is among the units."""
        return _between(self._first, units)

    def touched(self, units: Span) -> int:
        """Elements of buckets that any of the units reads."""
        twice = sum(b.numel * max(0, sum(u in units for u in b.users) - 1) for b in self._tied)
        return _between(self._touched, units) - twice

    def arriving(self, units: Span) -> tuple[int, int]:
        """Bytes of values from earlier units that any of these reads: without a sample axis, and per sample."""
        if units.lo not in self._arriving:
            self._arriving[units.lo] = self._arriving_at(units.lo)
        return self._arriving[units.lo][units.hi - units.lo]

    def _arriving_at(self, lo: int) -> list[tuple[int, int]]:
        """For runs of 0, 1, 2, … units from `lo` on."""
        count = len(self.workload.units) - lo
        fixed, per_sample = [0] * count, [0] * count
        for value in self.workload.values:
            reader = next((u for u in value.consumers if u >= lo), None)
            if value.producer < lo and reader is not None:
                (fixed if value.sample_axis is None else per_sample)[reader - lo] += value.bytes_per_sample
        return list(zip(_prefix(fixed), _prefix(per_sample), strict=True))


class MemoryTable:
    """What tiles of some lanes need, with buckets split evenly over `owners`.

    Held elements are an estimate: as many copies as can be lie with the other owners of the same buckets, the rest
    evenly with ranks of other units.
    """

    def __init__(self, sums: UnitSums, owners: int, copies: int = 0, ranks: int = 1) -> None:
        """`owners`: ranks that share the buckets of a unit; `copies`: of each box; `ranks`: all there are."""
        self._sums, self._workload = sums, sums.workload
        self._owners, self._others = owners, max(1, ranks - owners)
        self._held_inside = min(copies, owners - 1)
        self._held_outside = min(copies, ranks - 1) - self._held_inside

    def total(self, units: Span, micro_batch: int, in_flight: int) -> int:
        """Bytes of a tile, as `tile_memory` counts them; shards rounded up."""
        sums = self._sums
        fixed, per_sample = sums.arriving(units)
        return (
            sums.params(units)
            + self._workload.sum_bytes * sums.touched(units)
            + self._workload.state_bytes_per_element * self._kept(-(-sums.first_used(units) // self._owners))
            + in_flight * micro_batch * sums.saved(units)
            + fixed
            + per_sample * micro_batch
        )

    def _kept(self, owned: int) -> int:
        """Elements owned and held by a rank that owns `owned`."""
        foreign = max(0, self._sums.numel - self._owners * owned)
        return owned * (1 + self._held_inside) + -(-foreign * self._held_outside // self._others)


def _prefix(values: list[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _between(prefix: list[int], units: Span) -> int:
    return prefix[units.hi] - prefix[units.lo]
