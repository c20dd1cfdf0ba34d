"""Messages between ranks and the coordinator, and other events and actions of both machines.

    HEARTBEAT -> ACK                              what was committed, where each rank is
    PROBE_STORE -> STORE_SEEN                     whether the store can be reached, and has this rank's epoch
    JOIN_REQUEST -> WELCOME or REFUSED            a number for a process without one, and its data to join
    FETCH -> FILE_PART or REFUSED                 a piece of a file that it needs
    MEMBERS_REQUEST -> MEMBERS or REFUSED         where the members listen, for a rank without links
    (PREPARE ->) PREPARED -> ACTIVATE or OVER     a new epoch, or none
    HEARTBEAT (leave) -> ... ACK -> GONE          a draining rank, which is no member any more; or
    HEARTBEAT (overdue) -> MUST_STAY              the others cannot continue without it

Messages between ranks within a step belong to the engine (`native/commit/`).
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
"""The address of the current coordinator process."""


class Leave(StrEnum):
    """Whether a rank is draining; sent in every heartbeat of a member, so that every coordinator knows."""

    NO = ""
    WHEN_SPARED = "when spared"
    OVERDUE = "overdue"
    """The grace period is over: it leaves with fewer replicas than configured, if there are any."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Rank to coordinator: its place, the rank it waits for, its suspect; `joining` from a rank outside the epoch.

    `complete`: all its replicas are in sync. `lines`: certificates that the ledger may lack. `step_s`: duration of its
    last step, from commit to commit; None before the second commit. Deadlines follow from it, also a new coordinator's.
    `close`: all replicas are in sync, or are expected to be after the next step.
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
    """Coordinator to rank: acknowledges a heartbeat, with the store's epoch and the ledger's version. `needed`: the
    rank is a member, or was evicted and nothing has been committed since, so that its replicas may still be used."""

    term: Term
    epoch: Epoch
    needed: bool
    ledgered: Version


@dataclass(frozen=True, slots=True)
class Prepare:
    """Coordinator to rank: stop (immediately, notifying the others, or after the commit of `stop_after`) and report.

    `plan`: text of the next Plan, for preparation; another one may follow after all. The machines do not read it.
    """

    ballot: Ballot
    stop_after: Version | None
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rank to coordinator: stopped, with its report. `ballot`: the newest that the rank has received."""

    ballot: Ballot
    report: Report


@dataclass(frozen=True, slots=True)
class Activate:
    """Coordinator to rank: the epoch exists. `plan`: the text of its Plan, which the machines do not read. `infos`: of
    its members, to open missing links."""

    ballot: Ballot
    activation: Activation
    plan: str = ""
    infos: tuple[MemberInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Rank to coordinator: all steps and the export are done; the process will end."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Gone:
    """Rank to coordinator: drained, no member any more, and ending; its memory is lost."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class MustStay:
    """Coordinator to an overdue draining rank: why the others cannot continue without it."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankReport:
    """Joiner to coordinator, for the launcher: a message as other workers send it to the launcher."""

    rank: Rank
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """Coordinator to rank: there is no next epoch."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProbeStore:
    """Rank to coordinator: read the store. `asked_s` is of the rank's clock, and is returned with the answer."""

    rank: Rank
    asked_s: float


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """Coordinator to rank: the store's term and epoch, read after `asked_s`, and whether the rank is `needed`, as in
    `Ack`. An unreachable store gives no answer. `answered_s` is of the coordinator's clock."""

    term: Term
    epoch: Epoch
    needed: bool
    asked_s: float
    answered_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Coordinator to a rank: it is not accepted, and its messages are ignored."""

    reason: str


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process without a number asks for one. `versions`: as in member info."""

    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """A file that a joiner may fetch by its name. `size` in bytes; `digest`: its SHA-256, in hexadecimal."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Coordinator to a joiner: its number, `facts` of the job as the launcher wrote them, the infos of the members,
    which may use memory of its machine, and the files that it needs. It prepares by itself, then registers."""

    number: Rank
    facts: str
    infos: tuple[MemberInfo, ...]
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """A joiner requests a piece of an offered file, from byte `offset` on; before or after it has a number."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """Coordinator to a joiner: the piece, of the coordinator's size; shorter at the end of the file."""

    name: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class MembersRequest:
    """A rank without links, one of the first or a joiner, registers its info and asks for those of the members."""

    info: MemberInfo


@dataclass(frozen=True, slots=True)
class Members:
    """Coordinator to that rank: the infos of the members, and the members that have not registered with this
    coordinator."""

    infos: tuple[MemberInfo, ...]
    missing: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshape:
    """A holder of the job's token requests another layout: `dp` lanes of `pp` stages, or with neither the best one."""

    dp: int | None
    pp: int | None


@dataclass(frozen=True, slots=True)
class Granted:
    """Coordinator to that holder: a plan that leads to the layout is in force, and in the store."""

    reason: str


# --- Events that are not messages ---


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; each machine gets one per heartbeat interval."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The launcher to the coordinator: the process of `rank` has ended, or the kernel has begun to end it.

    The latter is as certain: its memory is lost, and none of its threads returns from the kernel. A thread on another
    core may have sent data some microseconds later. Like all data on its links, that belongs to the old epoch: it
    counts until a survivor has reported, and is refused afterwards.
    """

    rank: Rank


@dataclass(frozen=True, slots=True)
class Connected:
    """The control connection of `rank` to this coordinator is open."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The control connection of `rank` has closed: the process has ended, or the network is broken."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class ReshapeWanted:
    """A user's reshape request has arrived on a connection, which is answered."""

    connection: int
    reshape: ReshapeRequest


@dataclass(frozen=True, slots=True)
class NumberWanted:
    """A joiner asks for a number, on a connection."""

    connection: int
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MembersWanted:
    """The rank on a connection asks for the infos of the members."""

    connection: int
    info: MemberInfo


@dataclass(frozen=True, slots=True)
class PartWanted:
    """The joiner on a connection requests a piece of a file."""

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
    """The joiner on a connection has a number, which the register already counts."""

    connection: int
    number: Rank
