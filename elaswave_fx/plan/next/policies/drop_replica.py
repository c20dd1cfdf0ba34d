"""Drop the replica: a lane that has lost a rank leaves with all its ranks, and whole lanes take its samples.

That is what data parallelism over pipelines does without elasticity inside of a pipeline, with the global batch kept;
`smaller_batch.py` goes on with fewer samples instead. Ranks that leave keep the copies that they have, and compute
nothing. Without a whole lane there is no answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, whole_lanes
from elaswave_fx.plan.next.policies.restart import uniform_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The whole lanes, as they are; anything uniform where ranks have come."""
    if not set(topology.ranks) <= set(plan.ranks):
        yield from uniform_lanes(plan, topology)
        return
    whole = tuple(whole_lanes(plan, topology).values())
    if whole:
        yield Candidate("the hurt lanes leave", whole)
