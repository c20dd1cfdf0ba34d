"""Kinds of ranks: after the failure of any rank of one kind the best lanes are the same up to names of ranks.

In: a plan and a rank. Out: a value that is equal for ranks of one kind. Ranks of a kind may differ in their boxes,
which `replan.replan_like` checks for each.

    4 lanes of 4 stages, equal members  ->  4 kinds: a rank of the first stage, of the second one, …
"""

from __future__ import annotations

from collections.abc import Hashable

from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Member, Rank


def loss_kind(plan: Plan, rank: Rank) -> Hashable:
    """Key of the rank's place in a kind of lane. Where pairs of hosts have measured links, each rank is its own
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
