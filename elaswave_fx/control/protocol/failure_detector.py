"""Who is lost: a pure function of signs of life and of death, each with its certainty and the time since when.

In: heartbeats, reports, exit words of the launcher, control connections that open and close, links that ranks report
as broken. Out: a `Finding` per rank that counts as lost. The coordinator excludes whom it finds here and nobody else.

    the launcher says that the process of rank 2 ended            ->  CERTAIN, whatever else there is
    its control connection and all of its links are gone          ->  EVIDENT, without waiting for any deadline
    the same, and it never connected to this new coordinator      ->  EVIDENT, when it has had the time to
    its links are gone, its control connection lives              ->  nothing: links mend
    nothing came from it for longer than the deadline             ->  SUSPECTED

Only what is certain lets others use older copies than the lost rank may have: the rest may be alive somewhere. The
deadlines follow from what was measured, and are set by nobody: a machine that delays heartbeats shows it by the gaps
between them, before one of them is long enough to exclude.

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
"""Between two heartbeats of a rank."""

SILENT_FLOOR_S, SILENT_OVER_GAP = 2.0, 8.0
ACCUSED_FLOOR_S, ACCUSED_OVER_GAP = 0.5, 4.0
STALLED_FLOOR_S, STALLED_OVER_STEP = 30.0, 30.0
STARTING_S = 600.0
"""For what has never been measured: processes that load, a first step."""

UNHEARD_S = 10.0
"""For a rank to find a coordinator that took over a running job."""

CONNECT_OVER_GAP = 2.0
"""A rank opens its control connection to a new coordinator with its next heartbeat; while a job starts, when it can."""

RESEND_S = 0.3
SPREAD_S = 0.05
MEND_S = 0.5
ACK_S = 0.5
GAP_MOST_S = 4.0
"""One stop of the whole machine must not make the job deaf for long."""

WINDOW_S = 60.0
RECENT_STEPS = 20


class Certainty(IntEnum):
    """How sure it is that a rank is lost."""

    SUSPECTED = 1
    """A deadline has passed; the process may be alive, and may come back."""
    EVIDENT = 2
    """The process has no connection any more; it may be alive behind a broken network."""
    CERTAIN = 3
    """The process has ended, and its memory is gone."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank that counts as lost. `since_s`: its last sign of life, None if this coordinator never had one."""

    certainty: Certainty
    kind: CauseKind
    since_s: float | None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, derived by the caller: silence that excludes, standstill that excludes the sink, time to resend.

    `spread_s`: time for the news of a loss to reach all ranks and for their reports to come, before they are asked.
    `mend_s`: for broken links between living ranks to be opened again, before one of the ranks has to go.
    `ack_s`: a rank that nothing is to be told hears after so long that it was heard.
    `connect_s`: for living ranks to open their control connections to a coordinator that has just begun, or to the
    first one of a job that has just begun.
    `unheard_s`: silence that excludes a rank of which this coordinator has never heard; None: `silent_s`.
    `ahead`: so many versions before it a planned stop is announced, that it may reach every rank in time.
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
    """The last heartbeat of a rank, when it came, and since when heartbeats show the same place."""

    heartbeat: Heartbeat
    at_s: float
    since_s: float


