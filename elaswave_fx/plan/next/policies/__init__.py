"""Policies: functions from the previous plan to the candidates for the next one.

The planner shapes, times and compares the candidates of the job's `policy` by one objective: policies differ only in
their candidates, and in how many samples a step computes.

    candidates(plan, topology)     ->  Candidate("stages keep their units", ...), ...
    next_workload(plan, topology)  ->  Workload(..., skipped=0)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from elaswave_fx.plan.next.lane_candidates import Candidate
from elaswave_fx.plan.next.policies import drop_replica, elaswave, recycle, restart, smaller_batch
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.topology import Topology


def whole_batch(plan: Plan, topology: Topology) -> int:
    """No skipped samples, whichever ranks are left."""
    return 0


@dataclass(frozen=True)
class Policy:
    """`candidates`: for the samples that are not `skipped`. `no_answer`: why there may be no candidate."""

    candidates: Callable[[Plan, Topology], Iterator[Candidate]]
    no_answer: str
    skipped: Callable[[Plan, Topology], int] = whole_batch


POLICIES: Mapping[str, Policy] = {
    "elaswave": Policy(elaswave.candidates, "it moves no units to other ranks"),  # without the axes that would
    "recycle": Policy(recycle.candidates, "it moves no units to other ranks"),
    "drop_replica": Policy(drop_replica.candidates, "no lane is whole"),
    "smaller_batch": Policy(smaller_batch.candidates, "no lane is whole", smaller_batch.skipped),
    "restart": Policy(restart.candidates, "no shape is left"),
}


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """Candidates of the plan's policy for the ranks that stay."""
    return POLICIES[plan.workload.options.policy].candidates(plan, topology.staying)


def next_workload(plan: Plan, topology: Topology) -> Workload:
    """The workload of a step of the ranks that stay, by the plan's policy."""
    return replace(plan.workload, skipped=POLICIES[plan.workload.options.policy].skipped(plan, topology.staying))
