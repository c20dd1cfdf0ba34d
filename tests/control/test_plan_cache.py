"""Plans that were made ahead are the plans that would be made, and are used for exactly the loss they are for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import replace

import pytest

from elaswave_fx.control.coordinator.plan_cache import Held, Joiners, PlanCache, Planned, Planner
from elaswave_fx.control.protocol.types import BoxId
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.plan import Plan, plan_hash
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.control.toy_job import ToyPlanning, text_of
from tests.control.toy_planner import first_assignment
from tests.plan.samples import asking, chain, even_lanes
from tests.plan.test_target_layout import job


class Counted(ToyPlanning):
    """Counts how often it is asked, and how often without a plan that it could go by."""

    def __init__(self) -> None:
        super().__init__(least=3)
        self.asked = self.searched = 0

    def replan(
        self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
        joiners: Joiners | None = None,
    ) -> Planned:  # fmt: skip
        self.asked += 1
        self.searched += like is None
        return super().replan(before, members, held)


class OfTwoKinds(Counted):
    """Even ranks are alike, and odd ones."""

    def loss_kind(self, before: Planned, rank: Rank) -> Hashable:
        return rank % 2


def without(held: Held, lost: int) -> Held:
    return {box: tuple(rank for rank in ranks if rank != lost) for box, ranks in held.items()}


def test_a_foreseen_loss_needs_no_planner() -> None:
    planning = Counted()
    before = planning.read(text_of(first_assignment(4, 2)))
    held = {box_id: box.replica_ranks for box_id, box in numbered(before.assignment.boxes)}
    ahead = PlanCache(planning)
    while ahead.precompute_next(before, held):
        continue
    assert planning.asked == 4
    for lost in range(4):
        members = tuple(rank for rank in before.assignment.members if rank != lost)
        assert ahead.replan(before, members, without(held, lost)) == ToyPlanning().replan(
            before, members, without(held, lost)
        )
    assert planning.asked == 4
    members, left = (Rank(0), Rank(1), Rank(2)), without(held, 3)
    fewer = {**left, BoxId(0): left[BoxId(0)][:1]}
    ahead.replan(before, members, fewer)
    other = planning.read(text_of(ahead.replan(before, members, left).assignment))
    ahead.replan(other, members, left)
    assert planning.asked == 6, "another holding, and another plan, are planned for anew"


def test_a_search_is_made_once_for_ranks_of_a_kind() -> None:
    planning = OfTwoKinds()
    before = planning.read(text_of(first_assignment(4, 2)))
    held = {box_id: box.replica_ranks for box_id, box in numbered(before.assignment.boxes)}
    ahead = PlanCache(planning)
    assert ahead.precompute_next(before, held) and ahead.precompute_next(before, held)
    assert (planning.asked, planning.searched) == (2, 2), "one of each kind comes first"
    ahead.replan(before, (Rank(1), Rank(2), Rank(3)), without(held, 0))
    assert (planning.asked, planning.searched) == (3, 2), "also a loss that was not planned for goes by its kind"
    while ahead.precompute_next(before, held):
        continue
    assert (planning.asked, planning.searched) == (5, 2)


def test_nobody_waits_for_a_plan_of_another_loss() -> None:
    """Plans are made by a thread, one at a time; what is under way is waited for by whom it is for."""
    planning, given = Counted(), list[Callable[[], None]]()
    before = planning.read(text_of(first_assignment(4, 2)))
    held = {box_id: box.replica_ranks for box_id, box in numbered(before.assignment.boxes)}
    ahead = PlanCache(planning, given.append)
    assert ahead.precompute_next(before, held) and ahead.precompute_next(before, held)
    assert (len(given), planning.asked) == (1, 0), "one at a time, and elsewhere"
    assert ahead.replan(before, (Rank(1), Rank(2), Rank(3)), without(held, 0)) and planning.asked == 1
    thread = threading.Timer(0.05, given[0])
    thread.start()
    assert ahead.replan(before, (Rank(0), Rank(1), Rank(2)), without(held, 3)).assignment.members == (0, 1, 2)
    thread.join()
    assert planning.asked == 2, "the plan that was under way"
    assert ahead.precompute_next(before, held) and len(given) == 2


def test_what_a_plan_made_ahead_raises_is_raised_to_whom_it_is_for() -> None:
    class Broken(ToyPlanning):
        def replan(
            self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
            joiners: Joiners | None = None,
        ) -> Planned:  # fmt: skip
            raise PlanError("nothing fits")

    planning = Broken(least=3)
    before = planning.read(text_of(first_assignment(4, 2)))
    held = {box_id: box.replica_ranks for box_id, box in numbered(before.assignment.boxes)}
    ahead = PlanCache(planning)
    while ahead.precompute_next(before, held):
        continue
    with pytest.raises(PlanError, match="nothing fits"):
        ahead.replan(before, (Rank(0), Rank(1), Rank(2)), without(held, 3))


def test_the_real_planner_reads_what_it_wrote() -> None:
    workload = chain(8)
    plan = make_plan(local_topology(4), workload, even_lanes(workload, 2, 2, 2), "test")
    planner = Planner(replicas=1)
    before = planner.read(plan.to_json())
    held = {box_id: tuple(r for r in box.replica_ranks if r != 2) for box_id, box in numbered(before.assignment.boxes)}
    assert (before.assignment.members, before.plan.tiles) == (plan.ranks, plan.tiles)
    assert before.assignment.boxes == plan.boxes and before.assignment.plan_hash == plan_hash(plan.to_json())
    after = planner.replan(before, (Rank(0), Rank(1), Rank(3)), held)
    assert after.assignment.members == (0, 1, 3) and planner.read(after.text).assignment == after.assignment
    assert (
        after.lines
        and planner.successor(before, {b: (*ranks, Rank(2)) for b, ranks in held.items()}, ReplanRequest()) is None
    )


def test_the_next_plan_for_the_same_members_is_made_elsewhere_and_then_used() -> None:
    planning, given = Counted(), list[Callable[[], None]]()
    before = planning.read(text_of(first_assignment(4, 2)))
    held = {box_id: (*box.replica_ranks, *box.readers) for box_id, box in numbered(before.assignment.boxes)}
    members = before.assignment.members
    ahead = PlanCache(planning, given.append)
    assert ahead.successor(before, held, ReplanRequest()) is None and len(given) == 1, "it is not known yet"
    assert ahead.replan(before, members, held) and planning.asked == 1, "and nobody waits for it"
    given.pop()()
    following = ahead.successor(before, held, ReplanRequest())
    assert following is not None and ahead.replan(before, members, held) is following and not given
    other = {**held, BoxId(0): held[BoxId(0)][:1]}
    assert ahead.replan(before, members, other) is not following, "it is for exactly these replicas"
    resting = {box_id: box.replica_ranks for box_id, box in numbered(before.assignment.boxes)}
    assert ahead.successor(before, resting, ReplanRequest()) is None and len(given) == 1
    given.pop()()
    assert ahead.successor(before, resting, ReplanRequest()) is None and not given, "the plan can stay"


def test_a_plan_for_who_joins_is_there_before_anybody_stops() -> None:
    planning, works = Counted(), list[Callable[[], None]]()
    before = planning.read(text_of(first_assignment(4, 2)))
    held = {box_id: box.replica_ranks for box_id, box in numbered(before.assignment.boxes)}
    members = (*before.assignment.members, Rank(7))
    ahead = PlanCache(planning, works.append)
    assert ahead.ahead(before, members, held) is None and ahead.ahead(before, members, held) is None
    (work,) = works
    work()
    planned = ahead.ahead(before, members, held)
    assert planned is not None and planned.assignment.members == members and planning.asked == 1
    assert ahead.replan(before, members, held) == planned and planning.asked == 1


def test_a_job_that_has_no_work_for_more_ranks_says_so() -> None:
    work = chain(4, global_batch=8)
    bound = asking(work, axes=("graph",))
    planner, five = Planner(1), tuple(map(Rank, range(5)))
    for workload, most in ((work, 32), (bound, 4)):
        plan = make_plan(local_topology(4), workload, even_lanes(workload, 2, 2, 1), "")
        before = planner.read(plan.to_json())
        held = {box_id: box.replica_ranks for box_id, box in numbered(plan.boxes)}
        assert before.most_ranks == most and not before.ends_job
        assert planner.replan(before, five, held).ends_job == (most < 5)


def planned(plan: Plan) -> Planned:
    return Planner(replicas=1).read(plan.to_json())


def after(before: Planned, request: ReplanRequest) -> Planned | None:
    """What follows once all replicas are there."""
    held = {box_id: box.replica_ranks for box_id, box in numbered(before.plan.boxes)}
    return Planner(replicas=1).successor(before, held, request)


def test_a_plan_for_a_leaver_that_is_overdue_does_not_answer_a_reshape() -> None:
    before, reshape = planned(job(2, 2, 6, 4, room=None)), ReshapeRequest(3, 1)
    overdue = ReplanRequest(leaving=(Rank(2),), overdue=(Rank(2),), reshape=reshape)
    gone = after(before, overdue)
    assert gone is not None and gone.assignment.members == (0, 1, 3) and gone.reshape is None
    assert [len(lane.stages) for lane in gone.plan.lanes] != [1, 1, 1]
    following = after(gone, ReplanRequest(reshape=reshape))
    assert following is not None and following.reshape == reshape
    best = after(before, replace(overdue, reshape=ReshapeRequest()))
    assert best is not None and best.reshape is None


def test_what_a_planned_stop_is_for_is_said() -> None:
    before, reshape = planned(job(2, 2, 6, 4, room=None)), ReshapeRequest(4, 1)
    aims: list[str] = []
    request = ReplanRequest(reshape=reshape)
    while (following := after(before, request)) is not None:
        aims.append(following.aim)
        before, request = following, ReplanRequest()
    assert aims[:2] == [
        "replicas begin to sync for the requested layout",
        "the requested layout is taken",
    ]
    assert set(aims[2:]) <= {"owners move"}
