"""The state, events and actions of a rank's side of the control plane; the transitions are in `rank.py`.

In: events of the main thread and messages of the coordinator. Out: `RankState`, an immutable value; actions; answers to
the main thread.

    StepLeft(holdings, suspect)   an event: the main thread waits
    Answer(Go(activation, plan))  an action: it continues in another epoch
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
    Record,
    Replica,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.plan.work.topology import Epoch, Rank

NO_EPOCH = Epoch(-1)
"""The epoch of a process that was never a member."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A gap of `paused_s` between two ticks means that the process was stopped or starved.

    A rank pauses before its next step if the store has answered none of its requests of the last `lease_s`, or if the
    ledger has not acknowledged `unledgered` commits: others may have resumed without it. A rank without launcher ends
    itself after the longer of `hung_s` and `hung_over_step` slowest steps without progress.
    """

    paused_s: float
    lease_s: float
    unledgered: int
    hung_s: float
    hung_over_step: float


@dataclass(frozen=True, slots=True)
class Progress:
    """The engine's current activity, and the rank that it waits for, if any."""

    phase: str
    awaited: Rank | None = None


STARTING = Progress("starting")


@dataclass(frozen=True, slots=True)
class Holdings:
    """An engine's memory after an aborted step.

    `committed`: the newest known commit. `replicas`, `records`: without replicas that are known to differ from their
    owner's. `votes`: received for the step in flight. `complete`: boxes in sync.
    """

    committed: Stamp
    replicas: dict[BoxId, Replica]
    records: dict[BoxId, tuple[Record, ...]]
    votes: tuple[Vote, ...] = ()
    complete: frozenset[BoxId] = frozenset()


# --- Decisions for the main thread ---


@dataclass(frozen=True, slots=True)
class Go:
    """Continue in the epoch of `activation`, with `plan`, the text of its Plan. `infos`: of its members."""

    activation: Activation
    plan: str
    infos: tuple[MemberInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class Excluded:
    """The others evicted this rank: it ends, and touches nothing of the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """The rank was drained: it ends, and no rank needs it."""

    reason: str


Decision = Go | Excluded | Left | Over


# --- Events that are not messages of the coordinator ---


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    """One heartbeat interval has passed. `orphaned`: the launcher has died or, for a joiner, no coordinator exists."""

    progress: Progress
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The main thread has committed a step, at `at_s` of the rank's clock; every step in order, processed with the next
    event. `leaves`: it already knew that the epoch ends with this step, and leaves by itself."""

    certificate: Certificate
    at_s: float
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class StepLeft:
    """The main thread has aborted its step, after the loss of `suspect` or a request, and waits for an answer."""

    holdings: Holdings
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """A request to drain within `grace_s`; a second one ends the process immediately."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Closing:
    """The main thread takes no more steps. `finished`: the job is done, and all ledger lines must be flushed."""

    finished: bool


@dataclass(frozen=True, slots=True)
class LinksDown:
    """The peers whose links are down now; links break one by one, and may be reopened."""

    peers: frozenset[Rank]


# --- Actions beside `Send` ---


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Abort a running step, here and at the other members, and later ones immediately, until an epoch begins."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that the main thread waits for."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class MendLinks:
    """Start to reopen the broken links."""


@dataclass(frozen=True, slots=True)
class EndProcess:
    """End the process immediately: it hangs and no other process would end it, or a second request to leave arrived."""

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

    Epoch: `kept`, the boxes it owns or holds; `complete`, those in sync; `lagging`, those that are not expected to
    be after the next step; `stopped`: the epoch is over for this rank. `joining`: the process was never a member and
    asks to join.
    Aborted step: `replicas`, `records`, `votes`; `suspect`; `broken`, peers without a link; `report_owed`: the
    coordinator must still get a report.
    Main thread: `waiting` for an answer after a step of `left_epoch`; `stop_requested`: it must start no step;
    `kept_news`: messages for after its step. `activate`: the message that began the epoch.
    Clock: `clock`, the offset of the coordinator's, once known; `was_paused` until the coordinator answers;
    `progress_s`, last progress of the main thread; `orphaned_since_s`, since when no process would end it, else None;
    `commit_s`, the epoch's last commit, None before the first; `step_s`, `slowest_s`, the last and the longest step.
    End: `ended`, why this rank has no next epoch; `finished`; `closes_by_s`, when it stops waiting for the
    ledger; `closed`. `leaves_by_s`: the deadline of a draining rank; `must_stay`: why it cannot leave.
    """

    rank: Rank
    limits: Limits
    ballot: Ballot = NO_BALLOT
    epoch: Epoch = NO_EPOCH
    members: tuple[Rank, ...] = ()
    kept: frozenset[BoxId] = frozenset()
    complete: frozenset[BoxId] = frozenset()
    lagging: frozenset[BoxId] = frozenset()
    stopped: bool = True
    joining: bool = True
    committed: Stamp = SEED
    certificates: tuple[Certificate, ...] = ()
    replicas: dict[BoxId, Replica] = field(default_factory=dict)
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
        """Whether the others continue without this rank: it was evicted or drained."""
        return isinstance(self.ended, Excluded | Left)

    @property
    def leave(self) -> Leave:
        """The drain state for heartbeats."""
        if self.leaves_by_s is None:
            return Leave.NO
        return Leave.OVERDUE if self.tick_s >= self.leaves_by_s else Leave.WHEN_SPARED


Result = tuple[RankState, tuple[Action, ...]]
