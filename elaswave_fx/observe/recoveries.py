"""Derives recoveries from a run's events: the lost ranks, the time of each part, the replayed steps.

In: events in order of arrival, with the sender's time, and the durations of steps. Out: `recovery` events, which are
the `recoveries` of `summary.json`.

    FaultStrikes, Detected, Stopped, Agreed, Planned, Edited(ms), Transferred(ms, bytes), Resumed(step)
        ->  {"cause": "kill in step 12, phase backward", "rank": 2, "step": 12, "detect_ms": 0.8, …, "mttr_ms": 31.0}

A loss during a recovery belongs to the same entry, which ends with the next committed step. A process's exit may be
known only later, because the kernel frees its memory first; the entry is then written again.

Times count from the last sign of life of the first lost rank: the fault, if the victim reported it; else its last
heartbeat, or the last commit that needed it. So `detect_ms` and `mttr_ms` are upper bounds. Unobserved values are None.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from elaswave_fx.observe.job_events import Agreed, Detected, Left, Planned, Started, Stopped
from elaswave_fx.observe.rank_events import Edited, FaultStrikes, Resumed, Transferred
from elaswave_fx.observe.run_event import RunEvent

_SEEN, _ENDED, _STRUCK = 1, 2, 3
"""Sources of a loss's cause, the better one larger: the other ranks, the process's exit, the fault."""

NORMAL_STEPS = 10
"""Number of steps before a loss whose median is the normal step time."""


_NO_LOSSES = ("slow", "leave", "join")
_MOST_EARLY = 64
"""Number of parts, and of step times, that are kept in case a loss is read after its consequences."""


Kind = TypeVar("Kind", bound=RunEvent, covariant=True)


@dataclass(frozen=True)
class _Part(Generic[Kind]):
    event: Kind
    epoch: int
    at_s: float


_Sign = _Part[FaultStrikes | Left | Detected]


@dataclass
class _Open:
    """A recovery in progress. `first_s`: its first sign; `alive_s`: when all ranks were last known to be alive;
    `signs_s`: last sign of life by rank; `faults_s`: reported times of faults by rank."""

    first_s: float
    alive_s: float | None
    normal_s: float | None
    signs_s: dict[int, float] = field(default_factory=dict)
    faults_s: dict[int, float] = field(default_factory=dict)
    lost_in: int = -1  # newest epoch with a loss; parts of the recovery belong to later ones
    epoch: int = 0
    ranks: list[int] = field(default_factory=list)
    causes: dict[int, tuple[int, str]] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)  # ranks whose processes have ended
    step: int | None = None
    detected_s: float | None = None
    stopped_s: float | None = None
    agreed_s: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def lost(self, rank: int, cause: str, worth: int) -> None:
        """Add a sign of a loss. The best source gives the cause: the fault, the process's exit, the other ranks."""
        if rank not in self.ranks:
            self.ranks.append(rank)
        if worth > self.causes.get(rank, (0, ""))[0]:
            self.causes[rank] = (worth, cause)

    def began_s(self) -> float | None:
        """Return the last sign of life of the first lost rank, or of all ranks if none was lost. An earlier step that
        failed for another reason belongs to the same recovery."""
        lost = [self._last_sign_s(rank) for rank in self.ranks or self.faults_s] or [self.alive_s]
        known = [sign_s for sign_s in lost if sign_s is not None]
        return min(self.first_s, *known) if known else None

    def _last_sign_s(self, rank: int) -> float | None:
        """Return a rank's last sign of life. A fault's time, when the launcher read it, may follow its detection."""
        fault_s = self.faults_s.get(rank)
        if fault_s is not None and (self.detected_s is None or fault_s <= self.detected_s):
            return fault_s
        return self.signs_s.get(rank, self.alive_s)

    def settle(self, members: list[int], lost: list[int]) -> None:
        """Drop suspects that stayed: where a link broke, both ends suspect each other."""
        self.ranks = [rank for rank in self.ranks if rank not in members]
        for rank in lost:
            self.lost(rank, f"the others went on without rank {rank}", _SEEN)


