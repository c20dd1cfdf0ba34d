"""What a configuration asks of every plan of a job, apart from what units cost (`cost.py`) and who is there
(`topology.py`).

    PlanOptions(global_batch=16, granule=2, micro_batch=4, schedule="auto")
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.errors import PlanError


@dataclass(frozen=True)
class PlanOptions:
    """Samples are cut at granules only. `micro_batch`: the upper bound of one in samples, if any.

    `exact`: the bits of the result do not depend on the plan. `schedule`: the order of work, "1f1b", "split", or "auto"
    for the faster one that fits. `policy`: which changes answer a change of the topology (`policies/`); `axes`: what
    the policy "elaswave" may change then. `goals`: how target layouts are reached that begin with a stall: replicas
    sync before in the "background", parameters travel in the stop ("blocking"), or "never", unless a user asks for
    them or ranks leave.
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
