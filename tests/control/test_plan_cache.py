"""Plans that were made ahead are the plans that would be made, and are used for exactly the loss they are for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from elaswave_fx.control.coordinator.plan_cache import Held, PlanCache, Planned, Planner
from elaswave_fx.control.protocol.types import BoxId
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.derive import make_plan
from elaswave_fx.plan.plan import plan_hash
from elaswave_fx.plan.topology import Rank, local_topology
from tests.control.toy_job import ToyPlanning, text_of
from tests.control.toy_planner import first_assignment
from tests.plan.samples import chain, even_lanes


class Counted(ToyPlanning):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(least=3)
        self.asked = 0

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        self.asked += 1
        return super().replan(before, members, held)


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
        def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
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
    planner = Planner(copies=1)
    before = planner.read(plan.to_json())
    held = {box_id: tuple(r for r in box.replica_ranks if r != 2) for box_id, box in numbered(before.assignment.boxes)}
    assert (before.assignment.members, before.assignment.tiles) == (plan.ranks, plan.tiles)
    assert before.assignment.boxes == plan.boxes and before.assignment.plan_hash == plan_hash(plan.to_json())
    after = planner.replan(before, (Rank(0), Rank(1), Rank(3)), held)
    assert after.assignment.members == (0, 1, 3) and planner.read(after.text).assignment == after.assignment
    assert after.lines and not planner.wants_move(before, {b: (*ranks, Rank(2)) for b, ranks in held.items()})
