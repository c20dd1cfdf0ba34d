"""Deadlines follow what was measured; nobody who beats, however slowly, is excluded for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_fx.control.protocol.events import CauseKind
from elaswave_fx.control.protocol.failure_detector import (
    GAP_MOST_S,
    STARTING_S,
    Certainty,
    FailureDetector,
    Finding,
    HeartbeatStats,
    timeouts,
)
from elaswave_fx.control.protocol.messages import Heartbeat
from elaswave_fx.control.protocol.types import SEED, Report, Version
from elaswave_fx.plan.work.topology import Epoch, Rank

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


def test_a_planned_stop_comes_after_the_step_in_flight_where_enough_of_it_is_left() -> None:
    assert timeouts([0.2], [2.0, 3.0], started=True, since_s=0.5).ahead == 1
    assert timeouts([0.2], [2.0, 3.0], started=True, since_s=1.5).ahead == 2, "the shortest step counts"
    assert timeouts([0.25], [0.125], started=True, since_s=0.0).ahead == 7
    stats = HeartbeatStats()
    for beat in range(41):  # version 2 is heard of at 4 s
        stats.heard(replace(BEAT, version=Version(beat // 20), step_s=2.0), 0.1 * beat)
    assert (stats.timeouts(True, 4.1).ahead, stats.timeouts(True, 5.9).ahead) == (1, 2)


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


def test_a_coordinator_knows_steps_from_the_first_heartbeat_of_a_rank_that_has_taken_some() -> None:
    stats = HeartbeatStats()
    stats.heard(BEAT, 0.0)
    assert stats.timeouts(True, 0.0).stalled_s == STARTING_S
    stats.heard(replace(BEAT, rank=Rank(1), version=Version(9), step_s=4.0), 0.1)
    assert stats.timeouts(True, 0.1).stalled_s == 120.0
    stats.heard(replace(BEAT, rank=Rank(2), version=Version(9), step_s=5.0), 0.2)
    assert stats.timeouts(True, 0.2).stalled_s == 150.0, "a rank that was unheard so far counts, too"


def test_the_slowest_of_the_last_twenty_steps_counts_each_of_them_once() -> None:
    stats, beat = HeartbeatStats(), replace(BEAT, version=Version(1), step_s=4.0)
    stats.heard(beat, 0.0)
    quick = [replace(beat, version=Version(version), step_s=0.1) for version in range(2, 22)]
    for each in (*quick[:-1], *(quick[-2:-1] * 5)):
        stats.heard(each, 1.0)
    assert stats.timeouts(True, 1.0).stalled_s == 120.0, "heartbeats that repeat a step tell nothing new"
    stats.heard(quick[-1], 1.0)
    assert stats.timeouts(True, 1.0).stalled_s == 30.0
    stats.heard(replace(beat, epoch=Epoch(1), version=Version(3), step_s=3.0), 2.0)
    assert stats.timeouts(True, 2.0).stalled_s == 90.0, "after a rollback, too"


# --- Who is lost ---

RANKS = tuple(Rank(rank) for rank in range(4))
LIMITS = timeouts([0.1], [0.05], started=True)


def listening(*silent: int) -> FailureDetector:
    """Heard from everybody but `silent` at 10 s."""
    detector = FailureDetector(LIMITS, began_s=0.0)
    for rank in RANKS:
        detector = detector.connected(rank, 1.0)
        if rank not in silent:
            detector = detector.heartbeat(replace(BEAT, rank=rank), 10.0)
    return detector


def report(rank: int, *broken: int, suspect: int | None = None) -> Report:
    links = frozenset(Rank(other) for other in broken)
    accused = None if suspect is None else Rank(suspect)
    return Report(Rank(rank), Epoch(0), SEED, {}, {}, (), (), links, accused)


def reports_of(*reports: Report) -> dict[Rank, Report]:
    return {report.rank: report for report in reports}


def test_an_exit_word_is_certain_at_once() -> None:
    found = listening().exit_word(Rank(2)).finding(Rank(2), 10.1)
    assert found == Finding(Certainty.CERTAIN, CauseKind.EXITED, since_s=10.0)
    assert listening().finding(Rank(2), 10.1) is None


def test_silence_is_a_suspicion_when_its_deadline_has_passed() -> None:
    detector = listening()
    assert detector.is_alive(Rank(2), 11.9)
    assert detector.finding(Rank(2), 12.1) == Finding(Certainty.SUSPECTED, CauseKind.SILENT, since_s=10.0)
    assert detector.afresh(12.0).is_alive(Rank(2), 13.9), "whoever listens anew gives everybody the time again"


def test_all_connections_gone_is_evidence_without_a_deadline() -> None:
    reports = reports_of(report(0, 2), report(1, 2), report(3, 2, suspect=2))
    detector = listening().disconnected(Rank(2)).with_evidence(RANKS, reports, 10.01)
    assert detector.finding(Rank(2), 10.01) == Finding(Certainty.EVIDENT, CauseKind.UNREACHABLE, since_s=10.0)
    assert detector.exited == frozenset(), "its memory may live on behind a broken network"


def test_two_ranks_of_a_host_are_found_together() -> None:
    reports = reports_of(report(0, 2, 3), report(1, 2, 3, suspect=3))
    detector = listening().disconnected(Rank(2)).disconnected(Rank(3)).with_evidence(RANKS, reports, 10.01)
    assert [rank for rank in RANKS if not detector.is_alive(rank, 10.01)] == [2, 3]


@pytest.mark.parametrize(
    ("cut_off", "reports"),
    [
        ((), (report(0, 2), report(1, 2), report(3, 2))),
        ((2,), (report(0, 2), report(1, 2))),
        ((2,), (report(0, 2), report(1), report(3, 2))),
        ((2,), (report(0, 2), report(1, 2), report(2, 0, 1, 3), report(3, 2))),
        ((2,), ()),
    ],
    ids=["its control connection lives", "a rank is unheard", "a link holds", "it reports", "no links are known"],
)
def test_less_than_all_connections_is_no_evidence(cut_off: tuple[int, ...], reports: tuple[Report, ...]) -> None:
    detector = listening()
    for rank in cut_off:
        detector = detector.disconnected(Rank(rank))
    found = detector.with_evidence(RANKS, reports_of(*reports), 10.01)
    assert all(found.is_alive(rank, 10.01) for rank in RANKS)


def test_a_connection_that_was_never_opened_counts_as_closed_when_there_was_time() -> None:
    """A coordinator has just begun; rank 2 may have died before that."""
    began = FailureDetector(LIMITS, began_s=50.0)
    for rank in (0, 1, 3):
        began = began.connected(Rank(rank), 50.1).heartbeat(replace(BEAT, rank=Rank(rank)), 50.1)
    reports = reports_of(report(0, 2), report(1, 2), report(3, 2))
    soon, late = 50.0 + 0.9 * LIMITS.connect_s, 50.0 + 1.1 * LIMITS.connect_s
    assert began.with_evidence(RANKS, reports, soon).is_alive(Rank(2), soon)
    found = began.with_evidence(RANKS, reports, late)
    assert found.finding(Rank(2), late) == Finding(Certainty.EVIDENT, CauseKind.UNREACHABLE, since_s=None)
    assert found.connected(Rank(2), late).is_alive(Rank(2), late), "it was late"
    beats = began.heartbeat(replace(BEAT, rank=Rank(2)), soon)
    assert beats.with_evidence(RANKS, reports, late).is_alive(Rank(2), late), "it is heard"
    held = reports_of(report(0, 2), report(1), report(3, 2))
    assert began.with_evidence(RANKS, held, late).is_alive(Rank(2), late), "a link holds"


def test_who_opens_its_control_connection_again_was_not_gone() -> None:
    reports = reports_of(report(0, 2), report(1, 2), report(3, 2))
    detector = listening().disconnected(Rank(2)).with_evidence(RANKS, reports, 10.01)
    again = detector.connected(Rank(2), 10.2)
    assert again.is_alive(Rank(2), 10.2) and again.with_evidence(RANKS, reports, 10.2).is_alive(Rank(2), 10.2)
    assert not listening().exit_word(Rank(2)).connected(Rank(2), 10.2).is_alive(Rank(2), 10.2), "exits stand"


def test_who_is_accused_or_cut_off_has_less_time_to_report() -> None:
    detector = listening().disconnected(Rank(3))
    found = detector.unreported([Rank(1), Rank(2), Rank(3)], Epoch(0), reports_of(report(0, suspect=2)), 0.6, 10.6)
    assert [rank for rank in RANKS if not found.is_alive(rank, 10.6)] == [2, 3]
    assert found.finding(Rank(2), 10.6) == Finding(Certainty.SUSPECTED, CauseKind.SILENT, since_s=10.0)


def test_who_still_dials_to_a_new_coordinator_is_lost_only_when_it_is_accused_or_had_much_time() -> None:
    """Rank 3 is dead; rank 2 needs longer than `connect_s` to open its control connection."""
    began = FailureDetector(replace(LIMITS, unheard_s=10.0), began_s=50.0)
    for rank in (0, 1):
        began = began.connected(Rank(rank), 50.1).heartbeat(replace(BEAT, rank=Rank(rank)), 50.1)
    late = 50.0 + LIMITS.connect_s + 1.1 * LIMITS.accused_s
    found = began.unreported((Rank(2), Rank(3)), Epoch(0), reports_of(report(0), report(1, 3, suspect=3)), 0.9, late)
    assert [rank for rank in RANKS if not found.is_alive(rank, late)] == [3]
    assert found.is_alive(Rank(2), 59.9) and not found.is_alive(Rank(2), 60.1)


def test_whoever_the_others_wait_for_counts_as_lost_from_when_it_stood_still() -> None:
    detector = listening()
    for rank in RANKS:
        waits_for = None if rank == 2 else Rank(2)
        detector = detector.heartbeat(replace(BEAT, rank=rank, awaited=waits_for), 20.0)
        detector = detector.heartbeat(replace(BEAT, rank=rank, awaited=waits_for), 51.0)
    found, stalled = detector.standing_still(RANKS, 51.0)
    assert stalled == RANKS
    assert found.found == {Rank(2): Finding(Certainty.SUSPECTED, CauseKind.STALLED, since_s=10.0)}
    back = found.heartbeat(replace(BEAT, rank=Rank(2), joining=True), 52.0)
    assert back.is_alive(Rank(2), 52.0)


def test_a_report_voids_what_was_found_before() -> None:
    reports = reports_of(report(0, suspect=2))
    detector = listening().unreported((Rank(2),), Epoch(0), reports, 0.0, 11.0)
    assert not detector.is_alive(Rank(2), 11.0)
    assert detector.reported(Rank(2), 11.1).is_alive(Rank(2), 11.1)


def test_the_one_to_blame_is_found_though_it_stopped_a_heartbeat_after_the_one_that_waits() -> None:
    waits, hangs = replace(BEAT, rank=Rank(0), awaited=Rank(1)), replace(BEAT, rank=Rank(1), awaited=None)
    detector = FailureDetector(LIMITS, began_s=0.0).heartbeat(waits, 0.0).heartbeat(hangs, 0.2)
    found, stalled = detector.standing_still((Rank(0), Rank(1)), LIMITS.stalled_s + 0.1)
    assert stalled == (0, 1) and not found.is_alive(Rank(1), LIMITS.stalled_s + 0.1)


def test_nobody_stands_still_who_waits_for_one_that_reads_slow_data() -> None:
    reads = replace(BEAT, rank=Rank(1), awaited=None)
    detector = FailureDetector(LIMITS, began_s=0.0).heartbeat(replace(BEAT, rank=Rank(0), awaited=Rank(1)), 0.0)
    late = 2 * LIMITS.stalled_s
    detector = detector.heartbeat(replace(reads, phase="reads sample 7 for 59 s"), late - 1)
    assert detector.standing_still((Rank(0), Rank(1)), late) == (detector, ())
    found, stalled = detector.standing_still((Rank(0), Rank(1)), late + LIMITS.stalled_s)
    assert stalled == (0, 1) and not found.is_alive(Rank(1), late + LIMITS.stalled_s), "it does not get on any more"


def test_a_rank_that_still_starts_when_another_one_is_lost_is_not_cut_off() -> None:
    starting = FailureDetector(timeouts((), (), started=False), began_s=0.0)
    assert not starting.cut_off(RANKS, 30.0)
    found = starting.unreported(RANKS, Epoch(0), {}, 30.0, 30.0)
    assert all(found.is_alive(rank, 30.0) for rank in RANKS)
    assert starting.disconnected(Rank(1)).cut_off(RANKS, 0.1) == {1}, "it was there, and is gone"
