"""Orders of micro-batches: 1F1B where tiles are equal, and what holds for any tiling."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check import check_plan
from elaswave_fx.plan.cost import UnitCost, Value, Workload
from elaswave_fx.plan.derive import find_hops, make_plan
from elaswave_fx.plan.plan import Action
from elaswave_fx.plan.schedule import Work, find_schedule, first_bounds, makespan_s, most_in_flight, step_work
from elaswave_fx.plan.tiling import Tiling
from elaswave_fx.plan.topology import Host, HostLink, Link, Rank, Topology, local_topology
from tests.plan.samples import chain, even_columns, two_towers, uneven_rows, uneven_tilings


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
    plan = make_plan(local_topology(dp * pp), workload, even_columns(workload, dp, pp, 2), "equal")
    for rank in plan.ranks:
        assert plan.schedule[rank] == textbook(rank % pp, pp, count)
        assert plan.predicted.ranks[rank].in_flight == min(pp - rank % pp, count)


def test_a_remainder_keeps_the_textbook_order() -> None:
    workload = chain(4, 7)
    plan = make_plan(local_topology(4), workload, even_columns(workload, 1, 4, 2), "7 samples, 2 at once")
    assert [len(m) for m in plan.tile(Rank(0)).micro_batches] == [2, 2, 2, 1]
    assert all(plan.schedule[rank] == textbook(rank, 4, 4) for rank in plan.ranks)


@settings(deadline=None, max_examples=150)
@given(uneven_tilings())
def test_any_tiling_runs_to_its_end_within_its_bounds(tiling: tuple[Workload, Tiling]) -> None:
    workload, tiles = tiling
    topology = local_topology(len(tiles))
    plan = make_plan(topology, workload, tiles, "random")
    check_plan(plan)
    busiest = max(cost.busy_s for cost in plan.predicted.ranks.values())
    assert plan.predicted.pipeline_s >= busiest * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(uneven_tilings(), st.integers(0, 2))
def test_bounds_hold_and_widen_only_when_nothing_else_helps(tiling: tuple[Workload, Tiling], extra: int) -> None:
    workload, tiles = tiling
    hops = find_hops(workload, tiles)
    work = step_work(workload, local_topology(len(tiles)), tiles, hops)
    bounds = first_bounds(tiles, hops, extra)
    schedule = find_schedule(work, bounds)
    for tile in tiles:
        assert 1 <= most_in_flight(schedule[tile.rank]) <= len(tile.micro_batches)
    if work.lined_up:
        assert all(most_in_flight(schedule[t.rank]) <= bounds[t.rank] for t in tiles)


def test_small_pieces_of_a_large_consumer_widen_the_bound() -> None:
    workload = chain(4, 16)
    wide = uneven_rows(workload, 8)
    tiles = tuple(
        t if t.rank > 2 else uneven_rows(workload, 1)[t.rank] for t in wide
    )  # stages of one sample feed stages of eight
    hops = find_hops(workload, tiles)
    assert first_bounds(tiles, hops)[Rank(0)] == 6  # all there are; eight plus one would be needed
    check_plan(make_plan(local_topology(5), workload, tiles, "small feeds large"))


def test_bounds_that_cannot_work_are_widened() -> None:
    workload = chain(2, 8)
    equal = even_columns(workload, 1, 2, 2)
    tiles = (equal[0], even_columns(workload, 1, 2, 8)[1])
    hops = find_hops(workload, tiles)
    work = step_work(workload, local_topology(2), tiles, hops)
    schedule = find_schedule(work, {Rank(0): 1, Rank(1): 1})
    assert schedule[Rank(0)] == tuple([("F", i) for i in range(4)] + [("B", i) for i in range(4)])


def test_independent_towers_do_not_wait_for_each_other() -> None:
    workload = two_towers()
    plan = make_plan(local_topology(4), workload, even_columns(workload, 1, 4, 3), "towers")
    check_plan(plan)
    assert {(h.source, h.target) for h in plan.hops} == {(0, 2), (1, 2), (2, 3)}
    assert plan.schedule[Rank(0)] == plan.schedule[Rank(1)] == textbook(1, 4, 4)


def test_a_circle_of_needs_is_reported() -> None:
    first, second = (Rank(0), "F", 0), (Rank(1), "F", 0)
    work = Work(
        (first, second), {first: {second: 0}, second: {first: 0}}, dict.fromkeys((first, second), 1.0),
        dict.fromkeys((first, second), 1.0), True,
    )  # fmt: skip
    with pytest.raises(PlanError, match="F0 of rank 0, F0 of rank 1 never get what they wait for"):
        find_schedule(work, {Rank(0): 1, Rank(1): 1})


def test_orders_that_block_each_other_are_reported() -> None:
    workload = chain(2, 4)
    tiles = even_columns(workload, 1, 2, 2)
    hops = find_hops(workload, tiles)
    work = step_work(workload, local_topology(2), tiles, hops)
    late = {
        Rank(0): (("F", 0), ("B", 0), ("F", 1), ("B", 1)),
        Rank(1): (("F", 1), ("B", 1), ("F", 0), ("B", 0)),
    }
    with pytest.raises(PlanError, match="B0 of rank 0, F1 of rank 1 wait for each other"):
        makespan_s(work, late, local_topology(2))


def test_the_makespan_of_equal_tiles_is_the_published_one() -> None:
    """(n + p - 1) micro-batches of forward and backward when stages are equal and links are free."""
    workload = Workload(chain(4).units, chain(4).values, (), 16)
    tiles = even_columns(workload, 1, 4, 2)
    work = step_work(workload, local_topology(4), tiles, find_hops(workload, tiles))
    schedule = find_schedule(work, first_bounds(tiles, find_hops(workload, tiles)))
    one = sum(u.forward_s * 2 + u.backward_s * 2 + 2 * u.fixed_s for u in workload.units[:1])
    free = replace(local_topology(4, 1), between_hosts=Link(bytes_per_s=1e30))
    assert makespan_s(work, schedule, free) == pytest.approx((8 + 4 - 1) * one, rel=1e-5)


def test_pieces_take_their_time_on_the_link_of_their_hosts() -> None:
    """Two micro-batches forth and back between ranks on two hosts; a link passes one message on after the other."""
    workload = Workload((UnitCost(1.0, 2.0), UnitCost(1.0, 2.0)), (Value("h", 0, (1,), 100, has_grad=True),), (), 2)
    tiles = even_columns(workload, 1, 2, 1)
    work = step_work(workload, local_topology(2, 1), tiles, find_hops(workload, tiles))
    schedule = {Rank(0): (("F", 0), ("F", 1), ("B", 0), ("B", 1)), Rank(1): (("F", 0), ("B", 0), ("F", 1), ("B", 1))}

    def seconds(topology: Topology) -> float:
        return makespan_s(work, schedule, topology)

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
