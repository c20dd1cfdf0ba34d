"""Orders of micro-batches: 1F1B where tiles are equal, and what holds for any tiling."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.order.hops import ValueRoutes
from elaswave_fx.plan.order.schedule import (
    Action,
    LaneKind,
    Work,
    find_schedule,
    first_bounds,
    lane_work,
    makespan_s,
    most_in_flight,
)
from elaswave_fx.plan.predict.lane_times import LaneTimes
from elaswave_fx.plan.work.cost import UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Host, HostLink, Link, Rank, Topology, local_topology
from tests.plan.samples import chain, even_lanes, lane, two_towers, uneven_lanes, world


def kind_of(lane: Lane) -> LaneKind:
    """With ranks of speed 1."""
    return LaneKind.of(lane, local_topology(max(lane.ranks) + 1))


def uniform(a: int, b: int) -> Link:
    """What all links are if nothing is known of them."""
    return Link()


def textbook(stage: int, stages: int, count: int) -> tuple[Action, ...]:
    """1F1B with flush: min(p - s, n) forwards, then backward and forward in turn, then the last backwards."""
    warm_up = min(stages - stage, count)
    order: list[Action] = [("F", i) for i in range(warm_up)]
    for i in range(count):
        order.append(("B", i))
        if warm_up + i < count:
            order.append(("F", warm_up + i))
    return tuple(order)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 12), st.integers(1, 2), st.data())
def test_equal_tiles_give_the_textbook_order_whatever_units_cost(
    pp: int, count: int, dp: int, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.sampled_from((1e-4, 1e-3, 1e-2)), min_size=pp, max_size=pp))
    workload = chain(pp, dp * count * 2, costs=costs)
    plan = make_plan(local_topology(dp * pp), workload, even_lanes(workload, dp, pp, 2), "equal")
    for rank in plan.ranks:
        assert plan.schedule[rank] == textbook(rank % pp, pp, count)
        assert plan.predicted.ranks[rank].in_flight == min(pp - rank % pp, count)


def test_a_remainder_keeps_the_textbook_order() -> None:
    workload = chain(4, 7)
    plan = make_plan(local_topology(4), workload, even_lanes(workload, 1, 4, 2), "7 samples, 2 at once")
    assert [len(m) for m in plan.tile(Rank(0)).micro_batches] == [2, 2, 2, 1]
    assert all(plan.schedule[rank] == textbook(rank, 4, 4) for rank in plan.ranks)


@settings(deadline=None, max_examples=150)
@given(uneven_lanes())
def test_any_lanes_run_to_their_end_within_their_bounds(found: tuple[Workload, tuple[Lane, ...]]) -> None:
    workload, lanes = found
    plan = make_plan(local_topology(world(lanes)), workload, lanes, "random")
    check_plan(plan)
    busiest = max(cost.busy_s for cost in plan.predicted.ranks.values())
    assert plan.predicted.pipeline_s >= busiest * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(uneven_lanes())
def test_bounds_hold(found: tuple[Workload, tuple[Lane, ...]]) -> None:
    workload, lanes = found
    for each in lanes:
        kind = kind_of(each)
        bounds = first_bounds(ValueRoutes(workload), kind)
        schedule = find_schedule(lane_work(ValueRoutes(workload), kind), bounds)
        counts = [count for stage in each.stages for count in stage.deal]
        assert all(1 <= most_in_flight(schedule[p]) <= min(bounds[p], count) for p, count in enumerate(counts))


def test_a_narrow_stage_holds_what_a_wide_one_behind_it_runs() -> None:
    workload, pieces = chain(4, 16), tuple(Span(i, i + 1) for i in range(16))
    widening = lane([((0,), (0, 2)), ((1, 2, 3), (2, 4))], pieces)
    assert first_bounds(ValueRoutes(workload), kind_of(widening)) == {0: 5, 1: 1, 2: 1, 3: 1}
    narrowing = lane([((0, 1, 2), (0, 2)), ((3,), (2, 4))], pieces)
    assert first_bounds(ValueRoutes(workload), kind_of(narrowing)) == {0: 3, 1: 3, 2: 3, 3: 1}


def test_lanes_of_a_kind_are_run_once() -> None:
    workload = chain(4, 16)
    first, second = even_lanes(workload, 2, 2, 2)
    assert kind_of(first) == kind_of(second)
    times = LaneTimes(workload, local_topology(4))
    assert times.of(first, {}) is times.of(second, {})


def test_independent_towers_do_not_wait_for_each_other() -> None:
    workload = two_towers()
    plan = make_plan(local_topology(4), workload, even_lanes(workload, 1, 4, 3), "towers")
    check_plan(plan)
    assert {(h.source, h.target) for h in plan.hops} == {(0, 2), (1, 2), (2, 3)}
    assert plan.schedule[Rank(0)] == plan.schedule[Rank(1)] == textbook(1, 4, 4)


def test_a_circle_of_needs_is_reported() -> None:
    first, second = (0, "F", 0), (1, "F", 0)
    needs = {first: {second: 0}, second: {first: 0}}
    work = Work((first, second), needs, dict.fromkeys((first, second), 1.0))
    with pytest.raises(PlanError, match="F0 of place 0, F0 of place 1 never get what they wait for"):
        find_schedule(work, {0: 1, 1: 1})


def test_orders_that_block_each_other_are_reported() -> None:
    workload = chain(2, 4)
    work = lane_work(ValueRoutes(workload), kind_of(even_lanes(workload, 1, 2, 2)[0]))
    late = {
        0: (("F", 0), ("B", 0), ("F", 1), ("B", 1)),
        1: (("F", 1), ("B", 1), ("F", 0), ("B", 0)),
    }
    with pytest.raises(PlanError, match="B0 of place 0, F1 of place 1 wait for each other"):
        makespan_s(work, late, uniform)


def test_the_makespan_of_equal_tiles_is_the_published_one() -> None:
    """(n + p - 1) micro-batches of forward and backward when stages are equal and links are free."""
    workload = Workload(chain(4).units, chain(4).values, (), PlanOptions(16))
    kind = kind_of(even_lanes(workload, 1, 4, 2)[0])
    work = lane_work(ValueRoutes(workload), kind)
    schedule = find_schedule(work, first_bounds(ValueRoutes(workload), kind))
    one = sum(u.forward_s * 2 + u.backward_s * 2 + 2 * u.fixed_s for u in workload.units[:1])
    assert makespan_s(work, schedule, lambda a, b: Link(bytes_per_s=1e30)) == pytest.approx((8 + 4 - 1) * one, rel=1e-5)


def test_pieces_take_their_time_on_the_link_of_their_hosts() -> None:
    """Two micro-batches forth and back between ranks on two hosts; a link passes one message on after the other."""
    workload = Workload(
        (UnitCost(1.0, 2.0), UnitCost(1.0, 2.0)), (Value("h", 0, (1,), 100, has_grad=True),), (), PlanOptions(2)
    )
    (each,) = even_lanes(workload, 1, 2, 1)
    schedule = {Rank(0): (("F", 0), ("F", 1), ("B", 0), ("B", 1)), Rank(1): (("F", 0), ("B", 0), ("F", 1), ("B", 1))}

    def seconds(topology: Topology) -> float:
        kind = LaneKind.of(each, topology)
        return makespan_s(lane_work(ValueRoutes(workload), kind), schedule, kind.link)

    fast = replace(local_topology(2, 1), between_hosts=Link(bytes_per_s=1e30))
    assert seconds(fast) == pytest.approx(9.0)
    # A piece is under way for a second: F0 at 1, there at 2; then B0, F1, B1 until 8, B1 there at 9, done at 11.
    assert seconds(replace(fast, between_hosts=Link(latency_s=1.0, bytes_per_s=1e30))) == pytest.approx(11.0)
    # The link of these two hosts is known: 4 seconds for a piece. F0 goes from 1 to 5, F1 after it until 9; rank 1 is
    # done with B0 at 8 and with B1 at 12, which is there at 16.
    slow = replace(fast, links=(HostLink((Host(1), Host(0)), Link(bytes_per_s=25.0)),))
    assert seconds(slow) == pytest.approx(18.0)
    # On one host it does not matter.
    assert seconds(replace(local_topology(2, 2), links=slow.links)) == pytest.approx(9.0)
