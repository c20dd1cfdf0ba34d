"""Speeds follow ranks that are really slower, or faster again, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from elaswave_fx.control.protocol.speed_meter import WINDOW, Expected, SpeedMeter
from elaswave_fx.plan.work.topology import Rank


def ranks_of(count: int, alike: int, speed: float = 1.0) -> dict[Rank, Expected]:
    """The first `alike` ranks run the same units, each of the others its own."""
    return {Rank(r): Expected(speed, 0.5 + 0.1 * (r >= alike), 0 if r < alike else r) for r in range(count)}


def measured(expected: Mapping[Rank, Expected], **slower: float) -> dict[Rank, float]:
    """Seconds of a step; `r3=0.5`: rank 3 has half of its expected speed."""
    return {rank: each.busy_s / slower.get(f"r{rank}", 1.0) for rank, each in expected.items()}


def after(meter: SpeedMeter, steps: int, busy_s: Mapping[Rank, float]) -> SpeedMeter:
    for _ in range(steps):
        meter = meter.heard(busy_s)
    return meter


def test_a_slow_rank_is_known_within_a_window() -> None:
    expected = ranks_of(8, alike=8)
    meter = after(SpeedMeter.of(expected), 40, measured(expected))
    assert meter.speeds() is None
    known = next(n for n in range(1, 21) if after(meter, n, measured(expected, r3=0.5)).speeds() is not None)
    assert known <= WINDOW
    assert after(meter, WINDOW, measured(expected, r3=0.5)).speeds() == {**dict.fromkeys(range(8), 1.0), 3: 0.5}


def test_short_steps_are_taken_together() -> None:
    """What takes milliseconds may be over before a busy machine has given every process its turn."""
    expected = {rank: Expected(1.0, 0.01, 0) for rank in map(Rank, range(4))}
    slow = {**dict.fromkeys(expected, 0.01), Rank(2): 0.02}
    known = next(n for n in range(1, 1000) if after(SpeedMeter.of(expected), n, slow).speeds() is not None)
    assert known == WINDOW * 13, "13 steps of 20 ms are a quarter of a second"


def test_one_of_two_ranks_is_the_slow_one() -> None:
    expected = ranks_of(2, alike=2)
    assert after(SpeedMeter.of(expected), WINDOW, measured(expected, r1=0.5)).speeds() == {0: 1.0, 1: 0.5}


def test_ranks_with_units_of_their_own_are_held_against_their_own_first_steps() -> None:
    """Costs that are wrong by half for one of them are no slow rank."""
    expected = ranks_of(4, alike=1)
    meter = after(SpeedMeter.of(expected), 30, measured(expected, r2=0.5))
    assert meter.speeds() is None
    assert after(meter, WINDOW, measured(expected, r2=0.25)).speeds() == {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0}


def test_a_rank_that_is_planned_for_as_slow_is_fast_again() -> None:
    expected = {**ranks_of(4, alike=1), Rank(3): Expected(0.5, 0.5, 3)}
    meter = after(SpeedMeter.of(expected), 30, measured(expected))
    assert meter.speeds() is None
    assert after(meter, WINDOW, measured(expected, r3=2.0)).speeds() == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}


def test_what_all_have_in_common_is_nobodys() -> None:
    expected, rng = ranks_of(8, alike=4), random.Random(0)
    meter = SpeedMeter.of(expected)
    for _ in range(200):
        crowd = rng.uniform(0.2, 1.0)
        meter = meter.heard({rank: busy / crowd for rank, busy in measured(expected).items()})
        assert meter.speeds() is None


def test_an_overloaded_machine_slows_nobody_down() -> None:
    """Of 8 ranks on few cores in every step some others are two and three times as slow."""
    expected, rng = ranks_of(8, alike=4), random.Random(1)
    meter = SpeedMeter.of(expected)
    for _ in range(5000):
        slow = {rank: rng.choice((1, 1, 1, 1, 0.9, 0.6, 0.3)) * rng.uniform(0.9, 1.0) for rank in expected}
        meter = meter.heard({rank: each.busy_s / slow[rank] for rank, each in expected.items()})
        assert meter.speeds() is None


@pytest.mark.parametrize("unknown", [{}, {Rank(0): 0.0}])
def test_where_durations_are_not_known_speeds_are_not(unknown: Mapping[Rank, float]) -> None:
    expected = ranks_of(2, alike=2)
    busy = {**measured(expected, r1=0.5), **unknown} if unknown else {Rank(1): 1.0}
    assert after(SpeedMeter.of(expected), 40, busy).speeds() is None


def test_ranks_without_units_have_no_speed() -> None:
    expected = {**ranks_of(2, alike=2), Rank(2): Expected(1.0, 0.0, None)}
    assert after(SpeedMeter.of(expected), WINDOW, measured(ranks_of(2, alike=2), r1=0.5)).speeds() == {0: 1.0, 1: 0.5}
    assert SpeedMeter.of({}).speeds() is None
