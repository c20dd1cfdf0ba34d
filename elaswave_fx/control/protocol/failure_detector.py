"""The failure detector: a pure function from signs of life and death to lost ranks, with certainty and time.

In: heartbeats, reports, exits from the launcher, opened and closed control connections, links that ranks report as
broken. Out: a `Finding` per lost rank. The coordinator evicts exactly these ranks.

    the launcher reports the end of rank 2's process              ->  CERTAIN, whatever else there is
    its control connection and all of its links are closed        ->  EVIDENT, without waiting for any deadline
    the same, and it never connected to this new coordinator      ->  EVIDENT, once it has had the time to
    its links are closed, its control connection is open          ->  nothing: links mend
    it sent nothing within the deadline                           ->  SUSPECTED

Only a CERTAIN loss lets others use older replicas than the rank's: otherwise it may be alive. Deadlines are not
configured but follow from measurements: a machine that delays heartbeats shows smaller gaps before one that is long
enough to evict.

    gaps of at most 0.1 s, steps of 0.05 s   ->  silent 2 s, stalled 30 s
    gaps of at most 0.9 s, steps of 4 s      ->  silent 7.2 s, stalled 120 s
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from elaswave_fx.control.protocol.changed import replace
from elaswave_fx.control.protocol.decide import wait_graph_sinks, waiting_in_vain
from elaswave_fx.control.protocol.events import CauseKind
from elaswave_fx.control.protocol.messages import Heartbeat
from elaswave_fx.control.protocol.types import Report, Version
from elaswave_fx.plan.work.topology import Epoch, Rank

HEARTBEAT_S = 0.2
"""Seconds between two heartbeats of a rank."""

SILENT_FLOOR_S, SILENT_OVER_GAP = 2.0, 8.0
ACCUSED_FLOOR_S, ACCUSED_OVER_GAP = 0.5, 4.0
STALLED_FLOOR_S, STALLED_OVER_STEP = 30.0, 30.0
STARTING_S = 600.0
"""Deadline of what was never measured: processes that load, a first step."""

UNHEARD_S = 10.0
"""Time for a rank to find a coordinator that took over a running job."""

CONNECT_OVER_GAP = 2.0
"""Factor on the heartbeat gap: a rank connects to a new coordinator with its next heartbeat, or when it starts."""

RESEND_S = 0.3
SPREAD_S = 0.05
MEND_S = 0.5
ACK_S = 0.5
GAP_MOST_S = 4.0
"""Bound on a gap: one pause of the whole machine must not raise the deadlines for long."""

WINDOW_S = 60.0
RECENT_STEPS = 20


class Certainty(IntEnum):
    """The certainty that a rank is lost."""

    SUSPECTED = 1
    """A deadline has passed; the process may be alive and rejoin."""
    EVIDENT = 2
    """The process has no connection; it may be alive behind a broken network."""
    CERTAIN = 3
    """The process has ended, and its memory is lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank that counts as lost. `since_s`: its last sign of life, None if this coordinator has none."""

    certainty: Certainty
    kind: CauseKind
    since_s: float | None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, derived by the caller: silence that evicts a rank, or a suspect; a hang that evicts; time to resend.

    `spread_s`: time for a loss to reach all ranks and for their reports to arrive, before they are asked. `mend_s`:
    time to reopen broken links between living ranks, before one of these is evicted. `ack_s`: interval of
    acknowledgements without news. `connect_s`: time for living ranks to connect to a new coordinator, or to the first
    one of a new job. `unheard_s`: silence that evicts a rank that never contacted this coordinator; None: `silent_s`.
    `ahead`: number of versions by which a planned stop is announced ahead, so that it reaches every rank in time.
    """

    silent_s: float
    accused_s: float
    stalled_s: float
    resend_s: float
    spread_s: float
    mend_s: float
    ack_s: float
    connect_s: float
    unheard_s: float | None = None
    ahead: int = 1


class Heard(NamedTuple):
    """The last heartbeat of a rank, its arrival, and since when heartbeats show the same place."""

    heartbeat: Heartbeat
    at_s: float
    since_s: float


