"""Which ranks of a plan are of one kind: after the loss of either the best lanes are the same, but for names of ranks.

In: a plan and a rank. Out: a value that is equal for ranks of one kind. What differs between them is who has which box:
that is looked at for each of them (`replan.replan_like`).

    4 lanes of 4 stages, equal members  ->  4 kinds: a rank of the first stage, of the second one, …
"""

from __future__ import annotations

from collections.abc import Hashable

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Member, Rank


def loss_kind(plan: Plan, rank: Rank) -> Hashable:
    """By the rank's place in a lane of some kind. Where pairs of hosts have links of their own, each rank is one of its
    kind."""
    topology = plan.topology
    if topology.links:
        return rank
    for lane in plan.lanes:
        if rank in lane.ranks:
            stages = tuple((stage.units, stage.deal) for stage in lane.stages)
            members = tuple(_what(topology.member(other)) for other in lane.ranks)
            pieces = tuple(map(len, lane.micro_batches))
            return stages, pieces, members, topology.links_among(lane.ranks), lane.ranks.index(rank)
    return _what(topology.member(rank))


def _what(member: Member) -> Hashable:
    return member.speed, member.memory_bytes
