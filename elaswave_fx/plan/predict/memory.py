"""Bytes that a tile needs on its rank: exact for one tile, and fast bounds for every run of units.

tile_memory(workload, units, micro_batch=4, in_flight=2, kept=2000).total
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import GRADIENT_BYTES, Value, Workload, value_samples
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.topology import Rank


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
        return self.params + self.grads + self.state + self.saved + self.received


def tile_memory(
    workload: Workload, units: Runs, micro_batch: int, in_flight: int, kept: int, waiting: int = 0
) -> Memory:
    """Bytes of a tile of `units` with micro-batches of at most `micro_batch` samples and `kept` bucket elements.

    Owned and replicated elements cost the same: a replica holder has the owner's master copy, optimizer state and
    record. `in_flight` micro-batches keep their saved activations together; `waiting` ones keep the inputs of their
    weight halves besides; one more may be arriving.
    """
    touched = sum(b.numel for b in workload.buckets if any(u in units for u in b.users))
    arriving = sum(
        v.bytes_per_sample * value_samples(v, micro_batch)
        for v in workload.values
        if v.producer not in units and any(u in units for u in v.consumers)
    )
    costs = [workload.units[unit] for unit in units]
    return Memory(
        params=sum(cost.param_bytes for cost in costs),
        grads=workload.sum_bytes * touched,
        state=workload.state_bytes_per_element * kept,
        saved=micro_batch * sum(in_flight * cost.saved_bytes + waiting * cost.held_bytes for cost in costs),
        received=arriving,
    )


def memory_of(plan: Plan, rank: Rank) -> Memory:
    """Predicted memory of a rank."""
    kept = sum(len(box.span) for box in plan.boxes if rank in box.replica_ranks)
    tile = plan.tile(rank)
    if not tile.micro_batches:
        return tile_memory(plan.workload, Runs(), 0, 0, kept)
    in_flight = plan.predicted.ranks[rank].in_flight
    return tile_memory(plan.workload, tile.units, max(len(m) for m in tile.micro_batches), in_flight, kept)


def per_parameter(plan: Plan, mode: str = "log") -> dict[str, float]:
    """Bytes per trained parameter over all ranks together, by purpose, with every box complete at all its replica
    ranks.

    `records`: records of a step at owner and replica holders; `parameters`, `gradients`: at every reader. `mode`:
    lab.copy_mode; holders keep no records where they receive whole states.
    """
    workload = plan.workload
    total = sum(bucket.numel for bucket in workload.buckets)
    base = workload.state_bytes_per_element - GRADIENT_BYTES  # the reduced gradient is the rest
    held = sum(len(box.span) * len(box.holders) for box in plan.boxes)
    computed = sum(len(box.span) * len(box.readers) for box in plan.boxes)
    read = sum(workload.buckets[box.bucket].element_bytes * len(box.span) * len(box.readers) for box in plan.boxes)
    parts = {
        "state": base * total,
        "copies": base * held,
        "records": GRADIENT_BYTES * (total + (held if mode == "log" else 0)),
        "parameters": read,
        "gradients": workload.sum_bytes * computed,
    }
    return {name: round(size / max(1, total), 3) for name, size in parts.items()}


class UnitSums:
    """Sums over any run of units of a workload in nearly constant time; computed once for all candidate lanes."""

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
        self.saved_until = _prefix([u.saved_bytes for u in workload.units])
        self._held = _prefix([u.held_bytes for u in workload.units])
        self._first = _prefix(first)
        self._touched = _prefix(every)
        self._arriving: dict[int, list[tuple[int, int]]] = {}
        self._lean: dict[tuple[int, int, int], int] = {}

    def params(self, units: Span) -> int:
        """Bytes of working copies."""
        return _between(self._params, units)

    def saved(self, units: Span) -> int:
        """Bytes kept per sample from forward to backward."""
        return _between(self.saved_until, units)

    def held(self, units: Span) -> int:
        """Bytes kept per sample between the halves of backward."""
        return _between(self._held, units)

    def first_used(self, units: Span) -> int:
        """Elements of buckets whose first user is among the units."""
        return _between(self._first, units)

    def first_within(self, lo: int, hi: int) -> int:
        """`first_used` of units [lo, hi)."""
        return self._first[hi] - self._first[lo]

    def touched(self, units: Span) -> int:
        """Elements of buckets that any of the units reads."""
        return self._touched_by(units.lo, units.hi)

    def least_bytes(self, lo: int, hi: int, samples: int, ranks: int) -> int:
        """Lower bound of the bytes of a rank that runs these units with the activations of `samples`, however state is
        spread over `ranks` ranks."""
        work, first = self.workload, self._first[hi] - self._first[lo]
        return (
            self._params[hi] - self._params[lo]
            + work.sum_bytes * first
            + work.state_bytes_per_element * -(-first // ranks)
            + samples * (self.saved_until[hi] - self.saved_until[lo])
        )  # fmt: skip

    def without_state(self, lo: int, hi: int, micro_batch: int, in_flight: int) -> int:
        """Bytes of a tile of units [lo, hi) on a rank that keeps no boxes."""
        fixed, per_sample = self._arrivals(lo)[hi - lo]
        return (
            self._params[hi] - self._params[lo]
            + self.workload.sum_bytes * self._touched_by(lo, hi)
            + micro_batch * (in_flight * (self.saved_until[hi] - self.saved_until[lo]) + per_sample)
            + fixed
        )  # fmt: skip

    def lean(self, lo: int, hi: int, micro_batch: int) -> int:
        """`without_state` with nothing kept for backward."""
        key = lo, hi, micro_batch
        found = self._lean.get(key)
        if found is None:
            found = self._lean[key] = self.without_state(lo, hi, micro_batch, 0)
        return found

    def _touched_by(self, lo: int, hi: int) -> int:
        if not self._tied:
            return self._touched[hi] - self._touched[lo]
        twice = sum(b.numel * max(0, sum(lo <= u < hi for u in b.users) - 1) for b in self._tied)
        return self._touched[hi] - self._touched[lo] - twice

    def arriving(self, units: Span) -> tuple[int, int]:
        """Bytes of values from earlier units that any of these reads: without a sample axis, and per sample."""
        return self._arrivals(units.lo)[len(units)]

    def _arrivals(self, lo: int) -> list[tuple[int, int]]:
        found = self._arriving.get(lo)
        if found is None:
            found = self._arriving[lo] = self._arriving_at(lo)
        return found

    def _arriving_at(self, lo: int) -> list[tuple[int, int]]:
        """Totals for runs of 0, 1, 2, … units from `lo`."""
        count = len(self.workload.units) - lo
        fixed, per_sample = [0] * count, [0] * count
        for value in self._crossing[lo]:
            reader = next(u for u in value.consumers if u >= lo)
            (fixed if value.sample_axis is None else per_sample)[reader - lo] += value.bytes_per_sample
        return list(zip(_prefix(fixed), _prefix(per_sample), strict=True))

    @cached_property
    def _crossing(self) -> list[list[Value]]:
        """Values from before each unit that the unit or a later one reads."""
        found: list[list[Value]] = [[] for _ in range(len(self.workload.units) + 1)]
        for value in self.workload.values:
            for unit in range(value.producer + 1, value.consumers[-1] + 1):
                found[unit].append(value)
        return found


class MemoryTable:
    """Memory of tiles of some lanes, with buckets split evenly over `owners`.

    Replicas are an estimate: as many as possible lie with the other owners of the same buckets, the rest evenly with
    ranks of other units.
    """

    def __init__(self, sums: UnitSums, owners: int, replicas: int = 0, ranks: int = 1) -> None:
        """`owners`: ranks that share the buckets of a unit; `replicas`: of each box; `ranks`: all alive ones."""
        self._sums, self._workload = sums, sums.workload
        self._owners, self._others = owners, max(1, ranks - owners)
        self._replicas, self._ranks = replicas, ranks
        self._held_inside = min(replicas, owners - 1)
        self._held_outside = min(replicas, ranks - 1) - self._held_inside
        self._reach: dict[tuple[int, int, int], list[int]] = {}
        # By micro-batch, first unit and end: bytes without saved activations.
        self._known: dict[int, list[dict[int, int]]] = {}

    @property
    def kept_evenly(self) -> int:
        """Elements of boxes per rank, if all ranks kept equal shares."""
        return self._sums.numel * (1 + self._replicas) // self._ranks

    def total(self, units: Span, micro_batch: int, in_flight: int) -> int:
        """Bytes of a tile, as in `tile_memory`; shards rounded up."""
        return self._total(units.lo, units.hi, micro_batch, in_flight)

    def reach(self, micro_batch: int, in_flight: int, limit: int) -> list[int]:
        """End of the longest run of units that fits `limit`, by first unit; memory grows with every unit."""
        key = (micro_batch, in_flight, limit)
        if key not in self._reach:
            count, end = len(self._workload.units), 0
            kept, saved = in_flight * micro_batch, self._sums.saved_until
            rows = self._known.setdefault(micro_batch, [{} for _ in range(count)])
            lean = partial(self._lean, micro_batch)
            ends: list[int] = []
            for lo, row in enumerate(rows):
                end = max(end, lo)
                left = limit + kept * saved[lo]  # for the part independent of micro-batches in flight, and saved[end]
                while end > lo and (row.get(end) or lean(row, lo, end)) + kept * saved[end] > left:
                    end -= 1
                while end < count and (row.get(end + 1) or lean(row, lo, end + 1)) + kept * saved[end + 1] <= left:
                    end += 1
                ends.append(end)
            self._reach[key] = ends
        return self._reach[key]

    def _lean(self, micro_batch: int, row: dict[int, int], lo: int, hi: int) -> int:
        """A tile's bytes with nothing kept for backward, cached in the row."""
        found = row[hi] = self._state(lo, hi) + self._sums.lean(lo, hi, micro_batch)
        return found

    def _total(self, lo: int, hi: int, micro_batch: int, in_flight: int) -> int:
        return self._state(lo, hi) + self._sums.without_state(lo, hi, micro_batch, in_flight)

    def _state(self, lo: int, hi: int) -> int:
        return self._workload.state_bytes_per_element * self._kept(-(-self._sums.first_within(lo, hi) // self._owners))

    def _kept(self, owned: int) -> int:
        """Elements that a rank owns or replicates, if it owns `owned`."""
        foreign = max(0, self._sums.numel - self._owners * owned)
        return owned * (1 + self._held_inside) + -(-foreign * self._held_outside // self._others)


def _prefix(values: list[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _between(prefix: list[int], units: Span) -> int:
    return prefix[units.hi] - prefix[units.lo]
