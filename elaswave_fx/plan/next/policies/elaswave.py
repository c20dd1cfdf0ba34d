"""The default policy: all candidates that the allowed axes permit.

Without the axis *graph* no rank gets new units; without *dataflow* no lane gets samples of another. ElasWave (arXiv
2510.00606) has both; each can be switched off for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, keep_samples, keeps_units, lane_candidates
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    axes = plan.workload.options.axes
    found = lane_candidates(plan, topology) if "dataflow" in axes else keep_samples(plan, topology)
    return (candidate for candidate in found if "graph" in axes or keeps_units(plan, candidate))
