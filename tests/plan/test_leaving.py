"""A rank that is to leave: its work and its replicas go to the others first, then a plan without it follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.next.policies import POLICIES
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.next.replan_request import ReplanRequest
from elaswave_fx.plan.next.target_layout import successor
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition import Transition
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking
from tests.plan.test_target_layout import job

LAYOUTS = [(2, 2), (3, 2), (2, 3), (4, 1), (1, 3)]


def told(*ranks: int, overdue: tuple[int, ...] = ()) -> ReplanRequest:
    return ReplanRequest(leaving=tuple(map(Rank, ranks)), overdue=tuple(map(Rank, overdue)))


def replicas_of(plan: Plan, only_complete: bool = False) -> dict[BoxId, tuple[Rank, ...]]:
    return {
        number: tuple(sorted(box.local_materializers if only_complete else box.replica_ranks))
        for number, box in numbered(plan.boxes)
    }


def follow(plan: Plan, request: ReplanRequest) -> Iterator[Plan]:
    """The plans that come next, each with all replicas of the one before, until nothing follows."""
    for _ in range(16):
        following = successor(plan, replicas_of(plan), 1, request)
        if following is None:
            return
        check_plan(following)
        plan = following
        yield plan
        request = replace(request, leaving=tuple(rank for rank in request.leaving if rank in plan.ranks))
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_can_leave_with_all_replicas_made_elsewhere_before(layout: tuple[int, int]) -> None:
    plan = job(*layout, 6, 4, room=4.0)
    for rank in plan.ranks:
        before = plan
        plans = []
        for following in follow(plan, told(rank)):
            plans.append(following)
            if rank not in following.ranks:
                break
            assert rank not in {r for box in following.boxes for r in box.catching_up}, "it gets nothing"
            before = following
        last = plans[-1]
        assert last.ranks == tuple(r for r in plan.ranks if r != rank) and not last.topology.leaving
        assert last.lanes == before.lanes and not any(rank in lane.ranks for lane in before.lanes)
        assert all(len(box.local_materializers) >= 2 for box in last.boxes), "no replica is missing when it goes"
        assert len(plans) <= 4
        assert Transition.of(before, last).lines()[0].endswith(f"left by rank {rank}")
        assert f"left by rank {rank}" in last.reason and f"to be left by rank {rank}" in plans[0].reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rank_leaves_by_every_policy(policy: str) -> None:
    plan = job(3, 2, 6, 4, room=4.0)
    plan = replace(plan, workload=asking(plan.workload, policy=policy))
    *_, last = follow(plan, told(2))
    assert last.ranks == (0, 1, 3, 4, 5)
    assert last.workload.skipped == (4 if policy == "smaller_batch" else 0)


def test_who_owns_what_nobody_else_has_keeps_it_until_others_do() -> None:
    plan = job(2, 2, 6, 4, room=4.0)
    alone = {number: tuple(r for r in ranks if r != 1) or ranks for number, ranks in replicas_of(plan).items()}
    alone = {number: ((Rank(3),) if 3 in ranks else ranks) for number, ranks in alone.items()}
    with_one_replica = replan(plan, plan.ranks, alone, 0)
    first = successor(with_one_replica, replicas_of(with_one_replica), 1, told(3))
    assert first is not None and Rank(3) in first.ranks
    kept = [box for box in first.boxes if box.owner == 3]
    assert kept and all(len(box.catching_up) == 2 and 3 not in box.catching_up for box in kept)


def test_ranks_that_the_others_cannot_go_on_without_stay() -> None:
    tight = job(1, 3, 6, 4, room=1.02)
    with pytest.raises(PlanError, match="cannot hold the job"):
        replan(tight, (Rank(0),), {number: (Rank(0),) for number, _ in numbered(tight.boxes)}, 1)
    plans = list(follow(tight, told(1, 2)))
    assert plans[-1].ranks == (0, 2), "one of them can be spared"


def test_the_last_rank_stays() -> None:
    plan = job(2, 1, 6, 4)
    plans = list(follow(plan, told(0, 1)))
    assert plans[-1].ranks == (1,)
    assert successor(plans[-1], replicas_of(plans[-1]), 1, told(1, overdue=(1,))) is None


def test_who_is_overdue_goes_with_fewer_replicas_left_but_never_with_the_last_one() -> None:
    plan = job(2, 2, 6, 4)
    following = successor(plan, replicas_of(plan), 1, told(2, overdue=(2,)))
    assert following is not None and following.ranks == (0, 1, 3)
    check_plan(following)
    syncing = successor(plan, replicas_of(plan), 1, told(2))
    assert syncing is not None
    now = replicas_of(syncing, only_complete=True)
    assert successor(syncing, now, 1, told(2)) is None, "replicas are on their way"
    following = successor(syncing, now, 1, told(2, overdue=(2,)))
    assert following is not None and following.ranks == (0, 1, 3)
    last = {number: ((Rank(2),) if 2 in ranks else ranks) for number, ranks in replicas_of(plan).items()}
    assert successor(plan, last, 1, told(2, overdue=(2,))) is None


@pytest.mark.parametrize("lost", range(4))
def test_after_a_loss_who_leaves_gets_nothing(lost: int) -> None:
    plan = job(2, 2, 6, 4, room=4.0)
    syncing = successor(plan, replicas_of(plan), 1, told(2))
    assert syncing is not None and syncing.topology.leaving == (2,)
    members = tuple(rank for rank in syncing.ranks if rank != lost)
    have = {n: tuple(r for r in ranks if r != lost) for n, ranks in replicas_of(syncing, only_complete=True).items()}
    after = replan(syncing, members, have, 1)
    check_plan(after)
    assert not any(2 in lane.ranks for lane in after.lanes)
    assert 2 not in {rank for box in after.boxes for rank in box.catching_up}


def test_a_topology_that_everybody_leaves_is_none() -> None:
    with pytest.raises(PlanError, match="one must stay"):
        local_topology(2).with_leaving((Rank(0), Rank(1)))