@dataclass(frozen=True)  # without slots: see changed.py
class FailureDetector:
    """One coordinator's knowledge of the ranks. Methods return a new value; dictionaries are not changed in place.

    `began_s`: since when it listens; reset by a pause of its own. `signs_s`: each rank's last sign of life.
    `connections`: whether a rank's control connection, once opened, is open now. `found`: findings that stand until the
    rank asks to join, or a report or an open connection refutes them.
    """

    timeouts: Timeouts
    began_s: float
    heard: dict[Rank, Heard] = field(default_factory=dict)
    signs_s: dict[Rank, float] = field(default_factory=dict)
    exited: frozenset[Rank] = frozenset()
    connections: dict[Rank, bool] = field(default_factory=dict)
    found: dict[Rank, Finding] = field(default_factory=dict)

    # --- Signs ---

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> FailureDetector:
        """Record a heartbeat. One that asks to join clears the rank's findings."""
        rank, before = heartbeat.rank, self.heard.get(heartbeat.rank)
        same = before is not None and _place(before.heartbeat) == _place(heartbeat)
        since_s = before.since_s if before is not None and same else now_s
        cleared = self.without([rank]) if heartbeat.joining else self
        return replace(
            cleared,
            heard={**self.heard, rank: Heard(heartbeat, now_s, since_s)},
            signs_s={**self.signs_s, rank: now_s},
        )

    def reported(self, rank: Rank, now_s: float) -> FailureDetector:
        """Record a report: the rank lives and its main thread makes progress, so its findings are void."""
        return replace(self.without([rank]), signs_s={**self.signs_s, rank: now_s})

    def ended(self, rank: Rank) -> FailureDetector:
        """Record that the rank has finished the job: its silence is irrelevant."""
        return replace(self, heard={other: heard for other, heard in self.heard.items() if other != rank})

    def exit_word(self, rank: Rank) -> FailureDetector:
        """Record the launcher's report that the rank's process has ended, or that the kernel has begun to end it."""
        return replace(self, exited=self.exited | {rank})

    def connected(self, rank: Rank, now_s: float) -> FailureDetector:
        """Record an open control connection; evidence from before it is void."""
        found = self.found.get(rank)
        state = self.without([rank]) if found is not None and found.certainty == Certainty.EVIDENT else self
        return replace(state, connections={**self.connections, rank: True}, signs_s={**self.signs_s, rank: now_s})

    def disconnected(self, rank: Rank) -> FailureDetector:
        return replace(self, connections={**self.connections, rank: False})

    def afresh(self, now_s: float) -> FailureDetector:
        """Count silence from now on, because nothing could be received before."""
        return replace(self, began_s=now_s)

    def without(self, ranks: Collection[Rank]) -> FailureDetector:
        """Drop the findings about these ranks. Exits stand."""
        return replace(self, found={rank: found for rank, found in self.found.items() if rank not in ranks})

    # --- Findings ---

    def finding(self, rank: Rank, now_s: float) -> Finding | None:
        """Why the rank counts as lost at `now_s`; None if it counts as alive."""
        if rank in self.exited:
            return Finding(Certainty.CERTAIN, CauseKind.EXITED, self.signs_s.get(rank))
        if rank in self.found:
            return self.found[rank]
        if self._is_silent(rank, now_s):
            return Finding(Certainty.SUSPECTED, CauseKind.SILENT, self.signs_s.get(rank))
        return None

    def is_alive(self, rank: Rank, now_s: float) -> bool:
        """Whether there is no finding against the rank."""
        return rank not in self.exited and rank not in self.found and not self._is_silent(rank, now_s)

    def cut_off(self, ranks: Iterable[Rank], now_s: float) -> frozenset[Rank]:
        """Return those of `ranks` without a control connection: it is closed, or was not opened to this coordinator in
        time. In the latter case nothing else arrived either: they may have died before it began."""
        limit_s, connections = self.timeouts.connect_s, self.connections
        return frozenset(
            rank
            for rank in ranks
            if not (connections[rank] if rank in connections else self._silence_s(rank, now_s) <= limit_s)
        )

    def since_s(self, ranks: Iterable[Rank]) -> float | None:
        """The oldest of the last signs of life of `ranks`, None if there is none."""
        signs = [self.found[r].since_s if r in self.found else self.signs_s.get(r) for r in ranks]
        return min((sign for sign in signs if sign is not None), default=None)

    def with_evidence(self, members: Collection[Rank], reports: Mapping[Rank, Report], now_s: float) -> FailureDetector:
        """Find members without a control connection whose links are broken at every other living member.

        Each of these must have reported, and must name the link. This cannot hold for a living rank while any path to
        it is open; without a path no rank could continue with it anyway.
        """
        unreported = (r for r in members if r not in reports and r not in self.exited)
        suspects = self.cut_off(unreported, now_s)
        if not suspects:
            return self
        others = [r for r in members if r not in suspects and self.is_alive(r, now_s)]
        if not others or any(r not in reports for r in others):
            return self
        evident = {r for r in suspects - self.found.keys() if all(r in reports[other].broken for other in others)}
        return self._finding_of(evident, Certainty.EVIDENT, CauseKind.UNREACHABLE) if evident else self

    def unreported(
        self, missing: Collection[Rank], epoch: Epoch, reports: Mapping[Rank, Report], waited_s: float, now_s: float
    ) -> FailureDetector:
        """Find ranks that were asked `waited_s` ago and have not reported. Suspects, and ranks with a closed control
        connection, are lost after a shorter silence; the others once they have blocked all ranks for too long without
        progress. Only ranks of this `epoch` name suspects. A rank without any connection so far may still connect."""
        if waited_s > self.timeouts.stalled_s:
            return self._hung([rank for rank in missing if not self.gets_on(rank, now_s)])
        accused = {heard.heartbeat.suspect for heard in self.heard.values() if heard.heartbeat.epoch == epoch}
        accused |= {report.suspect for report in reports.values() if report.epoch == epoch}
        accused |= {rank for rank, is_open in self.connections.items() if not is_open}
        blamed = {r for r in missing if r in accused and r not in self.found}
        silent = {r for r in blamed if self._silence_s(r, now_s) > self.timeouts.accused_s}
        return self._finding_of(silent, Certainty.SUSPECTED, CauseKind.SILENT) if silent else self

    def gets_on(self, rank: Rank, now_s: float) -> bool:
        """Whether the rank has shown another place lately: it may read or write a big file, and answer later."""
        heard = self.heard.get(rank)
        return heard is not None and now_s - max(heard.since_s, self.began_s) <= self.timeouts.stalled_s

    def standing_still(self, members: Collection[Rank], now_s: float) -> tuple[FailureDetector, tuple[Rank, ...]]:
        """Find the sinks of the wait-for graph among members without progress; and return all of these members.

        Once one member has been stalled for too long, members stalled for half of that count too: the culprit may have
        stopped a heartbeat later than ranks that wait for it. A rank that waits for one with progress is not stalled.
        """
        here = {r: self.heard[r] for r in members if r in self.heard}
        waits = {r: h.heartbeat.awaited for r, h in here.items()}
        stood_s = {r: now_s - max(h.since_s, self.began_s) for r, h in here.items()}
        stalled = waiting_in_vain(waits, frozenset(r for r, s in stood_s.items() if s > self.timeouts.stalled_s / 2))
        if max((stood_s[r] for r in stalled), default=0.0) <= self.timeouts.stalled_s:
            return self, ()
        hung = wait_graph_sinks(waits, stalled)
        return self._hung(hung), tuple(sorted(stalled))

    def _hung(self, ranks: Collection[Rank]) -> FailureDetector:
        """Add findings for hung ranks. Heartbeats may continue: the last sign of life is the last change of place."""
        new = {
            rank: Finding(
                Certainty.SUSPECTED, CauseKind.STALLED, self.heard[rank].since_s if rank in self.heard else None
            )
            for rank in ranks
            if rank not in self.found
        }
        return replace(self, found={**self.found, **new})

    def _finding_of(self, ranks: Collection[Rank], certainty: Certainty, kind: CauseKind) -> FailureDetector:
        new = {rank: Finding(certainty, kind, self.signs_s.get(rank)) for rank in ranks}
        return replace(self, found={**self.found, **new})

    def _is_silent(self, rank: Rank, now_s: float) -> bool:
        limit_s = self.timeouts.silent_s
        if rank not in self.heard and self.timeouts.unheard_s is not None:
            limit_s = self.timeouts.unheard_s
        return self._silence_s(rank, now_s) > limit_s

    def _silence_s(self, rank: Rank, now_s: float) -> float:
        """Silence since this coordinator could first have received anything from the rank."""
        heard = self.heard.get(rank)
        return now_s - max(heard.at_s if heard else 0.0, self.began_s)


