"""Orders of work with backward passes in halves: how short they are, what they keep, and when they are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.lower.step import step_program
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import fits_memory, plan_uniform
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.order.hops import ValueRoutes
from elaswave_fx.plan.order.schedule import LaneKind, Work, lane_work, levels
from elaswave_fx.plan.order.split_schedule import shortest_s
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking, chain, even_lanes, uneven_lanes, world


def pipeline(
    stages: int, samples: int, schedule: str, share: float = 0.5, costs: Sequence[float] = (), held: int = 40
) -> Workload:
    """A unit per stage; forward takes half of backward, weights `share` of that. 50 bytes are saved of a sample."""
    units = tuple(UnitCost(c, 2 * c, 0.0, 400, 50, held, share) for c in costs or [1e-3] * stages)
    values = tuple(Value(f"h{i}", i, (i + 1,), 1) for i in range(stages - 1))
    return Workload(units, values, (), PlanOptions(samples, schedule=schedule))


def planned(workload: Workload, memory: int | None = None) -> Plan:
    """One pipeline of a stage per unit, one sample per micro-batch."""
    stages = len(workload.units)
    plan = make_plan(local_topology(stages, 1, memory), workload, even_lanes(workload, 1, stages, 1), "")
    check_plan(plan)
    return plan


def text(plan: Plan) -> list[str]:
    return [" ".join(f"{kind}{mb}" for kind, mb in plan.schedule[rank]) for rank in plan.ranks]


def test_the_orders_of_two_stages() -> None:
    assert text(planned(pipeline(2, 3, "split"))) == [
        "F0 F1 I0 W0 F2 I1 W1 I2 W2",
        "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]


@pytest.mark.parametrize(("stages", "samples"), [(2, 2), (2, 4), (3, 6), (4, 8), (8, 16)])
def test_equal_stages_have_no_gap_but_the_first_forward_passes(stages: int, samples: int) -> None:
    """With 1F1B they wait for backward passes too."""
    split, whole = planned(pipeline(stages, samples, "split")), planned(pipeline(stages, samples, "1f1b"))
    assert split.predicted.pipeline_s == pytest.approx(1e-3 * (3 * samples + stages - 1), rel=1e-3)
    assert whole.predicted.pipeline_s == pytest.approx(3e-3 * (samples + stages - 1), rel=1e-3)
    most = max(cost.memory_bytes for cost in whole.predicted.ranks.values())
    assert all(cost.memory_bytes <= most for cost in split.predicted.ranks.values())


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), st.integers(1, 8), st.floats(0.1, 0.7), st.data())
def test_auto_is_never_slower_and_sums_have_their_order(
    stages: int, samples: int, share: float, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.sampled_from((1e-3, 2e-3, 3e-3)), min_size=stages, max_size=stages))
    whole, best = (planned(pipeline(stages, samples, kind, share, costs)) for kind in ("1f1b", "auto"))
    assert best.predicted.pipeline_s <= whole.predicted.pipeline_s
    assert best.reason.startswith(("split backward: ", "1f1b: "))
    for rank in best.ranks:
        sums = [[mb for kind, mb in plan.schedule[rank] if kind in "BW"] for plan in (whole, best)]
        assert sums[0] == sums[1], "micro-batches are added in the same order"
        busy = (plan.predicted.ranks[rank].busy_s for plan in (whole, best))
        assert next(busy) == pytest.approx(next(busy)), "halves take the time of the whole"


@settings(deadline=None, max_examples=100)
@given(uneven_lanes(), st.floats(0.0, 1.0), st.integers(0, 90))
def test_any_lanes_have_orders_that_run_to_their_end(
    found: tuple[Workload, tuple[Lane, ...]], share: float, held: int
) -> None:
    workload, lanes = found
    units = tuple(replace(unit, weights_share=share, held_bytes=held) for unit in workload.units)
    workload = asking(replace(workload, units=units), schedule="split")
    plan = make_plan(local_topology(world(lanes)), workload, lanes, "random")
    check_plan(plan)
    if "1f1b:" not in plan.reason:
        for rank in plan.ranks:
            cost = plan.predicted.ranks[rank]
            kept = list(levels(plan.schedule[rank]))
            assert (cost.in_flight, cost.waiting) == (max(k[0] for k in kept), max(k[1] for k in kept))


def test_memory_bounds_what_waits_for_weight_halves() -> None:
    """Less and less memory: other orders of halves, which take longer; fewer bytes than 1F1B needs are still enough."""
    free = planned(pipeline(4, 12, "auto", share=0.4))
    whole = planned(pipeline(4, 12, "1f1b"))
    needed = max(cost.memory_bytes for cost in whole.predicted.ranks.values())
    seconds, kinds = [], []
    for memory in range(max(cost.memory_bytes for cost in free.predicted.ranks.values()), 500, -10):
        plan = planned_or_none(pipeline(4, 12, "auto", share=0.4), memory)
        if plan is None:
            break
        assert fits_memory(plan)
        assert memory < needed or plan.predicted.pipeline_s <= whole.predicted.pipeline_s
        seconds.append(plan.predicted.pipeline_s)
        kinds.append(plan.reason.split(":")[0])
    assert seconds[0] == free.predicted.pipeline_s
    assert len(set(seconds)) > 2 and kinds[0] == "split backward"
    assert memory < needed


def planned_or_none(workload: Workload, memory: int) -> Plan | None:
    try:
        return planned(workload, memory)
    except PlanError:
        return None


def test_what_needs_more_between_the_halves_than_before_them_is_left_whole() -> None:
    whole = planned(pipeline(2, 4, "1f1b"))
    memory = max(cost.memory_bytes for cost in whole.predicted.ranks.values())
    plan = planned(pipeline(2, 4, "auto", held=500), memory)
    assert plan.schedule == whole.schedule
    assert plan.reason == "1f1b: the split backward does not fit in memory"


def test_one_stage_has_nothing_to_wait_for() -> None:
    plan = planned(pipeline(1, 4, "auto"))
    assert text(plan) == ["F0 B0 F1 B1 F2 B2 F3 B3"]
    assert plan.reason == "1f1b: 12 ms, which the split backward does not shorten"


@pytest.mark.parametrize(
    ("schedule", "kinds", "alone"), [("1f1b", "FB", "FB"), ("split", "FIW", "FIW"), ("auto", "FIW", "FB")]
)
def test_later_plans_keep_to_the_schedule(schedule: str, kinds: str, alone: str) -> None:
    """After the loss every rank has a lane of its own: nothing is waited for."""
    plan = plan_uniform(pipeline(4, 16, schedule), local_topology(8), 2, 4)
    left = tuple(rank for rank in plan.ranks if rank != 3)
    have = {
        number: tuple(r for r in box.replica_ranks if r in left) or left[:1] for number, box in enumerate(plan.boxes)
    }
    after = replan(plan, left, have, 1)
    for each, found in ((plan, kinds), (after, alone)):
        assert {kind for order in each.schedule.values() for kind, _ in order} == set(found)
        assert ("split backward:" in each.reason or "split backward (" in each.reason) == (found == "FIW")
        assert each.workload.options.schedule == schedule
    check_plan(after)


def test_gradients_leave_after_the_first_half_and_buckets_after_the_last_second_one() -> None:
    workload = asking(chain(4, 6), schedule="split")
    units = tuple(replace(unit, weights_share=0.5, held_bytes=30) for unit in workload.units)
    plan = make_plan(local_topology(2), replace(workload, units=units), even_lanes(workload, 1, 2, 2), "split")
    check_plan(plan)
    for rank in plan.ranks:
        found = step_program(plan, rank).instructions
        last = max(at for at, each in enumerate(found) if each[0] == "BACKWARD_WEIGHTS")
        assert not any(each[0] == "BACKWARD" for each in found)
        assert sum(each[0] == "REDUCE" for each in found[:last]) > 0, "the first buckets go under the last weight half"
    sends = [at for at, each in enumerate(step_program(plan, Rank(1)).instructions) if each[0] == "SEND"]
    halves = [at for at, each in enumerate(step_program(plan, Rank(1)).instructions) if each[0] == "BACKWARD_WEIGHTS"]
    assert sends[-1] < halves[-1]


# --- Against an optimum

CASES = [
    (2, 3, 0.5, ()), (2, 4, 0.3, ()), (3, 4, 0.4, ()), (3, 3, 0.5, (1e-3, 2e-3, 1e-3)),
    (2, 4, 0.45, (3e-3, 2e-3)), (3, 4, 0.35, (2e-3, 1e-3, 2e-3)), (4, 4, 0.5, ()),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "samples", "share", "costs"), CASES)
def test_orders_are_nearly_as_short_as_can_be(
    stages: int, samples: int, share: float, costs: tuple[float, ...]
) -> None:
    pytest.importorskip("ortools", reason="CP-SAT finds the optimum")
    workload = pipeline(stages, samples, "split", share, costs)
    plan = planned(workload)
    (lane,) = even_lanes(workload, 1, stages, 1)
    work = lane_work(ValueRoutes(workload), LaneKind.of(lane, local_topology(stages)), split=True)
    best_s = optimum_s(work)
    assert best_s >= shortest_s(work) * (1 - 1e-6)
    assert plan.predicted.pipeline_s <= 1.03 * best_s


LOSSES = [(2, 0.5, 0), (2, 0.35, 1), (3, 0.5, 1), (3, 0.35, 0), (3, 0.3, 2), (4, 0.5, 0), (4, 0.35, 0), (4, 0.3, 2)]
"""Lanes and their stages, the share of weights in backward, the rank that is lost."""


@pytest.mark.parametrize(("size", "share", "lost"), LOSSES)
def test_recycle_after_a_loss_is_nearly_as_short_as_can_be(size: int, share: float, lost: int) -> None:
    """Of all orders of work in which ranks run the micro-batches that they were dealt, on 2 x 2, 3 x 3 and 4 x 4."""
    pytest.importorskip("ortools", reason="CP-SAT finds the optimum")
    workload = asking(pipeline(size, size * size, "auto", share), policy="recycle", micro_batch=1)
    before = plan_uniform(workload, local_topology(size**2, 1), size, size)
    left = tuple(rank for rank in before.ranks if rank != lost)
    after = replan(before, left, dict.fromkeys(range(len(before.boxes)), left), 1)
    check_plan(after)
    assert "stages keep their units" in after.reason
    kinds = {LaneKind.of(lane, after.topology) for lane in after.lanes}
    best_s = max(optimum_s(lane_work(after.routes, kind, split=True)) for kind in kinds)
    assert after.predicted.pipeline_s <= 1.03 * best_s + 1e-8, "values take a third of a nanosecond each"


def optimum_s(work: Work) -> float:
    """The shortest step of any order, where links take no time and memory has no bound."""
    from ortools.sat.python import cp_model

    tick_s = 1e-6
    model = cp_model.CpModel()
    sizes = {task: round(work.seconds[task] / tick_s) for task in work.tasks}
    horizon = sum(sizes.values())
    starts = {task: model.new_int_var(0, horizon, str(task)) for task in work.tasks}
    end = model.new_int_var(0, horizon, "end")
    for task in work.tasks:
        model.add(end >= starts[task] + sizes[task])
        for before in work.needs[task]:
            model.add(starts[task] >= starts[before] + sizes[before])
    for _, group in itertools.groupby(sorted(work.tasks), key=lambda task: task[0]):
        spans = [model.new_fixed_size_interval_var(starts[task], sizes[task], str(task)) for task in group]
        model.add_no_overlap(spans)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 60.0
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value * tick_s
