"""What can be done at once after a loss or a join, what is better later, and the way there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.planner import most_memory, plan_uniform
from elaswave_fx.plan.next.objective import AtOnce, InBackground, OnTheWay
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.next.replan_request import ReplanRequest
from elaswave_fx.plan.next.target_layout import WORTH, better_target, successor
from elaswave_fx.plan.plan import Plan, TargetLayout
from elaswave_fx.plan.predict.transition import Transition
from elaswave_fx.plan.replicas.owners import UNEVEN
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Link, Rank, local_topology
from tests.plan.samples import asking
from tests.plan.test_owners import deviation_of

ELEMENTS = 2_000_000
LINK = Link(0.0, 2e8)
"""Parameters of a unit take 40 ms."""


def job(
    dp: int, pp: int, units: int, samples: int, room: float | None = 1.5, link: Link = LINK, elements: int = ELEMENTS
) -> Plan:
    """Lanes of units that take 30 ms a sample; ranks have `room` times the memory of the fullest one."""
    workload = Workload(
        tuple(UnitCost(10e-3, 20e-3, param_bytes=4 * elements, saved_bytes=100_000) for _ in range(units)),
        tuple(Value(f"h{unit}", unit, (unit + 1,), 1000) for unit in range(units - 1)),
        tuple(Bucket(f"b{unit}", elements, (unit,)) for unit in range(units)),
        PlanOptions(samples * dp, micro_batch=1),
        least_elements=elements // 8,
    )
    topology = replace(local_topology(dp * pp), within_host=link, between_hosts=link)
    plan = plan_uniform(workload, topology, dp, pp)
    if room is None:
        return plan
    memory = int(room * most_memory(plan))
    members = tuple(replace(member, memory_bytes=memory) for member in topology.members)
    return replace(plan, topology=replace(topology, members=members))


def with_goals(plan: Plan, goals: str) -> Plan:
    return replace(plan, workload=asking(plan.workload, goals=goals))


def change(plan: Plan, *members: int) -> Plan:
    ranks = tuple(map(Rank, members))
    have = {number: tuple(r for r in box.replica_ranks if r in ranks) for number, box in numbered(plan.boxes)}
    found = replan(plan, ranks, have, 1)
    check_plan(found)
    return found


def follow(plan: Plan, asked: ReplanRequest | None = None) -> Iterator[Plan]:
    """The plans that come next, each with all replicas of the one before; with little memory, made in waves."""
    for _ in range(16):
        following = successor(plan, {number: box.replica_ranks for number, box in numbered(plan.boxes)}, 1, asked)
        if following is None:
            return
        check_plan(following)
        assert Plan.from_json(following.to_json()) == following
        yield following
        plan = following
    raise AssertionError("plans follow each other for ever")


def lose_5(goals: str = "background") -> Plan:
    return change(with_goals(job(4, 4, 32, 16), goals), *(rank for rank in range(16) if rank != 5))


def test_a_loss_is_answered_at_once_and_then_by_the_target() -> None:
    first = lose_5()
    assert first.target is not None and "the target layout is" in first.reason
    assert first.target.step_s * WORTH < first.predicted.step_s
    rest = list(follow(first))
    reached = next(plan for plan in rest if plan.target is None)
    *waves, before = (first, *rest[: rest.index(reached)])
    assert all(plan.lanes == first.lanes and plan.target == first.target for plan in (*waves, before))
    assert reached.lanes == first.target.lanes and reached.target is None
    assert "the target layout is reached" in reached.reason
    assert Transition.of(before, reached).parameter_bytes == 0, "what is computed with is made from replicas"
    last = rest[-1]
    assert last.lanes == reached.lanes and deviation_of(last) <= UNEVEN
    assert all(len(box.holders) == 1 for box in last.boxes), "replicas that nobody needs are dropped"


def test_blocking_takes_the_best_at_once_and_parameters_travel_in_the_stop() -> None:
    before, first = with_goals(job(4, 4, 32, 16), "blocking"), lose_5("blocking")
    wanted = lose_5().target
    assert wanted is not None and first.lanes == wanted.lanes and first.target is None
    assert Transition.of(before, first).parameter_bytes > 0
    assert all(plan.lanes == first.lanes and plan.target is None for plan in follow(first))


def test_never_stays_with_what_is_possible_at_once() -> None:
    on_the_way, first = lose_5(), lose_5("never")
    assert first.lanes == on_the_way.lanes and first.target is None and "target" not in first.reason
    better = better_target(first, first.topology, 1)
    assert better is not None and better.step_s * WORTH < first.predicted.step_s, "which nobody looks for"
    assert all(plan.lanes == first.lanes and plan.target is None for plan in follow(first))


@pytest.mark.parametrize("goals", ["background", "blocking", "never"])
def test_a_slow_rank_has_less_work_by_the_mode_of_goals(goals: str) -> None:
    plan = replace(change(with_goals(job(4, 1, 4, 12, room=None), goals), 0, 1, 2, 3), is_asked=False)
    replicas = {number: box.replica_ranks for number, box in numbered(plan.boxes)}
    following = successor(plan, replicas, 1, ReplanRequest({Rank(2): 0.5}))
    if goals == "never":
        assert following is None or following.lanes == plan.lanes
    else:
        assert following is not None and following.predicted.step_s * WORTH < 2 * plan.predicted.step_s
        assert following.tile(Rank(2)).sample_count < plan.tile(Rank(2)).sample_count


def test_no_box_has_fewer_replicas_on_the_way() -> None:
    before = lose_5()
    for plan in follow(before):
        for old, new in zip(before.boxes, plan.boxes, strict=True):
            assert new.owner in old.replica_ranks
            assert len(new.replica_ranks) >= min(2, len(old.replica_ranks)), (
                "a lost replica may be made in a later wave"
            )
            assert new.local_materializers & set(old.replica_ranks)
            if new.catching_up:
                assert set(old.replica_ranks) <= set(new.replica_ranks)
        before = plan


def test_what_a_user_has_asked_for_stays_until_ranks_come_or_go() -> None:
    asked = job(2, 2, 8, 8, room=None, link=Link())  # lanes of one stage would be shorter, for they have no bubbles
    assert asked.is_asked and not list(follow(asked))
    better = better_target(asked, asked.topology, 1)
    assert better is not None and better.step_s * WORTH <= asked.predicted.step_s
    assert not change(asked, 0, 1, 2).is_asked


def test_plans_come_to_rest() -> None:
    for plan in (job(2, 2, 8, 8), job(3, 2, 8, 8), job(2, 4, 16, 8, room=None)):
        for lost in range(0, len(plan.ranks), 2):
            rest = list(follow(change(plan, *(rank for rank in plan.ranks if rank != lost))))
            assert not rest or rest[-1].target is None


def replicas_of(plan: Plan) -> list[tuple[Rank, set[Rank], set[Rank]]]:
    """By box its owner, its holders, and those of them that sync."""
    return [(box.owner, set(box.holders), set(box.catching_up)) for box in plan.boxes]


def test_a_target_waits_while_ranks_sync_and_is_forgotten_with_its_ranks() -> None:
    first = lose_5()
    assert first.target is not None
    have = {n: tuple(r for r in b.replica_ranks if r not in b.catching_up) for n, b in numbered(first.boxes)}
    again = replan(first, first.ranks, have, 1)
    assert again.lanes == first.lanes and again.target == first.target
    assert replicas_of(again) == replicas_of(first)
    fewer = change(first, *(rank for rank in first.ranks if rank != 9))
    assert fewer.target is None or 9 not in {rank for lane in fewer.target.lanes for rank in lane.ranks}


def test_replicas_for_a_target_take_no_more_memory_than_there_is() -> None:
    for room in (1.05, 1.2, 1.5):
        try:
            plan = change(job(4, 4, 32, 16, room), *(rank for rank in range(16) if rank != 5))
        except PlanError:
            continue
        for each in (plan, *follow(plan)):
            for member in each.topology.members:
                assert each.predicted.ranks[member.rank].memory_bytes <= (member.memory_bytes or 0)


def test_ranks_that_come_get_replicas_while_the_others_go_on() -> None:
    before = job(4, 1, 1, 40, room=None, elements=4 * ELEMENTS)
    joined = change(before, *range(5))
    assert joined.lanes == before.lanes and joined.target is not None and not joined.tile(Rank(4)).units
    assert not Transition.of(before, joined).parameter_bytes
    reached = next(follow(joined))
    assert reached.tile(Rank(4)).units and not Transition.of(joined, reached).parameter_bytes


@pytest.mark.parametrize("broken", ["rank", "plane", "step"])
def test_the_checker_looks_at_targets(broken: str) -> None:
    plan = lose_5()
    assert plan.target is not None
    lanes: tuple[Lane, ...] = plan.target.lanes
    if broken == "rank":
        stage = lanes[0].stages[0]
        gone = replace(stage, ranks=(Rank(5), *stage.ranks[1:]))
        lanes = (replace(lanes[0], stages=(gone, *lanes[0].stages[1:])), *lanes[1:])
    elif broken == "plane":
        lanes = (*lanes, lanes[0])
    with pytest.raises(PlanError, match="its target layout"):
        check_plan(replace(plan, target=TargetLayout(lanes, 0.0 if broken == "step" else 1.0, "broken")))


def test_objectives_count_steps() -> None:
    assert AtOnce(100.0).steps(2.0, 10.0) == 45 and AtOnce(100.0).longest_s(50) == 2.0
    on_the_way = OnTheWay(target_s=2.0, target_stall_s=10.0, sync_s=30.0)
    assert on_the_way.steps(2.5, 4.0) == 12 + 3 and on_the_way.longest_s(17.0) == 2.5
    assert on_the_way.steps_without == pytest.approx(15.025)
    assert InBackground(100.0, now_s=4.0, ratio=2.0).steps(2.0, 10.0) == pytest.approx(5 + 79.95 / 2)


def slow_rank(plan: Plan, switch_bytes: int) -> tuple[Plan, ReplanRequest]:
    """Of so much memory for a transition; and the request that follows when rank 0 is ten times as slow as it was."""
    return replace(plan, topology=replace(plan.topology, switch_bytes=switch_bytes)), ReplanRequest(
        speeds={Rank(0): 0.1}
    )


@pytest.mark.parametrize(
    ("first", "asked", "is_reached"),
    [
        (change(job(2, 2, 8, 4, room=1.0, elements=5000), *range(5)), None, False),
        (change(job(1, 3, 5, 4, room=1.08, elements=20000), *range(4)), None, False),
        (*slow_rank(job(2, 2, 5, 3, room=1.5, elements=200_000), 2_457_600), True),
    ],
)
def test_a_target_that_memory_is_too_short_to_reach_is_given_up_once(
    first: Plan, asked: ReplanRequest | None, is_reached: bool
) -> None:
    """Then the next best lanes are, if they are worth it."""
    plans = [first, *follow(first, asked)]
    begun = [plan.target.reason for plan in plans if plan.target is not None]
    goals = [target for target, _ in groupby(begun)]
    assert len(set(goals)) == len(goals), "nothing is begun again"
    last = plans[-1]
    assert last.given_up == tuple(goals[: len(goals) - is_reached]) and last.target is None
    (told,) = [plan.reason for plan in plans if "given up" in plan.reason]
    assert f"given up, for memory has no room on the way: {goals[0]}" in told
    assert (last.lanes == first.lanes) is not is_reached


def test_a_target_that_was_given_up_is_tried_again_when_a_rank_has_another_speed() -> None:
    first = change(job(2, 2, 8, 4, room=1.0, elements=5000), *range(5))
    (*_, last) = follow(first)
    assert last.given_up
    assert all(not plan.given_up for plan in [next(follow(last, ReplanRequest(speeds={Rank(1): 0.6})))])


def test_replicas_for_which_there_is_room_are_kept_where_not_all_have_some() -> None:
    first = change(job(2, 3, 5, 4, room=1.0, elements=200_000), 0, 2, 3, 4, 5)
    plans = [first, *follow(first)]
    made = [sum(len(box.replica_ranks) - 1 for box in plan.boxes) for plan in plans]
    assert made == sorted(made) and 0 < made[-1] < len(first.boxes)
