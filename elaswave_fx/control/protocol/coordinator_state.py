"""What the coordinator knows, and what its steps take and give; the transitions are in `coordinator.py`.

In: what the failure detector noticed, the register, reports. Out: `Coordinator`, an immutable value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.decide import Decide, Replan, decide
from elaswave_fx.control.protocol.failure_detector import FailureDetector, Timeouts
from elaswave_fx.control.protocol.messages import (
    Connected,
    Disconnected,
    Ended,
    Exited,
    Gone,
    Heartbeat,
    Leave,
    Numbered,
    NumberWanted,
    Prepared,
    ProbeStore,
    Saved,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap
from elaswave_fx.control.protocol.types import NO_BALLOT, Ballot, Report, Stamp, Version
from elaswave_fx.plan.work.topology import Rank

TAKING, STEADY, PREPARING, RETIRED, OVER = "taking", "steady", "preparing", "retired", "over"

NOBODY, ONE, EVERYBODY = 0, 1, 1 << 30
"""How many ranks an attempt asks at once: those who are stopping anyway, one that tells the others, or each."""


@dataclass(frozen=True, slots=True)
class Following:
    """The next plan, as far as its stop is concerned. `members`: the same, or all but some that leave; `aim`: what the
    stop is for, as a clause."""

    members: tuple[Rank, ...]
    aim: str


FindFollowing = Callable[[Register, Mapping[Rank, Leave], bool], Following | None]
"""(…, who was told to leave, whether all copies will be there at a stop) -> the next plan, which has been made then.
None: the present one can stay."""


WhyNeeded = Callable[[Register, Rank], str | None]
"""Why the others cannot go on without a rank that is overdue to leave, in words; None while they can, or while that is
not known."""


MostMembers = Callable[[Register], int]
"""How many ranks the job has work for: more have to wait until there is room."""


MayJoin = Callable[[Register, tuple[Rank, ...]], bool]
"""Whether there is a plan with these ranks besides the members; it has been made then, so that nobody waits for it."""


def always(register: Register, joining: tuple[Rank, ...]) -> bool:
    """Nobody waits for a plan."""
    return True


def as_many_as_come(register: Register) -> int:
    """Nobody waits."""
    return EVERYBODY


def as_it_is(register: Register, leaving: Mapping[Rank, Leave], complete: bool) -> Following | None:
    """The plan stays."""
    return None


def not_known(register: Register, rank: Rank) -> str | None:
    """Nobody is told to stay."""
    return None


@dataclass(frozen=True)  # without slots: see changed.py
class Coordinator:
    """One coordinator process. `proposal` is the swap on its way, `proposed` what it leads to; `acked_s`: when
    heartbeats were answered last; `saved`: a checkpoint that the register does not name yet, for the ledger follows the
    steps; `unnumbered`: connections of those who wait for a number, in the order in which they came.

    Of a transition: `stop_after` is the version after which a planned one stops the ranks, `targets` are the members
    wanted, `asked_all_s` is when those who keep silent were asked last, `links_broken_since_s` since when links between
    living ranks are known to be broken; `told` are the ranks whose loss was told, `awaited` those that were left out
    and that may have the only copies, `waiting` is what was told of that, `waits_since_s` since when, and after
    `patience_s` of it the job is over; `going`: ranks that leave with it, if it is the one that was planned for that.
    `must_stay`: ranks that were told that they cannot leave.
    """

    detector: FailureDetector
    replan: Replan
    decide: Decide = decide
    find_following: FindFollowing = as_it_is
    why_needed: WhyNeeded = not_known
    most_members: MostMembers = as_many_as_come
    may_join: MayJoin = always
    phase: str = TAKING
    register: Register | None = None
    ballot: Ballot = NO_BALLOT
    acked_s: dict[Rank, float] = field(default_factory=dict)
    unnumbered: tuple[int, ...] = ()
    awaited: frozenset[Rank] = frozenset()
    stop_after: Version | None = None
    targets: tuple[Rank, ...] = ()
    reports: dict[Rank, Report] = field(default_factory=dict)
    prepared_s: float = 0.0
    asked_all_s: float | None = None
    links_broken_since_s: float | None = None
    proposal: Swap | None = None
    proposed: events.Agreed | None = None
    asked_s: float = 0.0
    tick_s: float = 0.0
    saved: Stamp | None = None
    over: str = ""
    told: frozenset[Rank] = frozenset()
    waiting: events.Waiting | None = None
    waits_since_s: float = 0.0
    patience_s: float = math.inf
    going: frozenset[Rank] = frozenset()
    must_stay: frozenset[Rank] = frozenset()

    @property
    def planned(self) -> bool:
        """Whether the transition under way is for nobody's loss."""
        return self.stop_after is not None

    @property
    def timeouts(self) -> Timeouts:
        """The deadlines as of now."""
        return self.detector.timeouts


Act = Send | Numbered | Read | Swap | events.Event
Result = tuple[Coordinator, tuple[Act, ...]]
Event = (
    Heartbeat
    | Prepared
    | ProbeStore
    | StoreReply
    | Tick
    | Exited
    | Connected
    | Disconnected
    | NumberWanted
    | Saved
    | Ended
    | Gone
)
