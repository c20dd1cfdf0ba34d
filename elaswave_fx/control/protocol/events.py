"""What the coordinator tells of its decisions, as values: who was lost and since when, what was agreed, who is awaited.

In: nothing. Out: the events that `coordinator.step` returns beside its messages. The log, the run's events, its
summary, the simulator and the benches read these; the sentences that users see are made from them elsewhere.

    Detected(0, (2,), Cause(CauseKind.EXITED, (2,)), since_s=14.6)   the epoch ends for the loss of rank 2
    Agreed(1, (0, 1, 3), (2,), 60, 1, Resumption.AGAIN)              it is followed by another one
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elaswave_fx.control.protocol.decide import Resumption
from elaswave_fx.control.protocol.types import Ballot, BoxId, Term, Version
from elaswave_fx.plan.work.topology import Epoch, Rank


class CauseKind(StrEnum):
    """Why ranks are asked to stop."""

    EXITED = "exited"
    """The launcher said that the process has ended."""
    UNREACHABLE = "unreachable"
    """The rank's control connection is gone, and its link to every rank that reported."""
    SILENT = "silent"
    """Nothing came from the rank for longer than the deadline."""
    STALLED = "standing still"
    """Ranks sent heartbeats but made no progress."""
    LEFT = "left the step"
    """A rank reported that its step failed."""
    LINKS = "links broken"
    """Living ranks reported broken links between them."""
    MEMBERS = "members changed"
    """A rank was lost, or came back, while the ranks were being asked."""
    RETRY = "asked again"
    """The reports led to no epoch; things may have changed since."""
    JOIN = "joining"
    """Ranks outside the epoch are to become members."""
    LEAVE = "leaving"
    """Ranks that were told to leave are needed no more, or have waited for it too long."""
    MOVE = "owners move"
    """All copies are complete by then, so boxes and units can go where they are wanted, or get copies there."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why, and whose fault. `by`: the rank that reported it; `after`: the version after which a planned stop comes, and
    `aim`: what for, where that is no change of members."""

    kind: CauseKind
    ranks: tuple[Rank, ...] = ()
    by: Rank | None = None
    after: Version | None = None
    aim: str = ""


@dataclass(frozen=True, slots=True)
class Detected:
    """The epoch ends for the loss of `ranks`; empty if a step failed and nobody is accused.

    `since_s`: the last sign of life of the rank that has been silent longest, by the coordinator's clock; None if this
    coordinator never had one.
    """

    epoch: Epoch
    ranks: tuple[Rank, ...]
    cause: Cause
    since_s: float | None


@dataclass(frozen=True, slots=True)
class Stopping:
    """The epoch will end as planned."""

    epoch: Epoch
    cause: Cause


@dataclass(frozen=True, slots=True)
class CalledOff:
    """The epoch will not end as planned: the ranks take no step any more after which it could."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Attempt:
    """The coordinator tries to make an epoch of `targets`; a transition may take several attempts."""

    ballot: Ballot
    cause: Cause
    targets: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nobody goes on without `ranks`: they were left out and alone may have `boxes`, or, if there are none named, their
    links are broken but their copies are needed."""

    epoch: Epoch
    boxes: tuple[BoxId, ...]
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """All `members` of the epoch to come have left their step and reported."""

    epoch: Epoch
    members: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The epoch is in the store. `step`: the one to go on with; `lost_boxes`: those of which no copy was left; `left`:
    ranks that were told to leave, and are not missed; `back`: ranks that had been left out, with what they have.

    `steps_redone` and `how` are None if the coordinator found the epoch when it took over.
    """

    epoch: Epoch
    members: tuple[Rank, ...]
    lost: tuple[Rank, ...]
    step: Version
    steps_redone: int | None = None
    how: Resumption | None = None
    lost_boxes: tuple[BoxId, ...] = ()
    rolled_back: bool = False
    left: tuple[Rank, ...] = ()
    back: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class CannotLeave:
    """A rank that was told to leave some time ago is still needed, and was told so."""

    epoch: Epoch
    rank: Rank
    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """No epoch follows."""

    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another coordinator has taken over; the one of `term` retires."""

    term: Term


Event = Detected | Stopping | CalledOff | Attempt | Waiting | Stopped | Agreed | CannotLeave | Over | Superseded
EVENT_TYPES = (Detected, Stopping, CalledOff, Attempt, Waiting, Stopped, Agreed, CannotLeave, Over, Superseded)


def label(event: Event) -> str:
    """A few words to count events by."""
    if isinstance(event, Attempt):
        return event.cause.kind.value
    if isinstance(event, Agreed) and event.how is not None:
        return event.how.value
    return type(event).__name__.lower()