@dataclass(frozen=True)  # without slots: see changed.py
class FailureDetector:
    """What one coordinator has noticed of the ranks. Methods return a new value; dictionaries are not changed in place.

    `began_s`: since when it listens; a pause of its own starts it afresh. `signs_s`: each rank's last sign of life.
    `connections`: for each rank that has opened its control connection, whether it is open now. `found`: verdicts that
    stand until the rank asks to join, or shows by a report or an open connection that they were wrong.
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
        """A heartbeat came. One that asks to join clears the rank of what was found before."""
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
        """The rank's report came: it lives, and its main thread gets on. What was found against it is void."""
        return replace(self.without([rank]), signs_s={**self.signs_s, rank: now_s})

    def ended(self, rank: Rank) -> FailureDetector:
        """The rank has finished the job: its silence means nothing."""
        return replace(self, heard={other: heard for other, heard in self.heard.items() if other != rank})

    def exit_word(self, rank: Rank) -> FailureDetector:
        """The launcher says that the process of the rank has ended, or is being ended by the kernel."""
        return replace(self, exited=self.exited | {rank})

    def connected(self, rank: Rank, now_s: float) -> FailureDetector:
        """The rank's control connection is open; evidence that was found while it was not is void."""
        found = self.found.get(rank)
        state = self.without([rank]) if found is not None and found.certainty == Certainty.EVIDENT else self
        return replace(state, connections={**self.connections, rank: True}, signs_s={**self.signs_s, rank: now_s})

    def disconnected(self, rank: Rank) -> FailureDetector:
        """The rank's control connection has closed."""
        return replace(self, connections={**self.connections, rank: False})

    def afresh(self, now_s: float) -> FailureDetector:
        """Silence counts from now on, because nobody could have been heard before."""
        return replace(self, began_s=now_s)

    def without(self, ranks: Collection[Rank]) -> FailureDetector:
        """What was found about these ranks is void. Exits stand."""
        return replace(self, found={rank: found for rank, found in self.found.items() if rank not in ranks})

    # --- Findings ---

    def finding(self, rank: Rank, now_s: float) -> Finding | None:
        """Why the rank counts as lost at `now_s`; None for one that counts as alive."""
        if rank in self.exited:
            return Finding(Certainty.CERTAIN, CauseKind.EXITED, self.signs_s.get(rank))
        if rank in self.found:
            return self.found[rank]
        if self._is_silent(rank, now_s):
            return Finding(Certainty.SUSPECTED, CauseKind.SILENT, self.signs_s.get(rank))
        return None

    def is_alive(self, rank: Rank, now_s: float) -> bool:
        """Whether nothing is found against the rank."""
        return rank not in self.exited and rank not in self.found and not self._is_silent(rank, now_s)

    def cut_off(self, ranks: Iterable[Rank], now_s: float) -> frozenset[Rank]:
        """Those of `ranks` without a control connection: it has closed, or was never opened to this coordinator though
        there was time. Of the latter nothing else has come either: they may have died before it began."""
        limit_s, connections = self.timeouts.connect_s, self.connections
        return frozenset(
            rank
            for rank in ranks
            if not (connections[rank] if rank in connections else self._silence_s(rank, now_s) <= limit_s)
        )

    def since_s(self, ranks: Iterable[Rank]) -> float | None:
        """The oldest of the last signs of life of `ranks`; None if there is none."""
        signs = [self.found[r].since_s if r in self.found else self.signs_s.get(r) for r in ranks]
        return min((sign for sign in signs if sign is not None), default=None)

    def with_evidence(self, members: Collection[Rank], reports: Mapping[Rank, Report], now_s: float) -> FailureDetector:
        """Find members without a control connection whose links are broken at every other living member.

        Every one of those must have reported, and must name the link. That cannot be said of a rank that lives while
        any way to it is open; if none is, nobody could go on with it anyway.
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
        """Find ranks that were asked `waited_s` ago, and have not reported: by a shorter silence those who are accused,
        or whose control connection has closed; the others when they let everybody wait for too long and do not get on.
        Ranks of this `epoch` alone are heard as to whom they accuse. One that has opened no control connection to this
        coordinator yet may still dial."""
        if waited_s > self.timeouts.stalled_s:
            return self._hung([rank for rank in missing if not self.gets_on(rank, now_s)])
        accused = {heard.heartbeat.suspect for heard in self.heard.values() if heard.heartbeat.epoch == epoch}
        accused |= {report.suspect for report in reports.values() if report.epoch == epoch}
        accused |= {rank for rank, is_open in self.connections.items() if not is_open}
        blamed = {r for r in missing if r in accused and r not in self.found}
        silent = {r for r in blamed if self._silence_s(r, now_s) > self.timeouts.accused_s}
        return self._finding_of(silent, Certainty.SUSPECTED, CauseKind.SILENT) if silent else self

    def gets_on(self, rank: Rank, now_s: float) -> bool:
        """Whether the rank has shown another place lately: it reads or writes a big file, and will answer after it."""
        heard = self.heard.get(rank)
        return heard is not None and now_s - max(heard.since_s, self.began_s) <= self.timeouts.stalled_s

    def standing_still(self, members: Collection[Rank], now_s: float) -> tuple[FailureDetector, tuple[Rank, ...]]:
        """Find the sinks of the wait-for graph among members that make no progress; and all who stand still.

        When one has stood still for too long, so have those who have done so for half of that: the one to blame may
        have stopped a heartbeat later than whoever waits for it. Who waits for one that gets on does not stand still.
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
        """Their heartbeats may come as ever: the last sign of life is when they last showed another place."""
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
        """Counted from when this coordinator could have heard the rank."""
        heard = self.heard.get(rank)
        return now_s - max(heard.at_s if heard else 0.0, self.began_s)


