"""Frames between ranks, messages to and from the coordinator, and what the machines ask of the world.

Frames carry the epoch as their generation: older ones are dropped, newer ones held until the epoch is installed.

    GRADIENT -> RECORD -> VOTE -> (commit) -> PARAMS          the step
    ABORT, PREPARE -> PREPARED -> ACTIVATE                    a new epoch
    FETCH -> SHARD                                            a copy added or repaired
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.control.protocol.types import (
    Activation,
    Ballot,
    BoxId,
    Certificate,
    Copy,
    Record,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.plan.box import Span
from elaswave_fx.plan.topology import Epoch, Rank

COORDINATOR = Rank(-1)
"""The address of whichever coordinator process is current."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A rank's summands for all boxes that the receiver owns."""

    epoch: Epoch
    version: Version
    samples: Span


@dataclass(frozen=True, slots=True)
class RecordOf:
    """Owner to holder: the reduced gradient of a box."""

    epoch: Epoch
    box: BoxId
    record: Record


@dataclass(frozen=True, slots=True)
class VoteCast:
    """A yes, to every member."""

    epoch: Epoch
    vote: Vote


@dataclass(frozen=True, slots=True)
class Params:
    """Owner to readers without a copy: working parameters of one version, with the digests they were made from."""

    epoch: Epoch
    version: Version
    digests: tuple[tuple[BoxId, int], ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave the step; floods to every rank, forwarded once."""

    epoch: Epoch
    version: Version
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Holder to owner: my copy of the box is wrong or missing."""

    epoch: Epoch
    box: BoxId


@dataclass(frozen=True, slots=True)
class Shard:
    """Owner to holder: the whole base of a box."""

    epoch: Epoch
    box: BoxId
    copy: Copy


Frame = Gradient | RecordOf | VoteCast | Params | Abort | Fetch | Shard


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Rank to coordinator: where I am, whom I await, whom I accuse; `joining` from a rank outside the epoch.

    `complete`: every box I should keep is there. `lines`: certificates that the ledger may not have.
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
class Ran:
    """The engine has finished instruction `serial`; `digest` of the new base for update and load."""

    serial: int
    digest: int = 0


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link to `peer` broke."""

    peer: Rank


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The link to `peer` is open again."""

    peer: Rank


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
    """Send a message; `bulk` lanes keep their own order and do not delay the others."""

    target: Rank
    message: Frame | Heartbeat | Ack | Prepare | Prepared | Activate | Ended | Over
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the tile's samples of `version` forward and backward; answered by Ran."""

    serial: int
    version: Version


@dataclass(frozen=True, slots=True)
class Update:
    """Apply `record` to `copy` of `box`; answered by Ran with the new digest."""

    serial: int
    box: BoxId
    copy: Copy
    record: Record


@dataclass(frozen=True, slots=True)
class Load:
    """Load `box` at `stamp` from the checkpoint; answered by Ran with its digest."""

    serial: int
    box: BoxId
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit became known here."""

    certificate: Certificate


@dataclass(frozen=True, slots=True)
class ProbeStore:
    """Read the store; answered by StoreSeen if it can be reached."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something a user should see, in words."""

    text: str


Instruction = Compute | Update | Load
Action = Send | Compute | Update | Load | Committed | ProbeStore | Note
