"""Clocks: what brute force finds on small cases, never a longer step, and plans that carry them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.passes.assign_frequency import AssignFrequency
from elaswave_fx.plan.check.check_plan import check_plan, plan_violations
from elaswave_fx.plan.describe import describe
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.next.replan import replan, terminal_plan
from elaswave_fx.plan.order.schedule import Schedule, Work, makespan_s
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import Clocks, choose_clocks, clock_words, with_clocks
from elaswave_fx.plan.predict.lane_times import LaneTimes, plan_work
from elaswave_fx.plan.work.cost import ROUNDING
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Link, Rank, Topology, local_topology
from tests.plan.samples import chain, even_lanes

LOW, NOMINAL, HIGH = OperatingPoint(900, 0.6, 120), OperatingPoint(1500, 1.0, 300), OperatingPoint(1800, 1.2, 480)
POWER = Power((LOW, NOMINAL, HIGH), idle_w=60)


def with_power(topology: Topology, power: Power = POWER) -> Topology:
    return replace(topology, power=power)


def step_of(lanes: Sequence[Lane], costs: list[float], topology: Topology) -> tuple[Work, Schedule]:
    samples = max(lane.micro_batches[-1].hi for lane in lanes)
    workload = chain(len(costs), samples, costs=costs)
    times = LaneTimes(workload, topology)
    schedule = {r: order for lane in lanes for r, order in zip(lane.ranks, times.of(lane, {}).orders, strict=True)}
    return plan_work(workload, topology, lanes, schedule), schedule


def seconds_at(work: Work, schedule: Schedule, topology: Topology, points: dict[Rank, OperatingPoint]) -> float:
    power = topology.power
    assert power is not None
    seconds = {task: taken * power.slowdown(points[task[0]]) for task, taken in work.seconds.items()}
    return makespan_s(replace(work, seconds=seconds), schedule, topology.link)


def joules_at(work: Work, power: Power, points: dict[Rank, OperatingPoint], step_s: float) -> float:
    total = 0.0
    for rank, point in points.items():
        busy_s = sum(taken for task, taken in work.seconds.items() if task[0] == rank) * power.slowdown(point)
        total += busy_s * point.watts + (step_s - busy_s) * power.idle_w
    return total


def brute_force(work: Work, schedule: Schedule, topology: Topology) -> tuple[float, float]:
    """The shortest step that the cap admits, and the least energy of a step that is no longer."""
    power = topology.power
    assert power is not None
    found = []
    for choice in itertools.product(power.points, repeat=len(schedule)):
        if power.cap_w is None or sum(point.watts for point in choice) <= power.cap_w:
            points = dict(zip(schedule, choice, strict=True))
            seconds = seconds_at(work, schedule, topology, points)
            found.append((seconds, joules_at(work, power, points, seconds)))
    least_s = min(seconds for seconds, _ in found)
    return least_s, min(joules for seconds, joules in found if seconds <= least_s * (1 + 2 * ROUNDING))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Work, Schedule, Topology]:
    dp, pp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 4)]))
    costs = draw(st.lists(st.sampled_from([0.01, 0.02, 0.03, 0.05]), min_size=pp, max_size=pp))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=dp * pp, max_size=dp * pp))
    points = draw(st.sampled_from([(NOMINAL,), (LOW, NOMINAL), (LOW, NOMINAL, HIGH), (NOMINAL, HIGH)]))
    least_w = dp * pp * min(point.watts for point in points)
    cap_w = draw(st.one_of(st.none(), st.floats(1.0, 3.0).map(lambda times: times * least_w)))
    power = Power(points, cap_w, draw(st.sampled_from([0.0, 60.0])), draw(st.sampled_from([0.0, 0.5, 1.0])))
    topology = replace(with_power(local_topology(dp * pp, 1, speeds=speeds), power), between_hosts=Link(1e-3, 1e5))
    workload = chain(pp, 4 * dp, costs=costs)
    work, schedule = step_of(even_lanes(workload, dp, pp, 2), costs, topology)
    return work, schedule, topology


@settings(deadline=None, max_examples=150)
@given(cases())
def test_clocks_equal_brute_force(case: tuple[Work, Schedule, Topology]) -> None:
    work, schedule, topology = case
    power = topology.power
    assert power is not None
    found = choose_clocks(work, schedule, topology)
    points = dict(found.points)
    assert set(points) == set(schedule)
    assert power.cap_w is None or sum(point.watts for point in points.values()) <= power.cap_w * (1 + 2 * ROUNDING)
    assert found.seconds == pytest.approx(seconds_at(work, schedule, topology, points), rel=1e-12)
    assert found.energy_j == pytest.approx(joules_at(work, power, points, found.seconds), rel=1e-9)
    least_s, least_j = brute_force(work, schedule, topology)
    assert found.seconds == pytest.approx(least_s, rel=3 * ROUNDING)
    assert found.energy_j == pytest.approx(least_j, rel=1e-6)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_without_time_to_search_no_step_is_longer(case: tuple[Work, Schedule, Topology]) -> None:
    """The greedy choice alone: no longer than with all clocks nominal, where the cap admits that."""
    work, schedule, topology = case
    power = topology.power
    assert power is not None
    found = choose_clocks(work, schedule, topology, tasks_most=0)
    nominal = dict.fromkeys(schedule, power.nominal)
    if power.cap_w is None or power.nominal.watts * len(schedule) <= power.cap_w:
        assert found.seconds <= seconds_at(work, schedule, topology, nominal) * (1 + 2 * ROUNDING)
    if power.cap_w is not None:
        assert sum(point.watts for point in found.points.values()) <= power.cap_w * (1 + 2 * ROUNDING)


def clocks_of(costs: list[float], power: Power, dp: int = 1, speeds: list[float] | None = None) -> Clocks:
    pp = len(costs)
    topology = with_power(local_topology(dp * pp, speeds=speeds), power)
    work, schedule = step_of(even_lanes(chain(pp, 8 * dp, costs=costs), dp, pp, 1), costs, topology)
    return choose_clocks(work, schedule, topology)


def test_the_bottleneck_is_raised_and_who_waits_is_lowered() -> None:
    """The faster column would wait for the slower one."""
    found = clocks_of([0.02, 0.02], POWER, dp=2, speeds=[1.0, 1.0, 0.4, 0.4])
    assert found.points == {0: LOW, 1: LOW, 2: HIGH, 3: HIGH}


def test_filling_a_pipeline_is_part_of_the_step() -> None:
    """No stage of a single pipeline may be lowered: the first forward and the last backward wait for it."""
    assert set(clocks_of([0.01, 0.03, 0.01], POWER).points.values()) == {HIGH}


def test_a_cap_leaves_the_watts_to_the_bottleneck() -> None:
    """All nominal would draw 900 W; with the others low, the bottleneck may be high."""
    found = clocks_of([0.01, 0.03, 0.01], replace(POWER, cap_w=900.0))
    assert found.points in ({0: LOW, 1: HIGH, 2: NOMINAL}, {0: NOMINAL, 1: HIGH, 2: LOW})
    found = clocks_of([0.01, 0.03, 0.01], replace(POWER, cap_w=720.0))
    assert found.points == {0: LOW, 1: HIGH, 2: LOW}


def test_units_that_do_not_follow_the_clock_are_run_at_the_lowest() -> None:
    found = clocks_of([0.02, 0.02], replace(POWER, clocked=0.0))
    assert set(found.points.values()) == {LOW}
    assert replace(POWER, clocked=0.5).slowdown(LOW) == pytest.approx(0.5 / 0.6 + 0.5)


def test_many_ranks_are_chosen_for_within_bounds() -> None:
    """64 columns of two kinds are two searches; 32 stages in a row are a greedy one."""
    found = clocks_of([0.01, 0.03], POWER, dp=64, speeds=[1.0] * 64 + [0.4] * 64)
    assert [found.points[Rank(rank)] for rank in range(128)] == [LOW] * 64 + [HIGH] * 64
    assert set(clocks_of([0.01] * 31 + [0.03], POWER).points.values()) == {HIGH}
    capped = clocks_of([0.01] * 31 + [0.03], replace(POWER, cap_w=32 * 300.0))
    nominal = clocks_of([0.01] * 31 + [0.03], replace(POWER, points=(NOMINAL,)))
    assert capped.seconds < nominal.seconds


def test_a_cap_raises_all_stages_with_many_units_at_once() -> None:
    """One of two that are nearly as slow is no shorter a step, so that moving single ranks would end at once."""
    points = (
        OperatingPoint(1050, 0.7, 162),
        OperatingPoint(1200, 0.8, 198),
        NOMINAL,
        OperatingPoint(1650, 1.1, 370),
        OperatingPoint(1800, 1.2, 453),
    )
    costs = [0.03, 0.02, 0.019, 0.029]
    nominal = clocks_of(costs, Power((NOMINAL,)), dp=8)
    found = clocks_of(costs, Power(points, cap_w=32 * 300.0), dp=8)
    assert found.seconds < 0.98 * nominal.seconds
    for stage in range(4):
        assert len({found.points[Rank(rank)] for rank in range(stage, 32, 4)}) == 1, "lanes are alike"


def test_a_cap_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(PlanError, match="clocks: 2 ranks draw at least 240 W, and all may draw 239 W together"):
        clocks_of([0.01, 0.01], replace(POWER, cap_w=239.0))


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        ((), {}, "one point has speed 1"),
        ((LOW,), {}, "one point has speed 1"),
        ((NOMINAL, LOW), {}, "clocks and speeds rise"),
        ((NOMINAL, NOMINAL), {}, "clocks and speeds rise"),
        ((OperatingPoint(1, 1.0, 0.0),), {}, "above 0"),
        ((OperatingPoint(1, -1.0, 1.0), NOMINAL), {}, "above 0"),
        ((NOMINAL,), {"clocked": 1.1}, "clocked 1.1 is a part of 1"),
        ((NOMINAL,), {"clocked": math.nan}, "clocked nan is a part of 1"),
        ((NOMINAL,), {"idle_w": -1.0}, "idle_w -1.0 at least 0"),
    ],
)
def test_operating_points_make_sense(
    points: tuple[OperatingPoint, ...], options: dict[str, float], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Power(points, **options)


# --- In plans


def plan_of(power: Power | None) -> Plan:
    """Two columns of two stages, of which the second takes 2.5 times as long."""
    workload = chain(4, 16, costs=[0.01, 0.01, 0.02, 0.02])
    topology = local_topology(4, speeds=(1.0, 1.0, 0.4, 0.4))
    plan = make_plan(topology, workload, even_lanes(workload, 2, 2, 2), "columns")
    return plan if power is None else with_clocks(replace(plan, topology=replace(topology, power=power)))


def test_a_plan_has_a_clock_for_every_rank() -> None:
    plan, plain = plan_of(POWER), plan_of(None)
    check_plan(plan)
    assert plan.clocks == {0: LOW, 1: LOW, 2: HIGH, 3: HIGH}
    assert plan.predicted.pipeline_s < plain.predicted.pipeline_s
    assert plan.predicted.ranks[Rank(1)].busy_s == pytest.approx(plain.predicted.ranks[Rank(1)].busy_s / 0.6)
    assert plan.slowdown(Rank(0)) == pytest.approx(1 / 0.6)
    assert (plain.clocks, plain.slowdown(Rank(0)), plain.energy_j(1.0)) == ({}, 1.0, None)
    assert plan.energy_j(plan.predicted.pipeline_s) == pytest.approx(plan.predicted.energy_j)
    assert Plan.from_json(plan.to_json()) == plan
    words = "clocks: 900 MHz on ranks 0-1, 1800 MHz on ranks 2-3; they draw 1200 W at most"
    assert words in describe(plan)
    assert clock_words(plain) == ()


def test_the_pass_gives_a_plan_its_clocks() -> None:
    plain = plan_of(None)
    found = AssignFrequency(POWER.points, idle_w=60.0).apply(plain)
    assert found.predicted.step_s < plan_of(POWER).predicted.step_s, "a unit goes to the stage that has one of four"
    assert found.reason.startswith("columns; with clocks, units are cut at 3: a step of ")
    assert "; clocks: " in found.reason
    with pytest.raises(ConfigError, match="power: clocks: 4 ranks draw at least 480 W, and all may draw 100 W"):
        AssignFrequency(POWER.points, cap_w=100.0).apply(plain)
    with pytest.raises(ConfigError, match="power: power: one point has speed 1"):
        AssignFrequency(()).apply(plain)


def test_the_checker_knows_clocks() -> None:
    plan = plan_of(POWER)

    def violations(**changed: object) -> str:
        return "; ".join(plan_violations(replace(plan, **changed)))  # type: ignore[arg-type]

    odd = OperatingPoint(1, 0.1, 1)
    assert "rank 2 has the clock" in violations(clocks={**plan.clocks, Rank(2): odd})
    assert "rank 9 has a clock and no tile" in violations(clocks={**plan.clocks, Rank(9): LOW})
    capped = replace(plan.topology, power=replace(POWER, cap_w=1000.0))
    assert "draw 1200 W, and may draw 1000 W" in violations(topology=capped)
    assert "no device has operating points" in violations(topology=replace(plan.topology, power=None))


def test_the_next_plan_has_clocks_of_its_own() -> None:
    before = plan_of(replace(POWER, cap_w=1300.0))
    replicas = {number: (box.owner, *box.holders) for number, box in enumerate(before.boxes)}
    left = {number: tuple(r for r in ranks if r != 1) for number, ranks in replicas.items()}
    after = replan(before, (Rank(0), Rank(2), Rank(3)), left, 1)  # type: ignore[arg-type]
    check_plan(after)
    assert set(after.clocks) == {0, 2, 3}
    assert "clocks: " in after.reason
    everywhere = dict.fromkeys(replicas, (Rank(0),))
    assert terminal_plan(before, (Rank(0),), everywhere, "the end").clocks == {}  # type: ignore[arg-type]
