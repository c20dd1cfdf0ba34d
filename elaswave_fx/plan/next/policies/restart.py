"""Restart: what a job that starts anew on the ranks that are left could ask for, `parallel.dp` x `parallel.pp` of them.

All units and samples are dealt again, and ranks that such a shape has no use for compute nothing. The runtime does it
in place, like every other policy: what a real restart costs besides (processes, program, a checkpoint, steps done
again) is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.make.planner import shape_name, sketch, uniform
from elaswave_fx.plan.next.lane_candidates import Candidate
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """All shapes."""
    return uniform_lanes(plan, topology)


def uniform_lanes(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """As many lanes as there can be of each depth, and all depths; the last ranks are left over."""
    count, work = len(topology.members), plan.workload
    for depth in range(1, min(count, len(work.units)) + 1):
        widths = uniform(min(count // depth, work.granules), depth)
        yield Candidate(f"started anew: {shape_name(widths)}", sketch(topology.members, widths))
