"""ReCycle (Gandhi et al., SOSP 2024): stages keep their units, and the peers of a failed rank, which have the same
parameters, are dealt its micro-batches.

With `parallel.schedule=auto` or `split`, second halves of backward passes fill the gaps of the pipelines, as in
ReCycle's decoupled backward. Its staggered optimizer contradicts a global commit, and is only simulated
(`tools/bench/staggered.py`). A stage that has lost all of its ranks has no candidate. Rejoining ranks are planned for
as at the start of a job.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, keeps_units, lane_candidates, repaired
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """Stages as they are, with fewer ranks."""
    if not set(topology.ranks) <= set(plan.ranks):
        return lane_candidates(plan, topology)
    return (candidate for candidate in repaired(plan, topology) if keeps_units(plan, candidate))
