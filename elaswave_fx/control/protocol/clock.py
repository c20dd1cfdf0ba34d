"""The offset of a rank's clock from the coordinator's, from round trips.

In: when the rank asked, when the coordinator answered by its own clock, when the rank received that. Out: the offset to
add to the rank's clock, with its error bound. Monotonic clocks begin at boot, so two machines differ by any number of
seconds. Pure.

    of_round_trip(asked_s=10.0, answered_s=510.2, heard_s=10.4)  ->  ClockOffset(500.0, error_s=0.2, …)
    job_time(_, 12.0)                                            ->  512.0
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 5e-4
"""Maximum drift between two clocks, in seconds per second: as fast as a system slews its clock (adjtimex(2))."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The coordinator's clock is `offset_s` ± `error_s` ahead of the rank's, as of `measured_s` of the latter."""

    offset_s: float
    error_s: float
    measured_s: float

    def error_at_s(self, now_s: float) -> float:
        """The error bound at `now_s` of the rank's clock."""
        return self.error_s + DRIFT * abs(now_s - self.measured_s)


def of_round_trip(asked_s: float, answered_s: float, heard_s: float) -> ClockOffset:
    """The offset from one round trip. The answer was given at some moment of it; half of its duration is the error
    (Cristian, Distributed Computing 3, 1989)."""
    return ClockOffset(answered_s - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2, heard_s)


def nearer(before: ClockOffset | None, new: ClockOffset) -> ClockOffset:
    """The offset with the smaller error at the time of the new measurement."""
    if before is not None and before.error_at_s(new.measured_s) < new.error_s:
        return before
    return new


def job_time(clock: ClockOffset | None, at_s: float) -> float:
    """Convert a time of the rank's clock to the coordinator's. Clocks that may be equal count as equal: within a
    machine they are, and a guess would make exact times worse. None: nothing was measured yet."""
    if clock is None or abs(clock.offset_s) <= clock.error_at_s(at_s):
        return at_s
    return at_s + clock.offset_s
