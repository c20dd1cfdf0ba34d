"""Ours: everything, as far as the axes go that may be used.

Without the axis *graph* no rank gets units that it did not have, without *dataflow* no lane gets samples of another
(ElasWave, arXiv 2510.00606, has both; each is there to be switched off and compared with).
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, keep_samples, keeps_units, lane_candidates
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """What the ranks that are left could do."""
    axes = plan.workload.options.axes
    found = lane_candidates(plan, topology) if "dataflow" in axes else keep_samples(plan, topology)
    return (candidate for candidate in found if "graph" in axes or keeps_units(plan, candidate))
