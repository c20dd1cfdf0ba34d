"""Messages between ranks and the coordinator, and what both machines ask of the world.

    HEARTBEAT -> ACK                              what was committed, where each rank is
    PROBE_STORE -> STORE_SEEN                     whether the store can be reached, and has this rank's epoch
    JOINER -> WELCOME or REFUSED                the number of a process that has none, and what it has to know
    FETCH -> FILE_PART or REFUSED                 a piece of a file that it needs
    (PREPARE ->) PREPARED -> ACTIVATE or OVER     a new epoch, or none
    HEARTBEAT (leave) -> ... ACK -> GONE          a rank that was told to leave, and is a member no more; or
    HEARTBEAT (overdue) -> MUST_STAY              the others cannot go on without it

What ranks send each other in a step never comes here: it is the engine's (`native/commit/`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.types import (
    Activation,
    Ballot,
    Certificate,
    Report,
    Stamp,
    Term,
    Version,
)
from elaswave_fx.plan.next.replan_request import ReshapeRequest
from elaswave_fx.plan.work.topology import Epoch, Rank

COORDINATOR = Rank(-1)
"""The address of whichever coordinator process is current."""


class Leave(StrEnum):
    """Whether a rank was told to leave; it says so for as long as it is a member, so that every coordinator knows."""

    NO = ""
    WHEN_SPARED = "when spared"
    OVERDUE = "overdue"
    """The time that it was given is over: it goes with fewer copies left than are wanted, if there are any."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Rank to coordinator: where I am, whom I await, whom I accuse; `joining` from a rank outside the epoch.

    `complete`: every box I should keep is there. `lines`: certificates that the ledger may not have. `step_s`: how long
    my last step took, from commit to commit; None before the second commit. Deadlines follow from it, also those of a
    coordinator that has just begun. `close`: every box is there, or will be after the next step, which is no promise.
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
    leave: Leave = Leave.NO
    close: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """Coordinator to rank: heard; the epoch of the store, what the ledger has. `needed`: you are in the epoch, or it
    was made without you and nothing has been committed since, so that your copies may still be wanted."""

    term: Term
    epoch: Epoch
    needed: bool
    ledgered: Version


@dataclass(frozen=True, slots=True)
class Prepare:
    """Coordinator to rank: stop (at once, telling the others, or after the commit of `stop_after`) and report.

    `plan`: the text of the Plan that a planned stop is for, to be read ahead; another one may follow after all. The
    machines do not read it.
    """

    ballot: Ballot
    stop_after: Version | None
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rank to coordinator: stopped; this is what I have. `ballot`: the newest that the rank has heard of."""

    ballot: Ballot
    report: Report


@dataclass(frozen=True, slots=True)
class Activate:
    """Coordinator to rank: the epoch exists. `plan`: the text of its Plan, which the machines do not read. `infos`: of
    its members, so that they can open links that they do not have yet."""

    ballot: Ballot
    activation: Activation
    plan: str = ""
    infos: tuple[MemberInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Rank to coordinator: the job's steps are done and so is what follows them; the process is about to end."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Gone:
    """Rank to coordinator: I was told to leave, am no member any more, and end; what I had in memory is gone."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class MustStay:
    """Coordinator to a rank that is overdue to leave: why the others cannot go on without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankReport:
    """Rank to coordinator, for the launcher, which has not started the rank: a message as workers send it there."""

    rank: Rank
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """Coordinator to rank: there is no next epoch."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProbeStore:
    """Rank to coordinator: read the store for me. `asked_s` is of the rank's clock, and comes back with the answer."""

    rank: Rank
    asked_s: float


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """Coordinator to rank: what the store said when it was read, which was after the rank had asked at `asked_s`: its
    term, its epoch, and whether the rank is `needed`, as in `Ack`. A store that cannot be reached is answered by
    nothing. `answered_s` is of the coordinator's clock."""

    term: Term
    epoch: Epoch
    needed: bool
    asked_s: float
    answered_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Coordinator to a rank: it is none of the job's, and is not heard."""

    reason: str


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process that has no number asks for one. `versions`: as in member info."""

    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """A file that a joiner may fetch, by its name. `size` in bytes; `digest`: its SHA-256, in hexadecimal."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator to a joining rank: its number, `facts` of the job as the launcher has put them down, the member info
    of all members, and the files that it needs. It gets ready by itself, and then sends its own member info."""

    number: Rank
    facts: dict[str, Any]
    infos: tuple[MemberInfo, ...]
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """A joiner asks for a piece of a file that was offered, from byte `offset` on; before or after its number."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """Coordinator to a joiner: the piece, as long as the coordinator makes it; less at the end of the file."""

    name: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Reshape:
    """Somebody who holds the job's token wants other lanes: `dp` of `pp` stages, or with neither the best ones."""

    dp: int | None
    pp: int | None


@dataclass(frozen=True, slots=True)
class Granted:
    """Coordinator to who wanted other lanes: a plan that leads to them is in force, and in the store."""

    reason: str


# --- Events that are not messages ---


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; every machine gets one per heartbeat interval."""


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
class ReshapeWanted:
    """A user's reshape has come on a connection, by which it is answered."""

    connection: int
    reshape: ReshapeRequest


@dataclass(frozen=True, slots=True)
class NumberWanted:
    """A joiner has come, on the connection of that name."""

    connection: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartWanted:
    """The joiner on that connection wants a piece of a file."""

    connection: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of `stamp` is complete on disk."""

    stamp: Stamp


# --- Actions ---


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    target: Rank
    message: Heartbeat | Ack | Prepare | Prepared | Activate | Ended | Gone | MustStay | Over | ProbeStore | StoreSeen


@dataclass(frozen=True, slots=True)
class Numbered:
    """The joiner on that connection has a number, which the register counts among those that were given."""

    connection: int
    number: Rank
