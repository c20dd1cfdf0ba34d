"""Granules and units are handed on until the lane that ends last ends no earlier."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from elaswave_fx.plan.lanes.balance import Timed, balanced
from elaswave_fx.plan.lanes.lane_shapes import LaneShape, Part, Run
from elaswave_fx.plan.lanes.shape_lanes import LaneShaper
from elaswave_fx.plan.work.topology import local_topology
from tests.plan.brute_force import all_borders
from tests.plan.campaign import random_topology, random_workload
from tests.plan.samples import asking

MEMBERS = local_topology(3).members
STAGES = Run(LaneShape(tuple((member,) for member in MEMBERS)), 1)


class Line:
    """A granule takes as long as the longest stage has units, and as much as the whole of `fill` by stage; cuts with a
    stage of more than `most` units are refused."""

    def __init__(self, fill: Sequence[float] = (0.0, 0.0, 0.0), most: int = 9) -> None:
        self.fill, self.most, self.tried = fill, most, 0

    tries_all = False

    def timed(self, part: Part) -> Timed:
        self.tried += 1
        units = _units(part)
        return Timed(part, max(units) * part.granules + sum(a * b for a, b in zip(units, self.fill, strict=False)))

    def most_granules(self, part: Part, limit_s: float, most: int) -> int:
        return most

    def least_s(self, part: Part) -> float:
        return float(max(_units(part)) * part.granules)

    def may_be_cut_better(self, part: Part, seconds: float) -> bool:
        return part.run.shape.borders is None

    def may_become(self, part: Part, other: Part) -> bool:
        return max(_units(other)) <= self.most


def _units(part: Part) -> list[int]:
    return [hi - lo for lo, hi in zip(part.borders, part.borders[1:], strict=False)]


def part(borders: tuple[int, ...], granules: int, count: int = 1) -> Part:
    return Part(STAGES, borders, granules, count)


def outcome(parts: Sequence[Part], lanes: Line | None = None) -> list[Part]:
    found = balanced(parts, [1], lanes or Line())
    assert found is not None
    return found


def test_granules_go_to_the_lane_that_ends_first() -> None:
    long, short = (0, 4, 5, 6), (0, 2, 4, 6)
    fixed = STAGES._replace(shape=LaneShape(STAGES.shape.stages, long))
    found = outcome([Part(fixed, long, 6, 1), part(short, 6)])
    assert [each.granules for each in found] == [4, 8], "16 either way, instead of 24 and 12"


def test_of_alike_lanes_one_takes_what_there_is_to_take() -> None:
    fixed = STAGES._replace(shape=LaneShape(STAGES.shape.stages, (0, 3, 5, 6)))
    found = outcome([Part(fixed, (0, 3, 5, 6), 4, 1), part((0, 2, 4, 6), 4, 3)])
    assert [(each.granules, each.count) for each in found] == [(3, 1), (5, 1), (4, 2)]


def test_units_leave_the_stage_that_costs_most() -> None:
    (found,) = outcome([part((0, 2, 4, 6), 2)], Line(fill=(0.0, 0.0, 9.0)))
    assert found.borders == (0, 2, 5, 6), "a granule takes a unit longer, filling nine less"
    (found,) = outcome([part((0, 2, 4, 6), 2)], Line(fill=(9.0, 0.0, 9.0)))
    assert found.borders == (0, 1, 5, 6)


def test_all_lanes_of_a_part_are_cut_alike() -> None:
    (found,) = outcome([part((0, 2, 4, 6), 2, 4)], Line(fill=(0.0, 0.0, 9.0)))
    assert (found.borders, found.count) == ((0, 2, 5, 6), 4)


def test_a_cut_that_has_no_room_is_not_taken() -> None:
    (found,) = outcome([part((0, 2, 4, 6), 2)], Line(fill=(0.0, 0.0, 9.0), most=2))
    assert found.borders == (0, 2, 4, 6)


def test_cuts_that_cannot_be_better_are_not_run() -> None:
    lanes = Line()
    (found,) = outcome([part((0, 2, 4, 6), 100)], lanes)
    assert (found.borders, lanes.tried) == ((0, 2, 4, 6), 1), "every other cut has a stage of three units"


@pytest.mark.parametrize("seed", range(60))
def test_no_lane_is_shorter_than_its_bound(seed: int) -> None:
    """Of every cut of random units into stages of random ranks, one wide or two; nor than what no cut can beat."""
    check_bounds(seed, "1f1b")


@pytest.mark.parametrize("seed", range(10))
def test_no_lane_with_halves_is_shorter_than_its_bound(seed: int) -> None:
    check_bounds(seed, "auto")


def check_bounds(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    workload, _ = random_workload(rng, rng.randint(4, 16))
    workload = asking(workload, schedule=schedule)
    topology = random_topology(rng, rng.randint(2, 6))
    shaper, members = LaneShaper(workload, topology), list(topology.members)
    stages: list[tuple[object, ...]] = []
    while members and len(stages) < len(workload.units):
        width = rng.choice((1, 1, 2))
        stages.append(tuple(members[:width]))
        members = members[width:]
    shape = LaneShape(tuple(stages))  # type: ignore[arg-type]
    run = Run(shape, 1)
    for size in shaper.sizes((shape,)):
        for borders in all_borders(len(workload.units), len(stages)):
            each = Part(run, borders, workload.granules, 1)
            kind = shaper.kind(each, size)
            taken_s = shaper.times.about(kind, shape.members, 0).seconds
            assert shaper.times.least_about(kind) <= taken_s * (1 + 1e-9), (borders, size)
            could_take = shaper.cuts.most_granules(run, size, taken_s * (1 + 1e-9), workload.granules)
            assert could_take == workload.granules, (borders, size)
            assert shaper.least_part_s(each, size) <= shaper.seconds(each, size) * (1 + 1e-9), (borders, size)
