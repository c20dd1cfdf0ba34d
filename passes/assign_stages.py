"""assign_stages: let the planner assign work to ranks, and attach the plan; the program does not change.

It works on the artifact, so that membership changes need no new trace:

    AssignStages(PlanOptions(global_batch=16), dp=2, pp=2).apply(artifact, topology, state_tensors=2)  ->  Plan
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.replicas.holders import least_elements
from elaswave_fx.plan.work.cost import GRADIENT_BYTES, Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.topology import Topology
from elaswave_fx.program.artifact import Artifact, UnitSpec

# Analytic rates of a modest core replace missing measurements. Only ratios of costs decide where stages are cut.
_OPERATIONS_PER_S = 2e10
_BACKWARD_OVER_FORWARD = 2.0
_CALL_S = 2e-6
_MASTER_BYTES = 4


@dataclass(frozen=True)
class AssignStages:
    """Make the slowest stage as fast as it can be, within every rank's memory."""

    name: ClassVar[str] = "assign_stages"
    options: PlanOptions
    dp: int
    pp: int
    replicas: int = 1

    def apply(
        self,
        artifact: Artifact,
        topology: Topology,
        state_tensors: int,
        update_s: float = 0.0,
        sample_tokens: int = 0,
    ) -> Plan:
        """A checked plan. `state_tensors` is how many fp32 tensors the optimizer keeps beside the master copy,
        `update_s` the seconds in which it updates an element; `sample_tokens` as in `Workload`.

        Raises ConfigError naming the key for a shape that leaves a rank without work or memory, or for a schedule with
        split backward passes that the program does not have.
        """
        options = replace(self.options, schedule=self._possible_schedule(artifact))
        workload = make_workload(artifact, options, state_tensors)
        workload = replace(workload, update_s=update_s, sample_tokens=sample_tokens)
        try:
            plan = plan_uniform(workload, topology, self.dp, self.pp, self.replicas)
        except ConfigError as error:
            if isinstance(error.__cause__, PlanError):  # Memory is short; any other error names what would be valid.
                raise ConfigError(f"{error}; {_what_takes_memory(artifact)}") from error
            raise
        check_plan(plan)
        return plan

    def _possible_schedule(self, artifact: Artifact) -> str:
        schedule = self.options.schedule
        if schedule == "1f1b" or artifact.is_split:
            return schedule
        if schedule == "split":
            raise ConfigError(
                "parallel.schedule=split: the pipeline (passes.pipeline) leaves split_backward out; nearest valid: "
                "parallel.schedule=1f1b"
            )
        return "1f1b"


def _what_takes_memory(artifact: Artifact) -> str:
    found = [(math.prod(p.shape), p.name, bucket.users[0]) for bucket in artifact.buckets for p in bucket.params]
    numel, name, unit = max(found)
    saved = max(artifact.units, key=lambda unit: unit.saved_bytes)
    return (
        f"the largest parameter is {name} in unit {unit} ({numel} elements), most is kept for backward by unit "
        f"{saved.index} ({saved.saved_bytes} bytes per sample); recompute=full, precision=bf16 or copies.count=0 need "
        "less"
    )


def make_workload(artifact: Artifact, options: PlanOptions, state_tensors: int) -> Workload:
    """The planner's view of a program: measured costs where available, analytic ones elsewhere."""
    if options.granule != artifact.granule:
        raise PlanError(f"assign_stages: the program has granules of {artifact.granule}, not of {options.granule}")
    return Workload(
        units=tuple(_unit_cost(artifact, unit) for unit in artifact.units),
        values=tuple(
            Value(v.name, v.producer, v.consumers, v.bytes_per_sample, v.has_grad, None if v.axis < 0 else v.axis)
            for v in artifact.values
        ),
        buckets=tuple(
            Bucket(bucket.name, bucket.numel, bucket.users, bool(bucket.buffers), bucket.torch_dtype.itemsize)
            for bucket in artifact.buckets
        ),
        options=options,
        batch_coupled=bool(artifact.batch_coupled),
        state_bytes_per_element=_MASTER_BYTES + GRADIENT_BYTES + 4 * state_tensors,
        least_elements=least_elements(sum(bucket.numel for bucket in artifact.buckets)),
    )


def _unit_cost(artifact: Artifact, unit: UnitSpec) -> UnitCost:
    calls = len(artifact.programs[f"{unit.kind}.forward"]["instructions"])
    forward_s = unit.flops / _OPERATIONS_PER_S
    backward_s, weights_share = _BACKWARD_OVER_FORWARD * forward_s, unit.weights_share
    if unit.kind in artifact.measured:
        forward_s, backward_s, weights_s = artifact.measured[unit.kind]
        weights_share = weights_s / backward_s if backward_s else 0.0
    own = [bucket for bucket in artifact.buckets if bucket.users[0] == unit.index]
    params = sum(bucket.numel * bucket.torch_dtype.itemsize for bucket in own)
    return UnitCost(forward_s, backward_s, calls * _CALL_S, params, unit.saved_bytes, unit.held_bytes, weights_share)