def _place(heartbeat: Heartbeat) -> tuple[object, ...]:
    return heartbeat.epoch, heartbeat.version, heartbeat.phase, heartbeat.awaited


def timeouts(gaps_s: Iterable[float], steps_s: Iterable[float], started: bool, since_s: float = math.inf) -> Timeouts:
    """Compute the deadlines. `gaps_s`: between heartbeats in the last minute, over all ranks; `steps_s`: durations of
    the last steps; `since_s`: time since the newest commit was reported.

    `started`: the job has committed a step, so all of its ranks are up.
    """
    gap_s = max((min(gap, GAP_MOST_S) for gap in gaps_s), default=HEARTBEAT_S)
    steps = tuple(steps_s)
    silent_s = max(SILENT_FLOOR_S, SILENT_OVER_GAP * gap_s)
    # A stop is announced ahead, so that a heartbeat and its answer arrive before it. It follows the step in flight if
    # enough of that is left, even if it is as short as the shortest one.
    late_s = max(gap_s, HEARTBEAT_S)
    left_s = max(0.0, min(steps) - since_s - late_s) if steps else 0.0
    ahead = 1 + math.ceil(max(0.0, 3 * late_s - left_s) / max(statistics.median(steps), 1e-4)) if steps else 1
    return Timeouts(
        silent_s=silent_s,
        accused_s=max(ACCUSED_FLOOR_S, ACCUSED_OVER_GAP * gap_s),
        stalled_s=max(STALLED_FLOOR_S, STALLED_OVER_STEP * max(steps)) if steps else STARTING_S,
        resend_s=max(RESEND_S, gap_s),
        spread_s=SPREAD_S,
        mend_s=max(MEND_S, gap_s),
        ack_s=ACK_S,
        connect_s=CONNECT_OVER_GAP * max(gap_s, HEARTBEAT_S) if started else STARTING_S,
        unheard_s=max(UNHEARD_S, silent_s) if started else STARTING_S,
        ahead=ahead,
    )


