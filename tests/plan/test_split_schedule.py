"""Orders of work with backward passes in halves: how short they are, what they keep, and when they are chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check import check_plan
from elaswave_fx.plan.cost import UnitCost, Value, Workload
from elaswave_fx.plan.derive import make_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import Parallel, fits_memory, plan_uniform
from elaswave_fx.plan.replan import replan
from elaswave_fx.plan.schedule import levels
from elaswave_fx.plan.step import step_program
from elaswave_fx.plan.tiling import Tiling
from elaswave_fx.plan.topology import Rank, local_topology
from tests.plan.samples import chain, even_columns, uneven_tilings


def pipeline(
    stages: int, samples: int, schedule: str, share: float = 0.5, costs: Sequence[float] = (), held: int = 40
) -> Workload:
    """A unit per stage; forward takes half of backward, weights `share` of that. 50 bytes are saved of a sample."""
    units = tuple(UnitCost(c, 2 * c, 0.0, 400, 50, held, share) for c in costs or [1e-3] * stages)
    values = tuple(Value(f"h{i}", i, (i + 1,), 1) for i in range(stages - 1))
    return Workload(units, values, (), samples, schedule=schedule)


def planned(workload: Workload, memory: int | None = None) -> Plan:
    """One pipeline of a stage per unit, one sample per micro-batch."""
    stages = len(workload.units)
    plan = make_plan(local_topology(stages, 1, memory), workload, even_columns(workload, 1, stages, 1), "")
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
@given(uneven_tilings(), st.floats(0.0, 1.0), st.integers(0, 90))
def test_any_tiling_has_orders_that_run_to_their_end(tiling: tuple[Workload, Tiling], share: float, held: int) -> None:
    workload, tiles = tiling
    units = tuple(replace(unit, weights_share=share, held_bytes=held) for unit in workload.units)
    workload = replace(workload, units=units, schedule="split")
    plan = make_plan(local_topology(len(tiles)), workload, tiles, "random")
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


@pytest.mark.parametrize(("schedule", "kinds"), [("1f1b", "FB"), ("split", "FIW"), ("auto", "FIW")])
def test_later_plans_keep_to_the_schedule(schedule: str, kinds: str) -> None:
    workload = pipeline(4, 16, "1f1b")
    plan = plan_uniform(workload, local_topology(8), Parallel(2, 4, schedule=schedule))
    left = tuple(rank for rank in plan.ranks if rank != 3)
    have = {
        number: tuple(r for r in box.replica_ranks if r in left) or left[:1] for number, box in enumerate(plan.boxes)
    }
    after = replan(plan, left, have, 1)
    for each in (plan, after):
        assert {kind for order in each.schedule.values() for kind, _ in order} == set(kinds)
        assert ("split backward" in each.reason) == (kinds == "FIW")
        assert each.workload.schedule == schedule
    check_plan(after)


def test_gradients_leave_after_the_first_half_and_buckets_after_the_last_second_one() -> None:
    workload = replace(chain(4, 6), schedule="split")
    units = tuple(replace(unit, weights_share=0.5, held_bytes=30) for unit in workload.units)
    plan = make_plan(local_topology(2), replace(workload, units=units), even_columns(workload, 1, 2, 2), "split")
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
    (2, 4, 0.45, (3e-3, 2e-3)), (3, 4, 0.35, (2e-3, 1e-3, 2e-3)), (4, 4, 0.5, ()), (3, 5, 0.6, (1e-3, 2e-3, 2e-3)),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "samples", "share", "costs"), CASES)
def test_no_order_is_shorter_by_three_hundredths(
    stages: int, samples: int, share: float, costs: tuple[float, ...]
) -> None:
    workload = pipeline(stages, samples, "split", share, costs)
    found_s = planned(workload).predicted.pipeline_s
    steps = [
        {"F": u.forward_s, "I": u.backward_s * (1 - u.weights_share), "W": u.backward_s * u.weights_share}
        for u in workload.units
    ]
    assert reachable(steps, samples, found_s * (1 + 1e-6)), "the search finds what the planner found"
    assert not reachable(steps, samples, found_s / 1.03)


Label = tuple[float, ...]
"""When each stage is free, then when each forward result, then each gradient that was made and not read was made."""


def reachable(steps: Sequence[Mapping[str, float]], samples: int, limit_s: float) -> bool:
    """Whether some order of a pipeline takes no longer, if links take no time and memory has no bound.

    All orders are followed at once, action by action. Of those with the same actions done, one that is nowhere earlier
    than another is dropped, and each that cannot end in time.
    """
    start = tuple((0, 0, 0) for _ in steps)
    layer: dict[tuple[tuple[int, int, int], ...], list[Label]] = {start: [(0.0,) * len(steps)]}
    for _ in range(3 * samples * len(steps)):
        following: dict[tuple[tuple[int, int, int], ...], list[Label]] = {}
        for done, labels in layer.items():
            for stage, kind in itertools.product(range(len(steps)), "FIW"):
                for label in labels:
                    after = act(steps, samples, done, label, stage, kind)
                    if after is not None and in_time(steps, samples, *after, limit_s):
                        keep(following.setdefault(after[0], []), after[1])
        layer = following
    return bool(layer)


def act(
    steps: Sequence[Mapping[str, float]],
    samples: int,
    done: tuple[tuple[int, int, int], ...],
    label: Label,
    stage: int,
    kind: str,
) -> tuple[tuple[tuple[int, int, int], ...], Label] | None:
    """One more action of a stage, None if it cannot come next. Micro-batches are alike, so they go in order."""
    count, last = len(steps), len(steps) - 1
    f, i, w = done[stage]
    free = list(label[:count])
    forward, position = [], count
    for each in range(last):
        size = done[each][0] - done[each + 1][0]
        forward.append(list(label[position : position + size]))
        position += size
    gradients = []
    for each in range(last):
        size = done[each + 1][1] - done[each][1]
        gradients.append(list(label[position : position + size]))
        position += size
    begin = free[stage]
    if kind == "F":
        if f == samples or (stage > 0 and not forward[stage - 1]):
            return None
        begin = max(begin, forward[stage - 1].pop(0)) if stage > 0 else begin
    elif kind == "I":
        if i == f or (stage < last and not gradients[stage]):
            return None
        begin = max(begin, gradients[stage].pop(0)) if stage < last else begin
    elif w == i:
        return None
    free[stage] = end = begin + steps[stage][kind]
    if kind == "F" and stage < last:
        forward[stage].append(end)
    if kind == "I" and stage > 0:
        gradients[stage - 1].append(end)
    counts = {"F": (f + 1, i, w), "I": (f, i + 1, w), "W": (f, i, w + 1)}[kind]
    made = [time for times in (*forward, *gradients) for time in times]
    return (*done[:stage], counts, *done[stage + 1 :]), (*free, *made)


def in_time(
    steps: Sequence[Mapping[str, float]],
    samples: int,
    done: tuple[tuple[int, int, int], ...],
    label: Label,
    limit_s: float,
) -> bool:
    """Whether each stage could still do its own work by then, and pass back what it has to."""
    for stage, (f, i, w) in enumerate(done):
        left = {"F": samples - f, "I": samples - i, "W": samples - w}
        if label[stage] + sum(count * steps[stage][kind] for kind, count in left.items()) > limit_s:
            return False
        inputs_s = left["F"] * steps[stage]["F"] + left["I"] * steps[stage]["I"]
        back_s = sum(each["I"] for each in steps[:stage]) + steps[0]["W"]
        if left["I"] and label[stage] + inputs_s + back_s > limit_s:
            return False
    return True


def keep(labels: list[Label], new: Label) -> None:
    """Add a label unless one is there that is nowhere later; drop those that are nowhere earlier."""
    if any(all(a <= b for a, b in zip(old, new, strict=True)) for old in labels):
        return
    labels[:] = [old for old in labels if not all(a <= b for a, b in zip(new, old, strict=True))]
    labels.append(new)
