"""Times of a rank's clock by the coordinator's: right within the error, and untouched within a machine."""

from __future__ import annotations

from random import Random

import pytest

from elaswave_fx.control.protocol.clock import DRIFT, ClockOffset, job_time, nearer, of_round_trip


def test_the_error_is_half_the_round_trip() -> None:
    assert of_round_trip(10.0, 510.25, 10.5) == ClockOffset(500.0, 0.25, 10.5)


@pytest.mark.parametrize("offset_s", [500.0, -123456.0, 0.75])
def test_a_time_is_right_within_the_error_however_the_ways_differ(offset_s: float) -> None:
    random = Random(int(offset_s * 4))
    clock = None
    for step in range(200):
        asked_s = 5.0 * step
        there_s, back_s = random.choice((0.0001, 0.02, 0.3)) * random.random(), 0.05 * random.random()
        trip = of_round_trip(asked_s, asked_s + there_s + offset_s, asked_s + there_s + back_s)
        clock = nearer(clock, trip)
        assert clock.error_at_s(trip.measured_s) <= trip.error_s
        now_s = trip.measured_s + 1.0
        assert job_time(clock, now_s) == pytest.approx(now_s + offset_s, abs=clock.error_at_s(now_s))


def test_within_a_machine_times_stay_as_they_are() -> None:
    """To the last bit: the answer lies within the round trip, so that the clocks may be the same."""
    random = Random(7)
    for _ in range(1000):
        asked_s = 1e5 * random.random()
        heard_s = asked_s + 0.1 * random.random()
        clock = of_round_trip(asked_s, random.uniform(asked_s, heard_s), heard_s)
        assert job_time(clock, heard_s + 0.123) == heard_s + 0.123


def test_a_good_measurement_counts_until_drift_has_made_it_worse_than_a_new_one() -> None:
    good = ClockOffset(500.0, 0.001, 10.0)
    assert nearer(good, ClockOffset(500.1, 0.004, 10.0 + 0.002 / DRIFT)) is good
    late = ClockOffset(500.1, 0.004, 10.0 + 0.004 / DRIFT)
    assert nearer(good, late) is late and nearer(None, good) is good


def test_before_anything_was_measured_times_are_taken_as_they_are() -> None:
    assert job_time(None, 17.5) == 17.5