class Recoveries:
    """All recoveries of a run, from the recorder's events."""

    def __init__(self, earlier: Iterable[dict[str, Any]] = ()) -> None:
        """`earlier`: recoveries of earlier parts of the run."""
        self._closed: list[dict[str, Any]] = []
        for entry in earlier:
            if self._closed and all(self._closed[-1].get(key) == entry.get(key) for key in ("rank", "step", "mttr_ms")):
                self._closed.pop()  # It was written again.
            self._closed.append(entry)
        self._early: deque[_Part] = deque(maxlen=_MOST_EARLY)  # parts that belong to no recovery yet
        self._last: tuple[_Open, float] | None = None  # the newest finished recovery, and its end
        self._unexplained: dict[int, _Open] = {}  # by rank: the newest recovery, while the rank's exit is unknown
        self._steps_s: deque[float] = deque(maxlen=NORMAL_STEPS)
        self._alive_s: deque[float] = deque(maxlen=_MOST_EARLY)  # when all ranks were alive
        self._open: _Open | None = None
        self._settled: set[int] = set()  # lost ranks without which the others resumed

    def step(self, step_ms: float, alive_at_s: float | None = None) -> None:
        """Record a committed step; all of its ranks were alive at `alive_at_s`."""
        if self._open is not None:
            return
        self._steps_s.append(step_ms / 1e3)
        if alive_at_s is not None:
            self._alive_s.append(alive_at_s)

    def event(self, event: RunEvent, epoch: int, at_s: float) -> dict[str, Any] | None:
        """Take one event, and return the recovery that ends with it; those that have nothing to do with recovery are
        passed over."""
        match event:
            case Started():
                self._alive_s.append(at_s)
            case Left(rank=rank) if rank in self._unexplained:
                return self._explain(rank, event.cause)
            case FaultStrikes() if event.fault in _NO_LOSSES or event.seconds is not None:
                return None  # A cut with an end is a loss only if the others take it for one.
            case FaultStrikes() | Left() | Detected():
                return self._take_sign(_Part(event, epoch, at_s))
            case Stopped() | Agreed() | Planned() | Edited() | Transferred() | Resumed():
                return self._take_part(_Part(event, epoch, at_s))
        return None

    def _take_part(self, part: _Part) -> dict[str, Any] | None:
        """Record a part. Ranks and coordinator are read from different channels, so a part may arrive before its loss,
        or after the commit; the entry is then written again."""
        if self._open is not None:
            return self._take(self._open, part)
        if self._last is not None and not isinstance(part.event, Resumed) and part.at_s <= self._last[1]:
            now, resumed_s = self._last
            self._on_part(now, part)
            self._closed[-1] = _entry(now, resumed_s)
            return self._closed[-1]
        self._early.append(part)
        return None

    def _take_sign(self, sign: _Sign) -> dict[str, Any] | None:
        """Take a sign of a loss. One of ranks without which the others have gone on already is none of another loss:
        the entry is told again with the cause that it knows, unless the rank has ended because it was left out."""
        ranks = _ranks_of(sign)
        if self._last is not None and ranks and self._settled.issuperset(ranks):
            now, resumed_s = self._last
            if isinstance(sign.event, Left) or not set(ranks).issubset(now.ranks):
                return None
            for rank in ranks:
                now.lost(rank, *_told(sign))
            self._closed[-1] = _entry(now, resumed_s)
            return self._closed[-1]
        if self._open is None:
            self._open = _Open(sign.at_s, None, statistics.median(self._steps_s) if self._steps_s else None)
        now = self._open
        now.first_s = min(now.first_s, sign.at_s)
        # Later commits may have been read before the sign.
        now.alive_s = max((alive_s for alive_s in self._alive_s if alive_s <= now.first_s), default=None)
        _add_sign(now, sign)
        return self._take_early(now)

    def _take_early(self, now: _Open) -> dict[str, Any] | None:
        """Record parts that were read before the loss. Earlier than the last sign of life of all: a planned epoch's."""
        began_s = now.first_s if now.alive_s is None else min(now.first_s, now.alive_s)
        early = sorted((part for part in self._early if part.at_s >= began_s), key=lambda part: part.at_s)
        for part in early:
            self._early.remove(part)
            entry = self._take(now, part)
            if entry is not None:
                return entry
        return None

    def _take(self, now: _Open, part: _Part) -> dict[str, Any] | None:
        if part.epoch <= now.lost_in:
            return None  # It belongs to the start of the epoch in which the rank was lost, and was read late.
        if isinstance(part.event, Resumed):
            return self._close(now, part)
        self._on_part(now, part)
        return None

    def _on_part(self, now: _Open, part: _Part) -> None:
        match part.event:
            case Stopped():
                now.stopped_s = part.at_s
            case Agreed() as agreed:
                now.epoch, now.agreed_s = part.epoch, part.at_s
                now.settle(agreed.members, agreed.lost)
                now.step = agreed.step if now.step is None else now.step
                now.fields["members"] = len(agreed.members)
                if agreed.steps_redone is not None:
                    self._add(now, steps_redone=agreed.steps_redone)
                if agreed.rolled_back_to is not UNSET:
                    now.fields["rolled_back_to"] = agreed.rolled_back_to
            case Planned(plan_ms=float(plan_ms)):
                self._add(now, plan_ms=plan_ms)
            case Edited(ms=ms):
                self._add(now, edit_ms=ms)
            case Transferred() as moved:
                self._add(now, transfer_ms=moved.ms, bytes_moved=moved.bytes)

    def _close(self, now: _Open, part: _Part) -> dict[str, Any]:
        self._settled.update(now.ranks)
        self._open = None
        self._closed.append(_entry(now, part.at_s))
        self._last = (now, part.at_s)
        self._unexplained = {rank: now for rank in now.exited.intersection(now.ranks) if now.causes[rank][0] < _ENDED}
        return self._closed[-1]

    def _explain(self, rank: int, cause: str) -> dict[str, Any]:
        """Return the newest recovery again, with the now known exit of a rank's process."""
        now = self._unexplained.pop(rank)
        now.lost(rank, cause, _ENDED)
        self._closed[-1] = {**self._closed[-1], "cause": _cause(now)}
        return self._closed[-1]

    def _add(self, now: _Open, **parts: float) -> None:
        """Add durations of parts, including those of superseded epochs, which the recovery took too."""
        for name, value in parts.items():
            now.fields[name] = now.fields.get(name, 0) + value

    def entries(self) -> tuple[dict[str, Any], ...]:
        """Return all recoveries so far, including the one in progress."""
        unfinished = self.unfinished()
        return (*self._closed, *([unfinished] if unfinished is not None else ()))

    def unfinished(self) -> dict[str, Any] | None:
        """Return the recovery in progress, which has no committed step and no `mttr_ms`."""
        return _entry(self._open, None) if self._open is not None else None


