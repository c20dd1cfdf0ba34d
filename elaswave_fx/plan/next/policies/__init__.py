"""Ways to answer a change of the topology: each a function from the plan before to what could be next.

The planner shapes, times and compares the candidates of the policy that the job has (`policy`), by one objective: so
policies differ in what they consider, and in how many samples a step computes, and in nothing else.

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
    """Nothing of a step is skipped, whoever is left."""
    return 0


@dataclass(frozen=True)
class Policy:
    """`candidates`: what could be next, sharing the samples that are not `skipped`. `no_answer`: why there may be no
    candidate at all."""

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
    """Those of the plan's policy, for the ranks that stay."""
    return POLICIES[plan.workload.options.policy].candidates(plan, topology.staying)


def next_workload(plan: Plan, topology: Topology) -> Workload:
    """What a step of the ranks that stay is, by the plan's policy."""
    return replace(plan.workload, skipped=POLICIES[plan.workload.options.policy].skipped(plan, topology.staying))
