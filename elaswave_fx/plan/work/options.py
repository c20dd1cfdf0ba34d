"""Options of every plan of a job, from its configuration; costs are in `cost.py`, ranks in `topology.py`.

PlanOptions(global_batch=16, granule=2, micro_batch=4, schedule="auto")
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.errors import PlanError


@dataclass(frozen=True)
class PlanOptions:
    """Samples are cut at granules only. `micro_batch`: the upper bound of one in samples, if any.

    `exact`: the bits of the result do not depend on the plan. `schedule`: the order of work, "1f1b", "split", or "auto"
    for the faster one that fits. `policy`: the answer to a change of the topology (`policies/`); `axes`: what the
    policy "elaswave" may change then. `goals`: how target layouts that begin with a stall are reached: replicas sync in
    the "background", parameters travel in the stop ("blocking"), or "never", unless a user asks for them or ranks
    leave.
    """

    global_batch: int
    granule: int = 1
    micro_batch: int | None = None
    exact: bool = False
    schedule: str = "1f1b"
    policy: str = "elaswave"
    axes: tuple[str, ...] = ("dataflow", "graph", "frequency")
    goals: str = "background"

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.granule < 1 or self.global_batch % self.granule:
            raise PlanError(
                f"plan options: global_batch {self.global_batch} and granule {self.granule} must be positive, and one "
                "a multiple of the other"
            )
        if self.micro_batch is not None and self.micro_batch < self.granule:
            raise PlanError(f"plan options: micro_batch {self.micro_batch} is below granule {self.granule}")
