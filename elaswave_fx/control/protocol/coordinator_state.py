"""What the coordinator knows, and what its steps take and give; the transitions are in `coordinator.py`.

In: what the failure detector noticed, the register, reports. Out: `Coordinator`, an immutable value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.decide import Decide, Replan, decide
from elaswave_fx.control.protocol.failure_detector import FailureDetector, Timeouts
from elaswave_fx.control.protocol.messages import (
    Connected,
    Disconnected,
    Ended,
    Exited,
    Heartbeat,
    Prepared,
    Saved,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap
from elaswave_fx.control.protocol.types import NO_BALLOT, Ballot, Report, Stamp
from elaswave_fx.plan.topology import Rank

TAKING, STEADY, PREPARING, RETIRED, OVER = "taking", "steady", "preparing", "retired", "over"

NOBODY, ONE, EVERYBODY = 0, 1, 1 << 30
"""How many ranks an attempt asks at once: those who are stopping anyway, one that tells the others, or each."""

WantsMove = Callable[[Register], bool]
"""Whether planning anew for the same members would move owners, or drop copies, now that all copies are complete."""


def never(register: Register) -> bool:
    """Owners stay where they are."""
    return False


@dataclass(frozen=True, slots=True)
class Coordinator:
    """One coordinator process. `proposal` is the swap on its way, `proposed` what it leads to; `acked_s`: when
    heartbeats were answered last; `saved`: a checkpoint that the register does not name yet, for the ledger follows the
    steps.

    Of a transition: `targets` are the members wanted, `asked_all_s` is when those who keep silent were asked last,
    `links_broken_since_s` since when links between living ranks are known to be broken; `told` are the ranks whose loss
    was told, `waiting` is what was told of whom the others wait for.
    """

    detector: FailureDetector
    replan: Replan
    decide: Decide = decide
    wants_move: WantsMove = never
    phase: str = TAKING
    register: Register | None = None
    ballot: Ballot = NO_BALLOT
    acked_s: dict[Rank, float] = field(default_factory=dict)
    rejoin_requested: frozenset[Rank] = frozenset()
    planned: bool = False
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

    @property
    def timeouts(self) -> Timeouts:
        """The deadlines as of now."""
        return self.detector.timeouts


Act = Send | Read | Swap | events.Event
Result = tuple[Coordinator, tuple[Act, ...]]
Event = Heartbeat | Prepared | StoreReply | Tick | Exited | Connected | Disconnected | Saved | Ended
