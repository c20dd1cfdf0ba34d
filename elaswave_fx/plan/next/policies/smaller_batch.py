"""Smaller batch: a lane that has lost a rank leaves with all its ranks, and nobody takes its samples.

That is what TorchFT (https://github.com/pytorch/torchft) does, whose replica groups stand and fall as one: steps go on
with the samples of the groups that are left. Whole lanes keep as many samples as they had, numbered anew from the first
one of the batch on; the last ones are skipped, in every step until ranks come back. Loss and gradient are means over
what is computed, so that this policy alone changes what a run computes: it is there to compare with. Without a whole
lane there is no answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, samples_of_lanes, whole_lanes
from elaswave_fx.plan.next.policies.restart import uniform_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The whole lanes with the samples that they had; anything uniform where ranks have come."""
    if _has_joiners(plan, topology):
        yield from uniform_lanes(plan, topology)
        return
    whole = whole_lanes(plan, topology)
    if whole:
        samples = samples_of_lanes(plan)
        shares = tuple(samples[place] // plan.workload.options.granule for place in whole)
        yield Candidate("the hurt lanes leave, with their samples", tuple(whole.values()), shares)


def skipped(plan: Plan, topology: Topology) -> int:
    """The samples of the batch that whole lanes do not have; none where ranks have come."""
    whole = whole_lanes(plan, topology)
    if _has_joiners(plan, topology) or not whole:
        return 0
    samples = samples_of_lanes(plan)
    return plan.workload.options.global_batch - sum(samples[place] for place in whole)


def _has_joiners(plan: Plan, topology: Topology) -> bool:
    return not set(topology.ranks) <= set(plan.ranks)
