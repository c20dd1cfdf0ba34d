"""Smaller batch: all ranks of a hurt lane stop computing, and its samples are skipped.

TorchFT (https://github.com/pytorch/torchft) does so: replica groups fail as a whole, and steps continue with the
samples of the remaining groups. Whole lanes keep their number of samples, renumbered from the first of the batch; the
last samples are skipped in every step until ranks rejoin. Loss and gradient are means over the computed samples. This
is the only policy that changes what a run computes; it exists for comparison. Without a whole lane there is no
candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

from elaswave_fx.plan.next.lane_candidates import Candidate, samples_of_lanes, whole_lanes
from elaswave_fx.plan.next.policies.restart import uniform_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Topology


def candidates(plan: Plan, topology: Topology) -> Iterator[Candidate]:
    """The whole lanes with their samples; all uniform layouts where ranks have joined."""
    if _has_joiners(plan, topology):
        yield from uniform_lanes(plan, topology)
        return
    whole = whole_lanes(plan, topology)
    if whole:
        samples = samples_of_lanes(plan)
        shares = tuple(samples[place] // plan.workload.options.granule for place in whole)
        yield Candidate("the hurt lanes leave, with their samples", tuple(whole.values()), shares)


def skipped(plan: Plan, topology: Topology) -> int:
    """The samples of the batch outside whole lanes; none where ranks have joined."""
    whole = whole_lanes(plan, topology)
    if _has_joiners(plan, topology) or not whole:
        return 0
    samples = samples_of_lanes(plan)
    return plan.workload.options.global_batch - sum(samples[place] for place in whole)


def _has_joiners(plan: Plan, topology: Topology) -> bool:
    return not set(topology.ranks) <= set(plan.ranks)
