"""The coordinator's state, events and actions; the transitions are in `coordinator.py`.

In: the failure detector, the register, reports. Out: `Coordinator`, an immutable value.
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
"""Number of ranks that an attempt asks first: none, since all are stopping; one, which notifies the others; or all."""


@dataclass(frozen=True, slots=True)
class Following:
    """The next plan, for its planned stop. `members`: the same, or all but draining ones; `aim`: its purpose."""

    members: tuple[Rank, ...]
    aim: str


FindFollowing = Callable[[Register, Mapping[Rank, Leave], bool], Following | None]
"""(…, draining ranks, whether all replicas will be in sync at a stop) -> the next plan, already made, if any."""


WhyNeeded = Callable[[Register, Rank], str | None]
"""Why the others need an overdue draining rank, as text; None while they do not, or it is unknown."""


MostMembers = Callable[[Register], int]
"""Number of ranks that the job has work for; further ones wait for room."""


MayJoin = Callable[[Register, tuple[Rank, ...]], bool]
"""Whether there is a plan with these joiners besides the members, already made, so that no rank waits for it."""


def always(register: Register, joining: tuple[Rank, ...]) -> bool:
    """Plans need no time."""
    return True


def as_many_as_come(register: Register) -> int:
    """There is work for any number of ranks."""
    return EVERYBODY


def as_it_is(register: Register, leaving: Mapping[Rank, Leave], complete: bool) -> Following | None:
    """No plan follows the present one."""
    return None


def not_known(register: Register, rank: Rank) -> str | None:
    """No rank must stay."""
    return None


@dataclass(frozen=True)  # without slots: see changed.py
class Coordinator:
    """One coordinator process.

    `proposal`: the swap in progress, `proposed`: its event. `acked_s`: times of the last answers to heartbeats.
    `saved`: a checkpoint that the register does not name yet, since the ledger follows the steps. `unnumbered`:
    connections that wait for a number, oldest first.

    Transition: `stop_after`: the version after which a planned one stops; `targets`: its members; `asked_all_s`:
    when ranks without a report were asked last; `links_broken_since_s`: since when links between living ranks are known
    to be broken; `told`: ranks whose loss was reported; `awaited`: evicted ranks that may have the only replicas;
    `waiting`, `waits_since_s`: the event about these and its time: after `patience_s` the job is over; `going`: ranks
    that this planned transition drains. `must_stay`: ranks that were notified that they cannot leave.
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
        """Whether the transition in progress is a planned reconfiguration."""
        return self.stop_after is not None

    @property
    def timeouts(self) -> Timeouts:
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
