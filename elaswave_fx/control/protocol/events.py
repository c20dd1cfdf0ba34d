"""The coordinator's decisions as values: which ranks were lost and since when, what was agreed, which are awaited.

In: nothing. Out: the events that `coordinator.step` returns beside its messages. The log, the run's events and summary,
the simulator and the benches read these; users' text is made elsewhere.

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
    """The launcher reported the end of the process."""
    UNREACHABLE = "unreachable"
    """The rank's control connection is closed, and so is its link to every rank that reported."""
    SILENT = "silent"
    """No message from the rank within the deadline."""
    STALLED = "standing still"
    """Ranks sent heartbeats but made no progress."""
    LEFT = "left the step"
    """A rank reported that its step failed."""
    LINKS = "links broken"
    """Living ranks reported broken links between them."""
    MEMBERS = "members changed"
    """A rank was lost, or rejoined, while the ranks were being asked."""
    RETRY = "asked again"
    """The reports led to no epoch; the state may have changed since."""
    JOIN = "joining"
    """Joiners become members."""
    LEAVE = "leaving"
    """Draining ranks can be spared, or are overdue."""
    MOVE = "owners move"
    """All replicas are in sync, so boxes and units can move to their targets, or get replicas there."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason and the ranks concerned. `by`: the rank that reported it; `after`: the version of a planned stop;
    `aim`: its purpose, if the members stay."""

    kind: CauseKind
    ranks: tuple[Rank, ...] = ()
    by: Rank | None = None
    after: Version | None = None
    aim: str = ""


@dataclass(frozen=True, slots=True)
class Detected:
    """The epoch ends for the loss of `ranks`; empty if a step failed and there is no suspect.

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
    """The planned reconfiguration is cancelled: no step follows after which it could come."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Attempt:
    """The coordinator tries to make an epoch of `targets`; a transition may take several attempts."""

    ballot: Ballot
    cause: Cause
    targets: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The members wait for `ranks`, evicted ones that may hold the only replicas of `boxes`; or, without `boxes`, ranks
    whose links are broken but whose replicas are needed."""

    epoch: Epoch
    boxes: tuple[BoxId, ...]
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    """All `members` of the next epoch have left their step and reported."""

    epoch: Epoch
    members: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Agreed:
    """The epoch is in the store. `step`: the one to resume at; `lost_boxes`: boxes without a replica; `left`: drained
    ranks; `back`: evicted ranks that rejoin with their state.

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
    """An overdue draining rank is still needed, and was notified."""

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
    """Return a short label for counting events."""
    if isinstance(event, Attempt):
        return event.cause.kind.value
    if isinstance(event, Agreed) and event.how is not None:
        return event.how.value
    return type(event).__name__.lower()
