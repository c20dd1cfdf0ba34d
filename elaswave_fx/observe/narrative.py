"""Events as lines of the log: one for a recovery or a reconfiguration, their parts as details (`log.level=debug`).

describe(Agreed(members=[0, 1, 3], lost=[2], step=118, steps_redone=1, how="done again", why="…"), 5)
    ->  "epoch 5: ranks 0, 1, 3 resume at step 118, 1 step replayed"
recovered(entry, [0, 1, 3])
    ->  "epoch 5: rank 2 failed (killed by SIGKILL); resumed at step 118 on ranks 0, 1, 3 in 59 ms"
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import UNSET, UnsetType

from elaswave_fx.observe import job_events, rank_events
from elaswave_fx.observe.run_event import RunEvent, fields_of
from elaswave_fx.observe.run_log import RunLog
from elaswave_fx.words import rank_words

Fields = Mapping[str, Any]

_PARTS = ("pipeline", "exchange", "update", "step")
"""Of a step, in `predicted`."""

_DETAILS = (
    job_events.Agreed, job_events.CalledOff, job_events.Detected, job_events.Planned, job_events.Stopped,
    job_events.Stopping, rank_events.ReplicasInSync, rank_events.Edited, rank_events.Joined, rank_events.Resumed,
    rank_events.Transferred,
)  # fmt: skip
"""Parts of a recovery or of a planned reconfiguration, of which there is one line in all."""


class Narrator:
    """Adds the lines of events to the log; the launcher's one thread uses it."""

    def __init__(self, log: RunLog, members: Collection[int]) -> None:
        """`members`: the ranks of the first epoch."""
        self._log, self._members, self._ranks = log, set(members), len(members)
        self._reported: set[int] = set()  # Recoveries, by the epoch to which they have led.

    def event(self, event: RunEvent, epoch: int, recovery: Fields | None) -> None:
        """Add the line of an event. `recovery`: what `Recorder.event` has returned for it."""
        (self._log.debug if self._is_detail(event, recovery) else self._log.info)(describe(event, epoch))
        if isinstance(event, job_events.Agreed):
            change = reconfigured(epoch, self._members, event)
            self._members = set(event.members)
            if change is not None:
                self._log.info(change)
        if isinstance(event, job_events.Planned) and event.layout is not UNSET:
            self._log.info(f"epoch {epoch}: the same ranks take another layout: {event.layout}")
        if recovery is not None and "members" in recovery and recovery["epoch"] not in self._reported:
            self._reported.add(recovery["epoch"])
            self._log.info(recovered(recovery, self._members))

    def _is_detail(self, event: RunEvent, recovery: Fields | None) -> bool:
        match event:
            case rank_events.ClockSet():
                return event.outcome == "applied"
            case rank_events.Predicted():  # Steps are predicted for ranks that have a core each, or need none.
                return event.overslept_share is None and len(os.sched_getaffinity(0)) < self._ranks
            case job_events.Left() | rank_events.Drained():
                # The line of the recovery names the cause, if it is still to come.
                return recovery is None or recovery["epoch"] not in self._reported
        return isinstance(event, _DETAILS)


def recovered(entry: Fields, members: Collection[int]) -> str:
    """Return the line of a recovery, an entry of `Recoveries` that has ended with `members`."""
    if entry["ranks"]:
        own = re.compile(rf"^rank ({'|'.join(map(str, entry['ranks']))}):? ")
        causes = "; ".join(own.sub("", cause) for cause in entry["cause"].split("; "))
        what = f"{rank_words(entry['ranks'])} failed ({causes})"
    else:
        what = f"a step failed ({entry['cause']})"
    back = f", ROLLED BACK to step {entry['rolled_back_to']}" if "rolled_back_to" in entry else ""
    took = f" in {entry['mttr_ms']:.0f} ms" if entry["mttr_ms"] is not None else ""
    return (
        f"epoch {entry['epoch']}: {what}; resumed at step {entry['step']}{back} on {rank_words(sorted(members))}{took}"
    )


def reconfigured(epoch: int, before: Collection[int], agreed: job_events.Agreed) -> str | None:
    """Return the line of an `agreed` event whose epoch has other members than `before` for another reason than a
    failure; None if it has not."""
    back, left = _given(agreed.back), _given(agreed.left)
    joined = sorted(set(agreed.members) - set(before) - set(back))
    changes = [f"{rank_words(ranks)} {verb}" for ranks, verb in (
        (joined, "joined"), (back, "rejoined with the state that they had"), (left, "left as asked"),
    ) if ranks]  # fmt: skip
    if not changes:
        return None
    return f"epoch {epoch}: {', '.join(changes)}; resumes at step {agreed.step} on {rank_words(agreed.members)}"


