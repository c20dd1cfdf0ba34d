"""What a rank's side of the control plane knows, and what its steps take and give; the transitions are in `rank.py`.

In: what the main thread and the coordinator said. Out: `RankState`, an immutable value; the events that change it, the
actions that follow, and what the main thread is answered.

    StepLeft(holdings, suspect)   an event: the main thread waits
    Answer(Go(activation, plan))  an action: it goes on, in another epoch
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elaswave_fx.control.protocol.clock import ClockOffset
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.messages import (
    Ack,
    Activate,
    Leave,
    MustStay,
    Over,
    Prepare,
    Refused,
    Send,
    StoreSeen,
)
from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.control.protocol.types import (
    NO_BALLOT,
    SEED,
    Activation,
    Ballot,
    BoxId,
    Certificate,
    Copy,
    Record,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.plan.work.topology import Epoch, Rank

NO_EPOCH = Epoch(-1)
"""The epoch of a process that has never been a member."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A gap of `paused_s` between two ticks means that the process was stopped, or starved.

    A rank pauses before its next step when the store has answered nothing that it asked in the last `lease_s`, or when
    the ledger has not acknowledged `unledgered` commits: others may have gone on without it. A rank without launcher
    that makes no progress for `hung_s`, or for `hung_over_step` times its slowest step, ends itself.
    """

    paused_s: float
    lease_s: float
    unledgered: int
    hung_s: float
    hung_over_step: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What the engine does now, and the rank that it waits for, if it does."""

    phase: str
    awaited: Rank | None = None


STARTING = Progress("starting")


@dataclass(frozen=True, slots=True)
class Holdings:
    """What an engine has in memory when it has left a step.

    `committed`: the newest version it knows to be committed. `copies`, `records`: what of them is right; a copy that
    is known to differ from its owner's is left out. `votes`: those of the step in flight that have arrived.
    `complete`: boxes of which everything is there.
    """

    committed: Stamp
    copies: dict[BoxId, Copy]
    records: dict[BoxId, tuple[Record, ...]]
    votes: tuple[Vote, ...] = ()
    complete: frozenset[BoxId] = frozenset()


# --- What the main thread is told ---


