"""Deadlines follow what was measured; nobody who beats, however slowly, is excluded for it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elaswave_fx.control.protocol.failure_detector import GAP_MOST_S, STARTING_S, HeartbeatStats, timeouts
from elaswave_fx.control.protocol.messages import Heartbeat
from elaswave_fx.control.protocol.types import Version
from elaswave_fx.plan.topology import Epoch, Rank

BEAT = Heartbeat(Rank(0), Epoch(0), Version(0), "F 1", None, None, False, True, ())


def test_the_rule() -> None:
    quick = timeouts([0.1, 0.1], [0.05], started=True)
    assert (quick.silent_s, quick.accused_s, quick.stalled_s, quick.unheard_s) == (2.0, 0.5, 30.0, 10.0)
    slow = timeouts([0.1, 0.9], [4.0, 2.0], started=True)
    assert (slow.silent_s, slow.accused_s, slow.stalled_s) == (7.2, 3.6, 120.0)


def test_before_the_first_step_there_is_time() -> None:
    fresh = timeouts([], [], started=False)
    assert fresh.unheard_s == fresh.stalled_s == STARTING_S and fresh.silent_s == 2.0


def test_a_planned_stop_is_announced_further_ahead_when_steps_are_short() -> None:
    assert timeouts([0.5], [0.25], started=True).ahead == 7
    assert timeouts([0.1], [5.0], started=True).ahead == 2


def test_one_long_stop_of_the_machine_does_not_make_the_job_deaf() -> None:
    assert timeouts([300.0], [1.0], started=True).silent_s == 8 * GAP_MOST_S


@given(st.lists(st.floats(0.01, 1.9), min_size=3, max_size=60))
def test_who_beats_at_gaps_that_grow_at_most_eightfold_is_never_silent(gaps: list[float]) -> None:
    rhythm, now, limit = HeartbeatStats(), 0.0, timeouts([], [], started=True).silent_s
    for gap in gaps:
        now += gap
        assert gap <= limit
        rhythm.heard(BEAT, now)
        limit = rhythm.timeouts(started=True, now_s=now).silent_s


def test_gaps_are_forgotten_after_a_minute_and_with_their_rank() -> None:
    rhythm = HeartbeatStats()
    for now in (0.0, 1.0, 1.1, 1.2):
        rhythm.heard(BEAT, now)
    assert rhythm.timeouts(True, 1.2).silent_s == 8.0
    assert rhythm.timeouts(True, 62.0).silent_s == 2.0
    rhythm.forget(BEAT.rank)
    rhythm.heard(BEAT, 900.0)
    assert rhythm.timeouts(True, 900.0).silent_s == 2.0


def test_steps_are_measured_between_commits_and_not_across_epochs() -> None:
    rhythm = HeartbeatStats()
    for version, now in ((0, 0.0), (10, 2.0), (10, 2.1), (12, 6.0)):
        rhythm.heard(replace(BEAT, version=Version(version)), now)
    assert rhythm.timeouts(True, 6.0).stalled_s == 60.0
    rhythm.interrupted()
    rhythm.heard(replace(BEAT, version=Version(13), epoch=Epoch(1)), 90.0)
    assert rhythm.timeouts(True, 90.0).stalled_s == 60.0
