"""How long the coordinator waits before it gives somebody up: derived from what it has measured, set by nobody.

In: when heartbeats and commits came. Out: `Timeouts`. Wanted is that no rank is excluded for being slow: a machine that
delays heartbeats shows it by the gaps between them, before one of them is long enough to exclude.

    gaps of at most 0.1 s, steps of 0.05 s   ->  silent 2 s, stalled 30 s
    gaps of at most 0.9 s, steps of 4 s      ->  silent 7.2 s, stalled 120 s
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from elaswave_fx.control.protocol.coordinator import Timeouts
from elaswave_fx.control.protocol.messages import Heartbeat
from elaswave_fx.control.protocol.types import Version
from elaswave_fx.plan.topology import Rank

HEARTBEAT_S = 0.2
"""Between two heartbeats of a rank."""

SILENT_FLOOR_S, SILENT_OVER_GAP = 2.0, 8.0
ACCUSED_FLOOR_S, ACCUSED_OVER_GAP = 0.5, 4.0
STALLED_FLOOR_S, STALLED_OVER_STEP = 30.0, 30.0
STARTING_S = 600.0
"""For what has never been measured: processes that load, a first step."""

UNHEARD_S = 10.0
"""For a rank to find a coordinator that took over a running job."""

RESEND_S = 0.3
SPREAD_S = 0.05
MEND_S = 0.5
ACK_S = 0.5
GAP_MOST_S = 4.0
"""One stop of the whole machine must not make the job deaf for long."""

WINDOW_S = 60.0
RECENT_STEPS = 20


def timeouts(gaps_s: Iterable[float], steps_s: Iterable[float], started: bool) -> Timeouts:
    """The rule. `gaps_s`: between heartbeats in the last minute, over all ranks; `steps_s`: of the last commits.

    `started`: the job has committed a step, so all of its ranks are up.
    """
    gap_s = max((min(gap, GAP_MOST_S) for gap in gaps_s), default=HEARTBEAT_S)
    steps = tuple(steps_s)
    silent_s = max(SILENT_FLOOR_S, SILENT_OVER_GAP * gap_s)
    # A stop is announced so far ahead that news of a heartbeat, and the answer, have arrived by then.
    ahead = 1 + math.ceil(3 * max(gap_s, HEARTBEAT_S) / max(min(steps), 1e-4)) if steps else 1
    return Timeouts(
        silent_s=silent_s,
        accused_s=max(ACCUSED_FLOOR_S, ACCUSED_OVER_GAP * gap_s),
        stalled_s=max(STALLED_FLOOR_S, STALLED_OVER_STEP * max(steps)) if steps else STARTING_S,
        resend_s=max(RESEND_S, gap_s),
        spread_s=SPREAD_S,
        mend_s=max(MEND_S, gap_s),
        ack_s=ACK_S,
        unheard_s=max(UNHEARD_S, silent_s) if started else STARTING_S,
        ahead=ahead,
    )


class HeartbeatStats:
    """Measures heartbeats and commits as they come. Times are given by the caller."""

    def __init__(self) -> None:
        self._last_s: dict[Rank, float] = {}
        self._gaps: deque[tuple[float, float]] = deque()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._version: tuple[Version, float] | None = None

    def heard(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat came."""
        if heartbeat.rank in self._last_s:
            self.gap(now_s - self._last_s[heartbeat.rank], now_s)
        self._last_s[heartbeat.rank] = now_s
        if self._version is None or heartbeat.version > self._version[0]:
            if self._version is not None:
                version, since_s = self._version
                self._steps.append((now_s - since_s) / (heartbeat.version - version))
            self._version = (heartbeat.version, now_s)

    def gap(self, gap_s: float, now_s: float) -> None:
        """So long nothing came from somebody; the coordinator's own pauses count too."""
        # Only gaps that no later one exceeds are kept: the first is the largest.
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((now_s, gap_s))

    def forget(self, rank: Rank) -> None:
        """A rank has left: if it comes back, that was no gap."""
        self._last_s.pop(rank, None)

    def interrupted(self) -> None:
        """A new epoch: what passed until its first commit was no step."""
        self._version = None

    def timeouts(self, started: bool, now_s: float) -> Timeouts:
        """As of now."""
        while self._gaps and now_s - self._gaps[0][0] > WINDOW_S:
            self._gaps.popleft()
        return timeouts((gap for _, gap in self._gaps), self._steps, started)