def _ranks_of(sign: _Sign) -> list[int]:
    named = sign.event.ranks if isinstance(sign.event, Detected) else UNSET
    return list(named or [rank for rank in (sign.event.rank,) if isinstance(rank, int)])


def _told(sign: _Sign) -> tuple[str, int]:
    """Return the cause that a sign reports, and how well its reporter knows it."""
    match sign.event:
        case FaultStrikes() as fault:
            return f"{fault.fault} in step {fault.step}, phase {fault.phase}", _STRUCK
        case Left(cause=cause):
            return cause, _ENDED
        case Detected(cause=cause):
            return cause, _SEEN


def _add_sign(now: _Open, sign: _Sign) -> None:
    ranks = _ranks_of(sign)
    for rank in ranks:
        now.lost(rank, *_told(sign))
    if not isinstance(sign.event, Left):  # The launcher, which sees processes end, knows of no epochs.
        now.lost_in = max(now.lost_in, sign.epoch)
    match sign.event:
        case FaultStrikes(rank=int(rank), step=step):
            now.faults_s.setdefault(rank, sign.at_s)
            now.step = step if now.step is None else now.step
        case Detected() as detected:
            now.detected_s = sign.at_s if now.detected_s is None else now.detected_s
            now.exited.update(ranks if detected.exited is True else ())
            if isinstance(detected.silent_ms, (int, float)):
                sign_s = sign.at_s - detected.silent_ms / 1e3
                for rank in ranks:
                    now.signs_s[rank] = max(sign_s, now.alive_s or sign_s, now.signs_s.get(rank, sign_s))


def _entry(done: _Open, resumed_s: float | None) -> dict[str, Any]:
    began_s = done.began_s()
    detect_s, abort_s = _between(began_s, done.detected_s), _between(done.detected_s, done.stopped_s)
    agree_s = _between(done.stopped_s, done.agreed_s)
    if agree_s is not None:
        agree_s -= done.fields.get("plan_ms", 0.0) / 1e3  # The plan is made between the last report and the epoch.
    whole_s = _between(began_s, resumed_s)
    mttr_s = whole_s - (done.normal_s or 0.0) if whole_s is not None else None
    unobserved = dict.fromkeys(("plan_ms", "edit_ms", "transfer_ms", "steps_redone", "bytes_moved"))
    parts = {**unobserved, **done.fields}
    return {
        "cause": _cause(done),
        "rank": done.ranks[0] if done.ranks else None,
        "ranks": done.ranks,
        "step": done.step,
        "epoch": done.epoch,
        "detect_ms": _ms(detect_s),
        "abort_ms": _ms(abort_s),
        "agree_ms": _ms(agree_s),
        "mttr_ms": _ms(mttr_s),
        **{name: round(value, 3) if isinstance(value, float) else value for name, value in parts.items()},
    }


def _cause(done: _Open) -> str:
    """Return the causes of the lost ranks; if all stayed, the first suspicion."""
    if done.ranks:
        return "; ".join(done.causes[rank][1] for rank in done.ranks)
    return next((f"{cause}; nobody was lost" for _, cause in done.causes.values()), "a step that failed")


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
