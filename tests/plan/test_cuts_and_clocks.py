"""A unit is moved where that makes a shorter step than a higher clock, and the other way round."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.lanes.balance import near_cuts
from elaswave_fx.plan.make.cuts_and_clocks import with_cuts_and_clocks
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import fits_memory, most_memory, plan_uniform
from elaswave_fx.plan.next.replan import Replicas, replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import clock_words, with_clocks
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.cost import UnitCost, Workload
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import Lane, Stage
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.brute_force import all_borders
from tests.plan.samples import asking, chain

POINTS = (OperatingPoint(1200, 0.8, 180), OperatingPoint(1500, 1.0, 300), OperatingPoint(1800, 1.2, 480))


def pipeline(units: int, pp: int, samples: int, speeds: tuple[float, ...] | None = None) -> Plan:
    topology = local_topology(pp, speeds=speeds)
    return plan_uniform(asking(chain(units, samples), micro_batch=1), topology, 1, pp)


def clocked(plan: Plan, power: Power) -> Plan:
    return with_clocks(replace(plan, topology=replace(plan.topology, power=power)))


def shortest_s(plan: Plan, power: Power) -> float:
    """Of every cut of a plan's only lane, each with its best clocks."""
    (lane,), found = plan.lanes, []
    for borders in all_borders(len(plan.workload.units), len(lane.stages)):
        stages = tuple(
            Stage(replace(stage.units, lo=lo, hi=hi), stage.ranks, stage.deal)
            for stage, lo, hi in zip(lane.stages, borders, borders[1:], strict=False)
        )
        other = make_plan(plan.topology, plan.workload, (Lane(stages, lane.micro_batches),), "", 1)
        found.append(clocked(other, power).predicted.step_s)
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_the_step_is_that_of_the_best_cut_with_the_best_clocks(seed: int) -> None:
    rng = random.Random(seed)
    pp = rng.choice((2, 3))
    speeds = tuple(rng.choice((1.0, 1.0, 0.7)) for _ in range(pp))
    plan = pipeline(rng.randint(pp, 7), pp, rng.choice((4, 8)), speeds)
    power = Power(POINTS, rng.choice((None, 300.0 * pp, 240.0 * pp)), 60.0)
    found = with_cuts_and_clocks(plan, power)
    check_plan(found)
    assert found.predicted.step_s <= clocked(plan, power).predicted.step_s * (1 + 1e-9)
    assert found.predicted.step_s <= shortest_s(plan, power) * (1 + 1e-9)


def test_a_unit_is_moved_where_that_is_shorter() -> None:
    """Three units or four: with the watts that the stage of four does not get, the one of three is the faster."""
    plan = pipeline(7, 2, 8, (1.0, 0.7))
    power = Power(POINTS, 600.0, 60.0)
    found, kept = with_cuts_and_clocks(plan, power), clocked(plan, power)
    moved = found.lanes[0].borders != plan.lanes[0].borders
    assert moved == (found.predicted.step_s < kept.predicted.step_s)
    assert ("with clocks, units are cut at" in found.reason) == moved


def test_a_cut_that_is_best_stays() -> None:
    plan = pipeline(8, 2, 8)
    found = with_cuts_and_clocks(plan, Power(POINTS, 600.0, 60.0))
    assert (found.lanes, found.reason) == (plan.lanes, plan.reason)


def test_lanes_of_a_kind_are_cut_alike() -> None:
    plan = plan_uniform(asking(chain(7, 32), micro_batch=1), local_topology(8), 2, 4)
    found = with_cuts_and_clocks(plan, Power(POINTS, 2000.0, 60.0))
    check_plan(found)
    assert len({lane.borders for lane in found.lanes}) == len({lane.borders for lane in plan.lanes})


