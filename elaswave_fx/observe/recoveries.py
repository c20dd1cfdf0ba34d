"""From a run's events to its recoveries: what was lost, how long each part took, what was done again.

In: events as they come, with the sender's time, and the durations of steps. Out: `summary.json`'s `recoveries`.

    fault, detected, stopped, agreed, planned, edited{ms}, transferred{ms, bytes}, resumed{step, redone}
        ->  {"cause": "kill in step 12, phase backward", "rank": 2, "step": 12, "detect_ms": 0.8, …, "mttr_ms": 31.0}

A loss while another one is being recovered from belongs to the same entry: it ends when a step is committed again.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NORMAL_STEPS = 10
"""So many steps before a loss say how long one takes."""


@dataclass
class _Open:
    """A recovery under way. `began_s`: the fault, or the first sign of it."""

    began_s: float
    normal_s: float
    epoch: int = 0
    ranks: list[int] = field(default_factory=list)
    causes: dict[int, tuple[int, str]] = field(default_factory=dict)
    step: int | None = None
    detected_s: float | None = None
    stopped_s: float | None = None
    agreed_s: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def lost(self, rank: int | None, cause: str, worth: int) -> None:
        """One more sign. Who knows best tells the cause: the fault itself, then the process's end, then the others."""
        if rank is None:
            return
        if rank not in self.ranks:
            self.ranks.append(rank)
        if worth > self.causes.get(rank, (0, ""))[0]:
            self.causes[rank] = (worth, cause)

    def settle(self, members: list[int], lost: list[int]) -> None:
        """Accused ranks may have stayed: where links broke, both ends accuse each other."""
        self.ranks = [rank for rank in self.ranks if rank not in members]
        for rank in lost:
            self.lost(rank, f"the others went on without rank {rank}", 1)


class Recoveries:
    """Fed by the recorder."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=NORMAL_STEPS)
        self._open: _Open | None = None
        self._closed: list[dict[str, Any]] = []
        self._settled: set[int] = set()  # ranks that were lost and gone on without

    def step(self, step_ms: float) -> None:
        """A step was committed."""
        if self._open is None:
            self._steps_s.append(step_ms / 1e3)

    def event(self, kind: str, epoch: int, at_s: float, fields: Mapping[str, Any]) -> None:
        """One event; those that have nothing to do with recovery are passed over."""
        if kind in ("fault", "left", "detected"):
            self._on_sign(kind, at_s, fields)
        elif self._open is not None:
            self._on_part(self._open, kind, epoch, at_s, fields)

    def _on_sign(self, kind: str, at_s: float, fields: Mapping[str, Any]) -> None:
        if kind == "left" and fields["rank"] in self._settled:
            return  # it was left out before, and ends now
        if self._open is None:
            normal_s = statistics.median(self._steps_s) if self._steps_s else 0.0
            self._open = _Open(at_s, normal_s)
        now = self._open
        # The victim's word and the coordinator's come by different ways.
        now.began_s = min(now.began_s, at_s)
        if kind == "fault":
            now.lost(fields["rank"], f"{fields['fault']} in step {fields['step']}, phase {fields['phase']}", 3)
            now.step = fields["step"] if now.step is None else now.step
        elif kind == "left":
            now.lost(fields["rank"], fields["cause"], 2)
        else:
            now.detected_s = at_s if now.detected_s is None else now.detected_s
            for rank in fields.get("ranks") or [fields.get("rank")]:
                now.lost(rank, fields["cause"], 1)

    def _on_part(self, now: _Open, kind: str, epoch: int, at_s: float, fields: Mapping[str, Any]) -> None:
        if kind == "stopped":
            now.stopped_s = at_s
        elif kind == "agreed":
            now.epoch, now.agreed_s = epoch, at_s
            now.settle(fields["members"], fields["lost"])
            now.step = fields["step"] if now.step is None else now.step
            redone = now.fields.get("steps_redone", 0) + fields["steps_redone"]
            now.fields |= {"steps_redone": redone, "members": len(fields["members"])}
            if "rolled_back_to" in fields:
                now.fields["rolled_back_to"] = fields["rolled_back_to"]
        elif kind == "planned":
            self._add(now, plan_ms=fields["plan_ms"])
        elif kind == "edited":
            self._add(now, edit_ms=fields["ms"])
        elif kind == "transferred":
            self._add(now, transfer_ms=fields["ms"], bytes_moved=fields["bytes"])
        elif kind == "resumed":
            now.fields["steps_redone"] = fields.get("redone", now.fields.get("steps_redone", 0))
            self._closed.append(_entry(now, at_s))
            self._settled.update(now.ranks)
            self._open = None

    def _add(self, now: _Open, **parts: float) -> None:
        """Parts of superseded epochs count too: they passed before the job went on."""
        for name, value in parts.items():
            now.fields[name] = now.fields.get(name, 0) + value

    def entries(self) -> tuple[dict[str, Any], ...]:
        """Every recovery so far; one that never came to a committed step has no `mttr_ms`."""
        return (*self._closed, *([_entry(self._open, None)] if self._open is not None else ()))


def _entry(done: _Open, resumed_s: float | None) -> dict[str, Any]:
    detect_s, abort_s = _between(done.began_s, done.detected_s), _between(done.detected_s, done.stopped_s)
    agree_s = _between(done.stopped_s, done.agreed_s)
    if agree_s is not None:
        agree_s -= done.fields.get("plan_ms", 0.0) / 1e3  # the plan was made between the last report and the epoch
    mttr_s = resumed_s - done.began_s - done.normal_s if resumed_s is not None else None
    parts = {"plan_ms": None, "edit_ms": None, "transfer_ms": None, "steps_redone": 0, "bytes_moved": 0, **done.fields}
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
    """Of those who were lost; if all have stayed, what it looked like at first."""
    if done.ranks:
        return "; ".join(done.causes[rank][1] for rank in done.ranks)
    return next((f"{cause}; nobody was lost" for _, cause in done.causes.values()), "a step that failed")


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
