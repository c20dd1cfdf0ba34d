"""Messages between ranks and the coordinator, and what both machines ask of the world.

    HEARTBEAT -> ACK                              what was committed, where each rank is
    (PREPARE ->) PREPARED -> ACTIVATE or OVER     a new epoch, or none

What ranks send each other in a step never comes here: it is the engine's (`native/commit/`).
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.control.protocol.types import (
    Activation,
    Ballot,
    Certificate,
    Report,
    Stamp,
    Term,
    Version,
)
from elaswave_fx.plan.topology import Epoch, Rank

COORDINATOR = Rank(-1)
"""The address of whichever coordinator process is current."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Rank to coordinator: where I am, whom I await, whom I accuse; `joining` from a rank outside the epoch.

    `complete`: every box I should keep is there. `lines`: certificates that the ledger may not have. `step_s`: how long
    my last step took, from commit to commit; None before the second commit. Deadlines follow from it, also those of a
    coordinator that has just begun.
    """

    rank: Rank
    epoch: Epoch
    version: Version
    phase: str
    awaited: Rank | None
    suspect: Rank | None
    joining: bool
    complete: bool
    lines: tuple[Certificate, ...]
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """Coordinator to rank: heard; the epoch of the store, whether you are in it, what the ledger has."""

    term: Term
    epoch: Epoch
    member: bool
    ledgered: Version


@dataclass(frozen=True, slots=True)
class Prepare:
    """Coordinator to rank: stop (at once, telling the others, or after the commit of `stop_after`) and report."""

    ballot: Ballot
    stop_after: Version | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rank to coordinator: stopped; this is what I have. `ballot`: the newest that the rank has heard of."""

    ballot: Ballot
    report: Report


@dataclass(frozen=True, slots=True)
class Activate:
    """Coordinator to rank: the epoch exists. `plan`: the text of its Plan, which the machines do not read."""

    ballot: Ballot
    activation: Activation
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """Rank to coordinator: the job's steps are done and so is what follows them; the process is about to end."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Over:
    """Coordinator to rank: there is no next epoch."""

    reason: str


# --- Events that are not messages ---


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; every machine gets one per heartbeat interval."""


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """The store answered a rank: its term, epoch and members."""

    term: Term
    epoch: Epoch
    members: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Exited:
    """The launcher to the coordinator: the process of `rank` has ended, or the kernel has begun to end it.

    The latter is as certain: its memory is lost, and none of its threads comes back from the kernel. One that ran on
    another core may have sent something some microseconds after; like whatever is still on its links, that carries the
    old epoch. Until a survivor has reported it counts, and the report says so; after that it is refused.
    """

    rank: Rank


@dataclass(frozen=True, slots=True)
class Connected:
    """The control connection of `rank` to this coordinator is open."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The control connection of `rank` has closed: the process has ended, or the way to it is broken."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of `stamp` is complete on disk."""

    stamp: Stamp


# --- Actions ---


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    target: Rank
    message: Heartbeat | Ack | Prepare | Prepared | Activate | Ended | Over


@dataclass(frozen=True, slots=True)
class ProbeStore:
    """Read the store; answered by StoreSeen if it can be reached."""
