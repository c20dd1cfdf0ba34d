"""What goes wrong in a schedule, drawn from its seed.

In: a random generator and the size of the world. Out: faults, each at a time or at the nth event of a kind.

    Fault("crash", at=Moment(VoteCast, 3), keep=1)  ->  who gets the third vote dies after it has sent one message more
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from elaswave_fx.control.protocol.messages import Activate, Heartbeat, Prepare, Prepared
from elaswave_fx.control.protocol.register import StoreReply
from elaswave_fx.plan.work.topology import Rank
from tools.sim.frames import STEP_FRAMES, Abort, CatchUpRecordOf, NearlyInSync, StateOf, Wishes
from tools.sim.rank_process import Ran

STEP_EVENTS: tuple[type, ...] = (*STEP_FRAMES, Ran)
RECOVERY_EVENTS: tuple[type, ...] = (Prepare, Activate, Abort, StateOf, CatchUpRecordOf, NearlyInSync, Wishes)
COORDINATOR_EVENTS: tuple[type, ...] = (Heartbeat, Prepared, StoreReply)

CRASHES = ("crash", "host")
"""A process ends, or all of a host: the links to it break, and the launcher says so, if it is told."""

SILENCES = ("silent_host", "silent_link", "one_way")
"""Nothing comes through any more, or in one direction only; no link breaks, nobody says so."""

RANK_KINDS = (
    *CRASHES, "crash", "crash", *SILENCES, "pause", "hang", "cut", "split", "corrupt", "update_fails", "no_store",
    "stall",
)  # fmt: skip
PLANNED = ("join", "leave")
"""What costs the job no step: a process asks to join, a rank is asked to leave."""

RESHAPE = "reshape"
"""Nor does this: a user wants `keep` lanes, up to three of them, of as many stages as `rank` says, up to two."""

SLOW = "slow"
"""A rank computes at a fraction of its speed: `lasts_s` are the steps in which it does, by its own count, and the
others take it for slow when enough of them have gone by."""

SLOW_STEPS = (4, 30, 50)
"""So many; a change of speed is known after 15 samples, so the first of these passes unnoticed as a rule."""

COORDINATOR_KINDS = ("coordinator_crash", "coordinator_pause", "coordinator_cut")

WINDOW_STEPS = 12.0
"""Faults at a time begin within so many steps."""

UNTOLD_S = float("inf")


@dataclass(frozen=True, slots=True)
class Moment:
    """When the `nth` event of type `event` is handled anywhere."""

    event: type
    nth: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `keep`: how many messages that event still leads to; `side`: ranks cut off, or asked to leave,
    together.

    `lasts_s`: of what passes, and how long a rank has to leave. `told_s`: when the launcher reports the exit,
    `UNTOLD_S` if nobody does; `dies`: whoever fell silent has died; not only one rank is asked to leave.
    """

    kind: str
    at: Moment | float
    rank: Rank
    other: Rank
    side: frozenset[Rank]
    keep: int
    lasts_s: float
    told_s: float
    dies: bool


def draw(random: Random, world: int, step_s: float) -> tuple[Fault, ...]:
    """None to four faults; later ones often hit the recovery from the earlier ones."""
    count = random.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))
    faults = []
    for number in range(count):
        kinds = COORDINATOR_KINDS if random.random() < 0.2 else RANK_KINDS
        kind = random.choice((*kinds, *PLANNED)) if random.random() < 0.8 else random.choice(PLANNED)
        faults.append(_fault(random, world, kind, number, step_s))
    return tuple(faults)


def draw_reshapes(random: Random, world: int, step_s: float) -> tuple[Fault, ...]:
    """What a user wants besides, in a third of all schedules."""
    count = random.choice((0, 0, 1, 2)) if random.random() < 0.7 else 0
    return tuple(_fault(random, world, RESHAPE, number, step_s) for number in range(count))


def draw_slow(random: Random, world: int, step_s: float) -> tuple[Fault, ...]:
    """And a rank that is slow for a while, in one of twenty."""
    if random.random() >= 0.05:
        return ()
    fault = _fault(random, world, SLOW, 0, step_s)
    return (replace(fault, lasts_s=float(random.choice(SLOW_STEPS))),)


def _fault(random: Random, world: int, kind: str, number: int, step_s: float) -> Fault:
    return Fault(
        kind,
        _moment(random, kind, number, step_s),
        Rank(random.randrange(world)),
        Rank(random.randrange(world)),
        frozenset(Rank(r) for r in range(world) if random.random() < 0.5),
        random.randrange(4),
        random.choice((0.01, 0.1, 1.0, 3.0, 3.0)) * random.uniform(0.5, 1.0),
        random.choice((0.0005, 0.001, 0.005, 0.05, 0.5, UNTOLD_S, UNTOLD_S)),
        random.random() < 0.5,
    )


def _moment(random: Random, kind: str, number: int, step_s: float) -> Moment | float:
    if kind in ("split", "cut", "corrupt", RESHAPE, SLOW, *PLANNED, *SILENCES) or random.random() < 0.2:
        return random.uniform(0.0, WINDOW_STEPS * step_s)
    if kind in COORDINATOR_KINDS:
        event = random.choice(COORDINATOR_EVENTS)
    elif kind in ("hang", "update_fails"):
        event = Ran
    else:
        event = random.choice(RECOVERY_EVENTS if number and random.random() < 0.7 else STEP_EVENTS)
    return Moment(event, random.randrange(1, 8 if event in RECOVERY_EVENTS else 60))