def test_a_rank_without_room_gets_no_unit_more() -> None:
    costs = tuple(UnitCost(1e-3, 2e-3, 0.0, 100, 0) for _ in range(6))
    workload = Workload(costs, chain(6, 8).values, (), PlanOptions(8, micro_batch=1))
    plan = plan_uniform(workload, local_topology(2, speeds=(1.0, 0.5), memory_bytes=420), 1, 2)
    assert plan.lanes[0].borders == (0, 4, 6)
    found = with_cuts_and_clocks(plan, Power(POINTS, None, 60.0))
    assert found.lanes[0].borders == (0, 4, 6)


@pytest.mark.parametrize("seed", range(20))
def test_after_a_loss_units_are_cut_for_clocks_too(seed: int) -> None:
    """Lanes are chosen at nominal clocks, and then cut anew: no cut of a pipeline of its own near there is shorter."""
    rng = random.Random(seed)
    pp, units = rng.choice((2, 3)), rng.randint(3, 7)
    speeds = tuple(rng.choice((1.0, 1.0, 0.7)) for _ in range(pp + 1))
    power = Power(POINTS, rng.choice((None, 300.0 * pp, 270.0 * pp)), 60.0)
    whole = plan_uniform(asking(chain(units, 8), micro_batch=1), local_topology(pp + 1, speeds=speeds), 1, pp + 1)
    topology = local_topology(pp + 1, speeds=speeds, memory_bytes=int(1.6 * most_memory(whole)))
    before = with_cuts_and_clocks(plan_uniform(whole.workload, topology, 1, pp + 1), power)
    lost = rng.randrange(pp + 1)
    members = tuple(Rank(rank) for rank in range(pp + 1) if rank != lost)
    replicas: Replicas = dict.fromkeys((n for n, _ in numbered(before.boxes)), members)
    after = replan(before, members, replicas, 1)
    check_plan(after)
    for lanes in near_cuts_of(after):
        other = make_plan(replace(after.topology, power=None), after.workload, lanes, "", boxes=after.boxes)
        if fits_memory(other):
            assert after.predicted.step_s <= clocked(other, power).predicted.step_s * (1 + 1e-3)


def near_cuts_of(plan: Plan) -> Iterator[tuple[Lane, ...]]:
    """A plan's lanes, one of them cut a unit from where it is; nothing where lanes are one stage deep."""
    for place, lane in enumerate(plan.lanes):
        for borders in near_cuts(lane.borders):
            spans = pairwise(borders)
            stages = tuple(
                Stage(Span(lo, hi), stage.ranks, stage.deal) for (lo, hi), stage in zip(spans, lane.stages, strict=True)
            )
            yield (*plan.lanes[:place], Lane(stages, lane.micro_batches), *plan.lanes[place + 1 :])


def test_where_units_may_not_move_clocks_move_none() -> None:
    power = Power(POINTS, 900.0, 60.0)
    workload = asking(chain(7, 16), axes=("dataflow", "frequency"), micro_batch=1)
    plan = plan_uniform(workload, local_topology(4), 2, 2)
    before = replace(plan, topology=replace(plan.topology, power=power))
    members = (Rank(0), Rank(1), Rank(2))
    after = replan(before, members, dict.fromkeys((n for n, _ in numbered(before.boxes)), members), 1)
    had = {tile.rank: tile.units for tile in before.tiles}
    assert all(had[tile.rank] == tile.units for tile in after.tiles) and after.clocks


def test_energy_is_said_by_token_where_samples_have_tokens() -> None:
    plan = pipeline(8, 2, 8)
    power = Power(POINTS, 600.0, 60.0)
    of_samples, of_tokens = (
        clocked(replace(plan, workload=replace(plan.workload, sample_tokens=tokens)), power) for tokens in (0, 10)
    )
    (samples,), (tokens,) = clock_words(of_samples), clock_words(of_tokens)
    assert samples.endswith(f"{of_samples.predicted.energy_j / 8:.3g} J a sample")
    assert tokens.endswith(f"{of_tokens.predicted.energy_j / 80:.3g} J a token")
