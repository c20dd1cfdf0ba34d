"""Text of the coordinator's events: lines of `events.jsonl`, and sentences for its log.

In: an event of `protocol/events.py`. Out: an event of `observe/job_events.py` for the launcher, or a sentence.

    Detected(4, (3,), Cause(CauseKind.LEFT, (3,), by=0), since_s)
        ->  Detected(rank=3, ranks=[3], cause="rank 0 aborted the step and reported rank 3 lost", silent_ms=91.0,
                     exited=False)
"""

from __future__ import annotations

from msgspec import UNSET

from elaswave_fx.control.protocol.decide import Resumption
from elaswave_fx.control.protocol.events import (
    Agreed,
    Attempt,
    CalledOff,
    CannotLeave,
    Cause,
    CauseKind,
    Detected,
    Event,
    Over,
    Stopped,
    Stopping,
    Superseded,
    Waiting,
)
from elaswave_fx.observe import job_events
from elaswave_fx.observe.job_events import JobEvent
from elaswave_fx.words import rank_words


def job_event(event: Event, now_s: float) -> JobEvent | None:
    """The line of `events.jsonl`; None for an event of the log alone."""
    match event:
        case Detected():
            return job_events.Detected(
                rank=event.ranks[0] if event.ranks else None,
                ranks=list(event.ranks),
                cause=cause_words(event.cause),
                silent_ms=None if event.since_s is None else round(1e3 * (now_s - event.since_s), 3),
                exited=event.cause.kind is CauseKind.EXITED,
            )
        case Stopping():
            return job_events.Stopping(cause=cause_words(event.cause))
        case CalledOff():
            return job_events.CalledOff(cause="no step follows any more")
        case Waiting():
            return job_events.Waiting(cause=_waiting(event))
        case Stopped():
            return job_events.Stopped(members=list(event.members))
        case Agreed():
            return _agreed(event)
        case CannotLeave():
            return job_events.MustStay(rank=event.rank, reason=event.reason)
        case Over():
            return job_events.Over(reason=event.reason)
    return None


def log_line(event: Event) -> str:
    """The sentence for the coordinator's log."""
    match event:
        case Detected():
            return f"epoch {event.epoch} ends, lost are {list(event.ranks)}: {cause_words(event.cause)}"
        case Stopping():
            return f"epoch {event.epoch} will end: {cause_words(event.cause)}"
        case CalledOff():
            return f"epoch {event.epoch} goes on: no step follows any more after which it could end"
        case Attempt():
            return f"attempt {event.ballot.serial}, {cause_words(event.cause)}: wanted are {list(event.targets)}"
        case Waiting():
            return _waiting(event)
        case Stopped():
            return f"epoch {event.epoch}: members {list(event.members)} have stopped"
        case Agreed():
            return f"epoch {event.epoch}: {_why(event)}"
        case CannotLeave():
            return f"rank {event.rank} was asked to leave, and cannot: {event.reason}"
        case Over():
            return f"the job is over: {event.reason}"
        case Superseded():
            return f"coordinator of term {event.term}: superseded"


def cause_words(cause: Cause) -> str:
    """Why ranks are asked to stop, as a clause."""
    who = rank_words(cause.ranks) if cause.ranks else "no rank"
    match cause.kind:
        case CauseKind.EXITED:
            return f"{who} exited"
        case CauseKind.UNREACHABLE:
            return f"all connections of {who} are broken"
        case CauseKind.SILENT:
            return f"no heartbeat from {who}"
        case CauseKind.STALLED:
            return f"no progress of {who}"
        case CauseKind.LEFT:
            return f"rank {cause.by} aborted the step and reported {f'{who} lost' if cause.ranks else 'no peer lost'}"
        case CauseKind.LINKS:
            return f"links between living ranks are broken, as {who} reported"
        case CauseKind.MEMBERS:
            return "the members have changed"
        case CauseKind.RETRY:
            return "still without a way to go on"
        case CauseKind.JOIN:
            return f"{who} {'joins' if len(cause.ranks) == 1 else 'join'} after version {cause.after}"
        case CauseKind.LEAVE:
            return f"{who} {'leaves' if len(cause.ranks) == 1 else 'leave'} after version {cause.after}"
        case CauseKind.MOVE:
            return f"replicas are in sync; {cause.aim} after version {cause.after}"


def _waiting(event: Waiting) -> str:
    if event.boxes:
        return f"boxes {list(event.boxes)} wait for ranks {list(event.ranks)}"
    return f"links of {list(event.ranks)} are broken, but their replicas are needed"


def _agreed(event: Agreed) -> job_events.Agreed:
    return job_events.Agreed(
        members=list(event.members),
        lost=list(event.lost),
        left=list(event.left) or UNSET,
        back=list(event.back) or UNSET,
        step=event.step,
        steps_redone=event.steps_redone,
        how=None if event.how is None else event.how.value,
        why=_why(event),
        rolled_back_to=event.step if event.rolled_back else UNSET,
    )


def _why(event: Agreed) -> str:
    match event.how:
        case Resumption.FORWARD:
            return f"step {event.step - 1} rolled forward"
        case Resumption.AGAIN:
            return f"step {event.step} is done again"
        case Resumption.BACK:
            return f"no replica of boxes {list(event.lost_boxes)} is left: rolled back to version {event.step}"
        case Resumption.LEDGER:
            before = event.epoch - 1
            return f"all members of epoch {before} are gone: rolled back to version {event.step}, the ledger's"
        case None:
            return "found by the coordinator that took over"
