"""How the clock of a rank's machine differs from the coordinator's, from questions and their answers.

In: when a rank asked, when the coordinator answered by its own clock, when the rank heard it. Out: what has to be added
to a time of the rank's clock, with the error that this may have. Monotonic clocks begin when a machine does, so two
machines differ by any number of seconds. Pure.

    of_round_trip(asked_s=10.0, answered_s=510.2, heard_s=10.4)  ->  ClockOffset(500.0, error_s=0.2, …)
    job_time(_, 12.0)                                            ->  512.0
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 5e-4
"""Seconds per second by which two clocks may come apart: as fast as a system slews its clock (adjtimex(2))."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The coordinator's clock is `offset_s` ahead of the rank's, more or less by `error_s`, as of `measured_s` of the
    latter."""

    offset_s: float
    error_s: float
    measured_s: float

    def error_at_s(self, now_s: float) -> float:
        """The error of a time at `now_s`, by the rank's clock."""
        return self.error_s + DRIFT * abs(now_s - self.measured_s)


def of_round_trip(asked_s: float, answered_s: float, heard_s: float) -> ClockOffset:
    """The answer was given at some moment of the round trip; half of that is the error (Cristian, Distributed Computing
    3, 1989)."""
    return ClockOffset(answered_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2, heard_s)


def nearer(before: ClockOffset | None, new: ClockOffset) -> ClockOffset:
    """The one with the smaller error when the new one was measured."""
    if before is not None and before.error_at_s(new.measured_s) < new.error_s:
        return before
    return new


def job_time(clock: ClockOffset | None, at_s: float) -> float:
    """A time of the rank's clock by the coordinator's. Clocks that may be the same one are taken for it: within a
    machine they are, and a guess would make exact times worse. None: nothing was measured yet."""
    if clock is None or abs(clock.offset_s) <= clock.error_at_s(at_s):
        return at_s
    return at_s + clock.offset_s