@dataclass(frozen=True, slots=True)
class Go:
    """Go on in the epoch of `activation`, by `plan`, the text of its Plan. `infos`: of its members."""

    activation: Activation
    plan: str
    infos: tuple[MemberInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Excluded:
    """The others go on without this rank: it ends, and touches nothing of the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """The rank was told to leave, and is a member no more: it ends, and nobody misses it."""

    reason: str


Decision = Go | Excluded | Left | Over


# --- Events that are not messages of the coordinator ---


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    """Time has passed: one per heartbeat interval. `orphaned`: the rank had a launcher, and it is gone; or it had none,
    and now no coordinator either."""

    progress: Progress
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The main thread has committed a step, at `at_s` of the rank's clock; it says so of every one, in order, and is
    heard with what comes next. `leaves`: it had heard by then that the epoch ends with this step, and so leaves by
    itself."""

    certificate: Certificate
    at_s: float
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class StepLeft:
    """The main thread has left its step, because it lost `suspect` or was told to, and waits for an answer."""

    holdings: Holdings
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Somebody tells the process to leave the job, within `grace_s`; or at once, if he has told it before."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Closing:
    """The main thread takes no more steps. `finished`: the job's work is done, and the ledger is to have all of it."""

    finished: bool


@dataclass(frozen=True, slots=True)
class LinksDown:
    """The peers to which the links are down now; they go down one by one, and may be up again."""

    peers: frozenset[Rank]


# --- Actions beside `Send` ---


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Make a running step fail soon, here and at the other members, and later ones at once, until an epoch begins."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the main thread waits for."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class MendLinks:
    """Start to open the broken links again."""


@dataclass(frozen=True, slots=True)
class EndProcess:
    """The process ends at once: it makes no progress, and nobody else would end it; or it was told to."""

    reason: str


Action = Send | Interrupt | Answer | MendLinks | EndProcess
Event = (
    HeartbeatDue
    | Committed
    | ReplicaSync
    | StepLeft
    | Closing
    | LinksDown
    | StoreSeen
    | Ack
    | Prepare
    | Activate
    | Over
    | Refused
    | LeaveAsked
    | MustStay
)


@dataclass(frozen=True)  # without slots: see changed.py
class RankState:
    """One rank. Dictionaries are never changed in place.

    Of the epoch: `kept`, the boxes it owns or holds; `complete`, those of them whose copy is in step; `far`, those
    whose copy will not be after the next step either; `stopped`: the epoch is over for this rank. `joining`: a process
    that has never been a member and asks to be one.
    Of a step that was left: `copies`, `records`, `votes`; `suspect`, whom the rank accuses; `broken`, peers without a
    link; `report_owed`, when the coordinator is to hear of it.
    Of the main thread: `waiting` for an answer, having left a step of `left_epoch`; `stop_requested`: it is to start no
    step; `kept_news`: what it has not left its step for yet. `activate`: the message that began the epoch.
    Of the clock: `clock`, how the coordinator's differs, once that has answered; `was_paused` until it has spoken;
    `progress_s`, when the main thread was last seen to get on; `orphaned_since_s`, since when nobody would end it, None
    if somebody would; `commit_s`, the last commit of the epoch, None before the first; `step_s` and `slowest_s`, the
    last and the longest time between two of an epoch.
    Of the end: `ended`, why there is no next epoch for this rank; `finished`; `closes_by_s`, when it stops waiting for
    the ledger; `closed`. `leaves_by_s`: when it should have left, if it was told to; `must_stay`: why it cannot.
    """

    rank: Rank
    limits: Limits
    ballot: Ballot = NO_BALLOT
    epoch: Epoch = NO_EPOCH
    members: tuple[Rank, ...] = ()
    kept: frozenset[BoxId] = frozenset()
    complete: frozenset[BoxId] = frozenset()
    far: frozenset[BoxId] = frozenset()
    stopped: bool = True
    joining: bool = True
    committed: Stamp = SEED
    certificates: tuple[Certificate, ...] = ()
    copies: dict[BoxId, Copy] = field(default_factory=dict)
    records: dict[BoxId, tuple[Record, ...]] = field(default_factory=dict)
    votes: tuple[Vote, ...] = ()
    suspect: Rank | None = None
    broken: frozenset[Rank] = frozenset()
    report_owed: bool = False
    stop_after: Version | None = None
    waiting: bool = False
    left_epoch: Epoch = NO_EPOCH
    stop_requested: bool = False
    kept_news: tuple[Prepare | Activate, ...] = ()
    activate: Activate | None = None
    ended: Excluded | Left | Over | None = None
    finished: bool = False
    closes_by_s: float | None = None
    closed: bool = False
    leaves_by_s: float | None = None
    must_stay: str | None = None
    store_seen_s: float = 0.0
    clock: ClockOffset | None = None
    tick_s: float = 0.0
    was_paused: bool = False
    progress: Progress = STARTING
    progress_s: float = 0.0
    orphaned_since_s: float | None = None
    commit_s: float | None = None
    step_s: float | None = None
    slowest_s: float = 0.0

    @property
    def next_version(self) -> Version:
        """The version of the step in flight."""
        return Version(self.committed.version + 1)

    @property
    def excluded(self) -> bool:
        """Whether the others go on without this rank, as it may have wished."""
        return isinstance(self.ended, Excluded | Left)

    @property
    def leave(self) -> Leave:
        """What it says of its wish to leave."""
        if self.leaves_by_s is None:
            return Leave.NO
        return Leave.OVERDUE if self.tick_s >= self.leaves_by_s else Leave.WHEN_SPARED


Result = tuple[RankState, tuple[Action, ...]]