def describe(event: RunEvent, epoch: int) -> str:
    """Return the line of an event; one that has no sentence of its own lists its fields."""
    match event:
        case rank_events.FaultStrikes():
            return f"injected fault: {_fault(event)}"
        case job_events.Left() | rank_events.Drained():
            return event.cause
        case job_events.MustStay():
            return f"rank {event.rank} was asked to leave, and cannot: {event.reason}"
        case rank_events.Joined():
            return f"epoch {epoch}: rank {event.rank} joined at step {event.step}"
        case job_events.Detected():
            return f"epoch {epoch}: failure detected: {event.cause}"
        case job_events.Stopping(cause=str(cause)):
            return f"epoch {epoch}: planned reconfiguration: {cause}"
        case job_events.CalledOff():
            return f"epoch {epoch}: planned reconfiguration cancelled: {event.cause}"
        case job_events.Stopped():
            return f"{rank_words(event.members) if event.members else ''} stopped and reported"
        case job_events.Agreed():
            return f"epoch {epoch}: {_agreed(event)}"
        case job_events.Planned():
            return f"epoch {epoch}: {_planned(event)}"
        case job_events.Slowed():
            return f"epoch {epoch}: {_slowed(event)}"
        case rank_events.Edited():
            return f"epoch {epoch}: edited in place in {event.ms:.1f} ms"
        case rank_events.Transferred():
            syncing = event.bytes_behind / 2**20
            replicas = f"; {syncing:.2f} MiB of replicas sync in the background" if syncing else ""
            return f"epoch {epoch}: moved {event.bytes / 2**20:.2f} MiB of parameters in {event.ms:.1f} ms{replicas}"
        case rank_events.ReplicasInSync():
            taken = f"{event.bytes / 2**20:.2f} MiB were buffered at most"
            return f"epoch {epoch}: rank {event.rank}: replicas are in sync; {taken}"
        case rank_events.Resumed():
            return f"epoch {epoch}: step {event.step} committed"
        case job_events.Coordinator():
            return f"coordinator failed: {event.cause}; another one takes over, training continues"
        case rank_events.ClockSet():
            clock = "its clock as before" if event.wanted_mhz is None else f"{event.wanted_mhz:g} MHz"
            return f"rank {event.rank}: {clock}: {event.outcome}{f', {event.why}' if event.why else ''}"
        case rank_events.Predicted():
            return _predicted(event)
        case rank_events.ModelElsewhere():
            return f"{event.run_dir}: the model cannot be written there; it is in {event.path} on {event.host}"
        case job_events.Over():
            return f"the job is over: {event.reason}"
    return _listed(event)


def _listed(event: RunEvent) -> str:
    fields = fields_of(event)
    kind, rank = fields.pop("event").replace("_", " "), fields.pop("rank", None)
    who = f"rank {rank}: " if rank is not None else ""
    return f"{who}{kind}" + (f": {', '.join(f'{key} {value}' for key, value in fields.items())}" if fields else "")


def _fault(fault: rank_events.FaultStrikes) -> str:
    where = f"step {fault.step}, phase {fault.phase}"
    match fault.fault:
        case "slow":
            return f"rank {fault.rank} runs at {fault.speed:g} of its speed from step {fault.step} on"
        case "join":
            return f"a process starts, which joins as rank {fault.rank}"
        case "leave":
            return f"rank {fault.rank} is asked to leave in {where}"
    lasts = f", for {fault.seconds:g} s" if fault.seconds is not None else ""
    return f"{fault.fault} of rank {fault.rank} in {where}{lasts}"


def _agreed(agreed: job_events.Agreed) -> str:
    redone = agreed.steps_redone
    again = f", {redone} step{'s' if redone != 1 else ''} replayed" if redone else ", no step replayed"
    again = "" if redone is None else again
    back = f", ROLLED BACK to step {agreed.rolled_back_to}" if agreed.rolled_back_to is not UNSET else ""
    left, returned = _given(agreed.left), _given(agreed.back)
    without = f", without {rank_words(left)}, which left as asked" if left else ""
    why = "" if agreed.how == "done again" else f" ({agreed.why})"
    rejoined = f"; {rank_words(returned)} rejoined with the state that they had" if returned else ""
    return f"{rank_words(agreed.members)} resume at step {agreed.step}{without}{again}{back}{why}{rejoined}"


def _planned(planned: job_events.Planned) -> str:
    if planned.plan_ms is UNSET:
        return "planned"
    changes = "".join(f"\n    {line}" for line in _given(planned.lines))
    return f"planned in {planned.plan_ms:.1f} ms: {planned.reason}{changes}"


def _slowed(slowed: job_events.Slowed) -> str:
    tried = set(map(str, slowed.tried))
    found = [f"rank {rank} runs at speed {speed:g}" for rank, speed in slowed.speeds.items() if rank not in tried]
    parts = [f"measured: {', '.join(found)}; work is rebalanced"] if found else []
    parts += [
        f"rank {rank}, which had no work because it was slow, gets a little on probation, at speed {speed:g}"
        for rank, speed in slowed.speeds.items()
        if rank in tried
    ]
    return "; ".join(parts)


def _predicted(found: rank_events.Predicted) -> str:
    parts = (
        f"{part} {getattr(found, f'{part}_ms'):.1f} ({getattr(found, f'predicted_{part}_ms'):.1f})" for part in _PARTS
    )
    overslept = f"; overslept {found.overslept_share:.2%}" if found.overslept_share is not None else ""
    return (
        f"measured (predicted) ms, medians of {found.steps} steps of {found.ranks} ranks: {', '.join(parts)}; "
        f"{found.step_over_predicted:.3f} of predicted{overslept}"
    )


def _given(values: list[Any] | UnsetType) -> list[Any]:
    return [] if values is UNSET else values