class HeartbeatStats:
    """Heartbeat gaps and the step times that ranks measured. The caller passes the times."""

    def __init__(self) -> None:
        self._last_s: dict[Rank, float] = {}
        self._gaps: deque[tuple[float, float]] = deque()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._newest: tuple[Epoch, Version] | None = None
        self._newest_s = -math.inf

    def heard(self, heartbeat: Heartbeat, now_s: float) -> None:
        known = heartbeat.rank in self._last_s
        if known:
            self.gap(now_s - self._last_s[heartbeat.rank], now_s)
        self._last_s[heartbeat.rank] = now_s
        place = (heartbeat.epoch, heartbeat.version)
        newer = self._newest is None or place > self._newest
        if newer:
            self._newest, self._newest_s = place, now_s
        # One report of a step suffices, but a rank that was unheard so far may know a longer one.
        if heartbeat.step_s is not None and (newer or not known):
            self._steps.append(heartbeat.step_s)

    def gap(self, gap_s: float, now_s: float) -> None:
        """Record a gap without messages from some rank; the coordinator's own pauses count too."""
        # Keep only gaps that no later one exceeds: the first is the largest.
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((now_s, gap_s))

    def forget(self, rank: Rank) -> None:
        """Forget a rank that left: its return would be no gap."""
        self._last_s.pop(rank, None)

    def timeouts(self, started: bool, now_s: float) -> Timeouts:
        while self._gaps and now_s - self._gaps[0][0] > WINDOW_S:
            self._gaps.popleft()
        return timeouts((gap for _, gap in self._gaps), self._steps, started, now_s - self._newest_s)
