"""Ways to answer a change of the topology: each a function from the plan before to what could be next.

The planner shapes, times and compares the candidates of the policy that the job has (`policy`), by one objective: so
policies differ in what they consider, and in nothing else.

    candidates(plan, topology)  ->  Candidate("stages keep their units", ...), ...
"""

from collections.abc import Callable, Iterator, Mapping

from elaswave_fx.plan.lane_candidates import Candidate
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.policies import drop_replica, elaswave, recycle, restart
from elaswave_fx.plan.topology import Topology

POLICIES: Mapping[str, Callable[[Plan, Topology], Iterator[Candidate]]] = {
    "elaswave": elaswave.candidates,
    "recycle": recycle.candidates,
    "drop_replica": drop_replica.candidates,
    "restart": restart.candidates,
}

NO_ANSWER: Mapping[str, str] = {
    "elaswave": "it moves no units to other ranks",  # without the axes that would
    "recycle": "it moves no units to other ranks",
    "drop_replica": "no lane is whole",
    "restart": "no shape is left",
}
"""Why a policy may have no candidate at all."""


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """Those of the plan's policy."""
    return POLICIES[plan.workload.policy](plan, topology)
