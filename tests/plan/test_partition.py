"""The minimax partition against trying everything."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_fx.plan.lanes.partition import crossing_bytes, minimax, slowest_stage
from elaswave_fx.plan.work.cost import UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions


def all_borders(units: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *cut, units) for cut in combinations(range(1, units), stages - 1)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[float], list[int], int]:
    units = draw(st.integers(1, 8))
    stages = draw(st.integers(1, units))
    costs = [float(c) for c in draw(st.lists(st.integers(0, 9), min_size=units, max_size=units))]
    speeds = draw(st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=stages, max_size=stages))
    crossing = draw(st.lists(st.integers(0, 3), min_size=units + 1, max_size=units + 1))
    return costs, speeds, crossing, draw(st.integers(1, units))


@given(problems())
def test_it_is_as_fast_as_the_best_of_all_and_sends_least_among_those(
    problem: tuple[list[float], list[float], list[int], int],
) -> None:
    costs, speeds, crossing, most = problem

    reach = [[min(len(costs), lo + most + stage % 2) for lo in range(len(costs))] for stage in range(len(speeds))]
    allowed = [
        b
        for b in all_borders(len(costs), len(speeds))
        if all(hi <= reach[stage][lo] for stage, (lo, hi) in enumerate(pairwise(b)))
    ]
    found = minimax(costs, speeds, reach, crossing)
    if not allowed:
        assert found is None
        return
    assert found in allowed
    best = min(slowest_stage(costs, speeds, b) for b in allowed)
    assert slowest_stage(costs, speeds, found) == pytest.approx(best)
    fastest = [b for b in allowed if slowest_stage(costs, speeds, b) <= best * (1 + 1e-9)]
    assert sum(crossing[i] for i in found[1:-1]) == min(sum(crossing[i] for i in b[1:-1]) for b in fastest)


def test_a_faster_stage_gets_more_units() -> None:
    assert minimax([1.0] * 9, [1.0, 2.0]) == (0, 3, 9)


def test_equal_units_are_spread_evenly() -> None:
    assert minimax([1.0] * 10, [1.0] * 4) == (0, 2, 4, 7, 10)


def test_bytes_across_a_border_count_while_the_value_is_still_needed() -> None:
    unit = UnitCost(1.0, 1.0)
    values = (Value("h", 0, (1, 3), 10), Value("mask", 1, (2,), 3, has_grad=False))
    assert crossing_bytes(Workload((unit,) * 4, values, (), PlanOptions(4))) == (0, 20, 23, 20, 0)