def _place(heartbeat: Heartbeat) -> tuple[object, ...]:
    return heartbeat.epoch, heartbeat.version, heartbeat.phase, heartbeat.awaited


def timeouts(gaps_s: Iterable[float], steps_s: Iterable[float], started: bool, since_s: float = math.inf) -> Timeouts:
    """The rule. `gaps_s`: between heartbeats in the last minute, over all ranks; `steps_s`: of the last commits;
    `since_s`: since the news of the newest one came.

    `started`: the job has committed a step, so all of its ranks are up.
    """
    gap_s = max((min(gap, GAP_MOST_S) for gap in gaps_s), default=HEARTBEAT_S)
    steps = tuple(steps_s)
    silent_s = max(SILENT_FLOOR_S, SILENT_OVER_GAP * gap_s)
    # A stop is announced so far ahead that news of a heartbeat, and the answer, have arrived by then: after the step in
    # flight, where enough of that is left, even if it is as short as the shortest one.
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
    """The gaps between heartbeats, as they come, and the steps that ranks measured. Times are given by the caller."""

    def __init__(self) -> None:
        self._last_s: dict[Rank, float] = {}
        self._gaps: deque[tuple[float, float]] = deque()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._newest: tuple[Epoch, Version] | None = None
        self._newest_s = -math.inf

    def heard(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat came."""
        known = heartbeat.rank in self._last_s
        if known:
            self.gap(now_s - self._last_s[heartbeat.rank], now_s)
        self._last_s[heartbeat.rank] = now_s
        place = (heartbeat.epoch, heartbeat.version)
        newer = self._newest is None or place > self._newest
        if newer:
            self._newest, self._newest_s = place, now_s
        # One rank's word for a step is enough, but a rank that was unheard so far may know of a longer one.
        if heartbeat.step_s is not None and (newer or not known):
            self._steps.append(heartbeat.step_s)

    def gap(self, gap_s: float, now_s: float) -> None:
        """So long nothing came from somebody; the coordinator's own pauses count too."""
        # Only gaps that no later one exceeds are kept: the first is the largest.
        while self._gaps and self._gaps[-1][1] <= gap_s:
            self._gaps.pop()
        self._gaps.append((now_s, gap_s))

    def forget(self, rank: Rank) -> None:
        """A rank has left: if it comes back, that was no gap."""
        self._last_s.pop(rank, None)

    def timeouts(self, started: bool, now_s: float) -> Timeouts:
        """As of now."""
        while self._gaps and now_s - self._gaps[0][0] > WINDOW_S:
            self._gaps.popleft()
        return timeouts((gap for _, gap in self._gaps), self._steps, started, now_s - self._newest_s)
