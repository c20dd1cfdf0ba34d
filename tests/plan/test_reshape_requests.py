"""Lanes that a user wants of a running job: a target like any other, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.next.target_layout import successor, why_never
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition import Transition
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Link
from tests.plan.test_target_layout import change, job, with_goals

SHAPES = [(4, 1), (2, 2), (1, 4), (3, 1), (1, 3), (2, 1)]


def shape(plan: Plan) -> tuple[int, ...]:
    return tuple(len(lane.stages) for lane in plan.lanes)


def carried_out(plan: Plan, reshape: ReshapeRequest) -> list[Plan]:
    """The plans from the reshape on, each with all replicas of the one before, until nothing follows."""
    plans = [plan]
    request = ReplanRequest(reshape=reshape)
    while True:
        replicas = {number: box.replica_ranks for number, box in numbered(plans[-1].boxes)}
        following = successor(plans[-1], replicas, 1, request)
        request = ReplanRequest()
        if following is None:
            return plans[1:]
        check_plan(following)
        plans.append(following)
        assert len(plans) < 8, [each.reason for each in plans]


@pytest.mark.parametrize("before", SHAPES[:3])
@pytest.mark.parametrize("after", SHAPES)
def test_lanes_become_what_was_asked_for_and_stay(before: tuple[int, int], after: tuple[int, int]) -> None:
    plan = job(*before, units=8, samples=8 // before[0], room=None)
    plans = carried_out(plan, ReshapeRequest(*after))
    if before == after:
        assert plans == []
        return
    first = plans[0]
    assert shape(plans[-1]) == (after[1],) * after[0] and plans[-1].is_asked and plans[-1].target is None
    reached = next(each for each in plans if each.lanes == plans[-1].lanes)
    assert "the target layout is reached" in reached.reason and "as it was asked for" in reached.reason
    if first is not reached:
        assert first.target is not None and first.target.is_asked and first.lanes == plan.lanes
        assert all(Plan.from_json(each.to_json()) == each for each in plans)


@pytest.mark.parametrize("goals", ["blocking", "never"])
@pytest.mark.parametrize("reshape", [ReshapeRequest(4, 1), ReshapeRequest()])
def test_a_reshape_is_carried_out_in_every_mode(goals: str, reshape: ReshapeRequest) -> None:
    plan = with_goals(job(1, 4, units=8, samples=8, room=None, link=Link()), goals)
    plans = carried_out(plan, reshape)
    assert plans[-1].predicted.step_s < 0.9 * plan.predicted.step_s and plans[-1].is_asked != reshape.is_best
    moved = [Transition.of(a, b).parameter_bytes for a, b in pairwise((plan, *plans))]
    if goals == "blocking":
        assert plans[0].lanes == plans[-1].lanes and moved[0] > 0 and all(each.target is None for each in plans)
    else:
        assert plans[0].target is not None and not any(moved), "made from replicas"


def test_the_best_is_looked_for_when_the_user_wants_it() -> None:
    plan = job(1, 4, units=8, samples=8, room=None, link=Link())
    assert carried_out(plan, ReshapeRequest(1, 4)) == []
    plans = carried_out(plan, ReshapeRequest())
    assert plans[-1].predicted.step_s < 0.9 * plan.predicted.step_s and not plans[-1].is_asked
    again = carried_out(plans[-1], ReshapeRequest(1, 4))
    assert shape(again[-1]) == (4,)


def test_a_loss_ends_a_reshape() -> None:
    plan = job(4, 1, units=8, samples=2, room=None)
    first = carried_out(plan, ReshapeRequest(1, 4))[0]
    left = change(first, 0, 1, 3)
    assert left.target is None or not left.target.is_asked
    assert not left.is_asked


def test_what_can_never_be_is_refused() -> None:
    plan = job(2, 2, units=8, samples=4, room=None)
    assert why_never(plan, ReshapeRequest(4, 2)) == "parallel.dp=4 parallel.pp=2: takes 8 ranks, and the job has 4"
    assert why_never(plan, ReshapeRequest(2, 2)) is None and why_never(plan, ReshapeRequest()) is None
    small = job(4, 1, units=2, samples=1, room=None)
    assert why_never(small, ReshapeRequest(1, 3)) == "parallel.pp=3: the model has 2 units; nearest valid: 2"
    assert carried_out(small, ReshapeRequest(1, 3)) == []
