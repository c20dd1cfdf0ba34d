"""Restart: the uniform layouts, `parallel.dp` x `parallel.pp`, of a job that starts anew on the remaining ranks.

All units and samples are dealt again; ranks beyond the layout compute nothing. The runtime switches in place, as for
every policy: processes, program, checkpoint and replayed steps of a real restart are not included.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.make.planner import lane_shapes, shape_name, uniform
from elaswave_fx.plan.next.lane_candidates import Candidate
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """All uniform layouts."""
    return uniform_lanes(plan, topology)


def uniform_lanes(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The most lanes of each depth, for all depths; the last ranks are left over."""
    count, work = len(topology.members), plan.workload
    for depth in range(1, min(count, len(work.units)) + 1):
        widths = uniform(min(count // depth, work.granules), depth)
        yield Candidate(f"started anew: {shape_name(widths)}", lane_shapes(topology.members, widths))
