"""Drop the replica: all ranks of a hurt lane stop computing, and whole lanes take its samples.

This is data parallelism over pipelines that are not elastic themselves, with the global batch kept; `smaller_batch.py`
continues with fewer samples instead. Dropped ranks keep their replicas and compute nothing. Without a whole lane there
is no candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, whole_lanes
from elaswave_fx.plan.next.policies.restart import uniform_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The whole lanes, unchanged; all uniform layouts where ranks have joined."""
    if not set(topology.ranks) <= set(plan.ranks):
        yield from uniform_lanes(plan, topology)
        return
    whole = tuple(whole_lanes(plan, topology).values())
    if whole:
        yield Candidate("the hurt lanes leave", whole)
