"""Contents and cost of a step: the planner's only knowledge of the program.

In: numbers from the passes (analytic or calibrated). Out: seconds and bytes of a run of units for some samples.

    Workload(units=(UnitCost(...), ...), values=(Value("h0", producer=0, consumers=(1,), ...),), buckets=...,
             options=PlanOptions(global_batch=16))
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.options import PlanOptions

GRADIENT_BYTES = 4
"""Bytes per element of the fp32 gradient accumulator that every reader of a bucket holds in full."""


ROUNDING = 1e-9
"""Relative slack in comparisons of seconds that were summed in different orders."""


@dataclass(frozen=True)
class UnitCost:
    """One unit: seconds per sample, seconds per call (each FORWARD or BACKWARD), bytes.

    `param_bytes` is the working copy; `saved_bytes` is kept per sample from forward to backward. In a split backward
    pass, the second half, for gradients of parameters, takes `weights_share` of the seconds, and `held_bytes` per
    sample are kept between the halves.
    """

    forward_s: float
    backward_s: float
    fixed_s: float = 0.0
    param_bytes: int = 0
    saved_bytes: int = 0
    held_bytes: int = 0
    weights_share: float = 0.0


@dataclass(frozen=True)
class Value:
    """An activation that crosses a unit border, from its producer along its consumers in unit order.

    A value without a sample axis (`sample_axis` None) counts as one sample of `bytes_per_sample` bytes.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    bytes_per_sample: int
    has_grad: bool = True
    sample_axis: int | None = 0


@dataclass(frozen=True)
class Bucket:
    """The flat parameters of one unit, optimizer group and dtype, or one tied tensor. `users` are the units reading it,
    `element_bytes` is the element size of the working copy.

    Or buffers that training changes: their updates need all of them, so they are never cut (`whole`).
    """

    name: str
    numel: int
    users: tuple[int, ...]
    whole: bool = False
    element_bytes: int = 4

    @property
    def work_bytes(self) -> int:
        """Bytes of a working copy."""
        return self.element_bytes * self.numel


@dataclass(frozen=True)
class Workload:
    """A step as the planner sees it: `samples` times `units`, their costs, and the options of its plans.

    The last `skipped` samples of a step are not computed (`lab.policy=smaller_batch`). The position of a step's batch
    in the run follows from `options.global_batch` alone. `state_bytes_per_element` counts master copy, optimizer state
    and reduced gradient of an owned element. `batch_coupled`: the model computes with the samples of a micro-batch
    together. `update_s`: seconds in which a rank updates one element that it owns or holds. `sample_tokens`: tokens of
    a sample, at most; 0: samples are not sequences. `least_elements`: lower bound of a box's elements.
    """

    units: tuple[UnitCost, ...]
    values: tuple[Value, ...]
    buckets: tuple[Bucket, ...]
    options: PlanOptions
    batch_coupled: bool = False
    state_bytes_per_element: int = 16
    update_s: float = 0.0
    sample_tokens: int = 0
    least_elements: int = 1
    skipped: int = 0

    def __post_init__(self) -> None:
        if not self.units:
            raise PlanError("workload: no units; a program has at least one")
        for value in self.values:
            users = (value.producer, *value.consumers)
            if list(users) != sorted(set(users)) or not value.consumers:
                raise PlanError(
                    f"workload: value {value.name} goes from unit {value.producer} to units "
                    f"{value.consumers}; consumers are ascending, distinct and later than the producer"
                )
            _check_units(f"value {value.name}", users, len(self.units))
        for bucket in self.buckets:
            if not bucket.users or list(bucket.users) != sorted(set(bucket.users)):
                raise PlanError(
                    f"workload: bucket {bucket.name} has users {bucket.users}; "
                    "users are ascending, distinct and at least one"
                )
            _check_units(f"bucket {bucket.name}", bucket.users, len(self.units))
        batch, granule = self.options.global_batch, self.options.granule
        if not 0 <= self.skipped < batch or self.skipped % granule:
            raise PlanError(
                f"workload: a step skips {self.skipped} of {batch} samples; it skips whole granules of {granule}, and "
                "never all"
            )

    @property
    def samples(self) -> int:
        """Samples that a step computes: the width of the work plane."""
        return self.options.global_batch - self.skipped

    @property
    def single_granules(self) -> bool:
        """Whether every micro-batch is exactly one granule."""
        return self.batch_coupled or self.options.exact

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient element in a sum; exact sums are doubles."""
        return 2 * GRADIENT_BYTES if self.options.exact else GRADIENT_BYTES

    @property
    def granules(self) -> int:
        """Granules that a step computes."""
        return self.samples // self.options.granule


def _check_units(what: str, users: tuple[int, ...], count: int) -> None:
    bad = [u for u in users if not 0 <= u < count]
    if bad:
        raise PlanError(f"workload: {what} names unit {bad[0]}; there are units 0..{count - 1}")


def value_samples(value: Value, samples: int) -> int:
    """Samples' worth of bytes in a piece: a value without a sample axis is always one."""
    return 1 if value.sample_axis is None else samples


def forward_s(workload: Workload, lo: int, hi: int, samples: int, speed: float = 1.0) -> float:
    """Seconds of one forward micro-batch of `samples` through units [lo, hi) at a rank of that speed."""
    return sum(u.fixed_s + u.forward_s * samples for u in workload.units[lo:hi]) / speed


def backward_s(workload: Workload, lo: int, hi: int, samples: int, speed: float = 1.0) -> float:
    """Seconds of one backward micro-batch of `samples` through units [lo, hi) at a rank of that speed."""
    return sum(u.fixed_s + u.backward_s * samples for u in workload.units[lo:hi]) / speed


def weights_s(workload: Workload, lo: int, hi: int, samples: int, speed: float = 1.0) -> float:
    """The part of `backward_s` for gradients of parameters."""
    return sum(u.weights_share * (u.fixed_s + u.backward_s * samples) for u in workload.units[lo:hi]) / speed
