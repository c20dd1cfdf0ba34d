"""Plans that were made ahead are the plans that would be made, and are used for exactly the loss they are for."""

from __future__ import annotations

from elaswave_fx.control.coordinator.plan_cache import Held, PlanCache, Planned, Planner
from elaswave_fx.control.protocol.types import BoxId
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
