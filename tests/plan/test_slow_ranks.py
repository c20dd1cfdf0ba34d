"""Ranks that are slower than their plan takes them for get less work, or none, and their share when they are fast."""

from __future__ import annotations

from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.replan import Replicas
from elaswave_fx.plan.next.replan_request import ReplanRequest
from elaswave_fx.plan.next.target_layout import successor
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking, chain


def everybody(plan: Plan) -> Replicas:
    return {number: box.replica_ranks for number, box in numbered(plan.boxes)}


def samples(plan: Plan, rank: int) -> int:
    return plan.tile(Rank(rank)).sample_count


def settled(plan: Plan, speeds: dict[Rank, float]) -> tuple[Plan, str]:
    """The plan that stays, once replicas are in sync, and the reasons of all on the way to it."""
    reasons: list[str] = []
    for _ in range(6):
        following = successor(plan, everybody(plan), 1, ReplanRequest(speeds))
        if following is None:
            return plan, " | ".join(reasons)
        check_plan(following)
        reasons.append(following.reason)
        plan = following
    raise AssertionError("no plan stays")


def test_a_slow_rank_gets_less_and_its_share_again() -> None:
    plan = plan_uniform(asking(chain(4, 64), micro_batch=1), local_topology(8), 8, 1)
    assert successor(plan, everybody(plan), 1, ReplanRequest()) is None
    slow, why = settled(plan, {Rank(3): 0.5})
    assert samples(slow, 3) < samples(slow, 0) and slow.topology.member(Rank(3)).speed == 0.5
    assert why.startswith("rank 3 has a speed of 0.5, not 1; ")
    even = sum(member.speed for member in slow.topology.members)
    assert slow.predicted.pipeline_s <= 1.1 * plan.predicted.pipeline_s * 8 / even
    fast, _ = settled(slow, {Rank(3): 1.0})
    assert [samples(fast, rank) for rank in range(8)] == [samples(plan, rank) for rank in range(8)]


def test_a_rank_that_holds_everybody_up_computes_nothing() -> None:
    plan = plan_uniform(asking(chain(4, 16), micro_batch=1), local_topology(4), 4, 1)
    drained, why = settled(plan, {Rank(2): 0.02})
    assert not drained.tile(Rank(2)).units and {tile.rank for tile in drained.tiles} == {0, 1, 2, 3}
    assert "without rank 2, too slow" in why
    assert drained.predicted.pipeline_s < 1.6 * plan.predicted.pipeline_s


def test_a_little_slower_is_not_worth_a_plan() -> None:
    plan = plan_uniform(asking(chain(4, 16), micro_batch=1), local_topology(4), 4, 1)
    assert successor(plan, everybody(plan), 1, ReplanRequest({Rank(2): 0.98})) is None
