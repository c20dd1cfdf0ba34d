"""What goes wrong in a schedule, drawn from its seed.

In: a random generator and the size of the world. Out: faults, each at a time or at the nth message of a kind.

    Fault("crash", at=Moment(VoteCast, 3), keep=1)  ->  who gets the third vote dies after its first action
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from elaswave_fx.control.protocol.messages import (
    Abort,
    Activate,
    Gradient,
    Heartbeat,
    Params,
    Prepare,
    Prepared,
    Ran,
    RecordOf,
    Shard,
    VoteCast,
)
from elaswave_fx.control.protocol.register import StoreReply
from elaswave_fx.plan.topology import Rank

STEP_EVENTS: tuple[type, ...] = (Gradient, RecordOf, VoteCast, Params, Ran)
RECOVERY_EVENTS: tuple[type, ...] = (Prepare, Activate, Abort, Shard)
COORDINATOR_EVENTS: tuple[type, ...] = (Heartbeat, Prepared, StoreReply)

RANK_KINDS = ("crash", "crash", "crash", "host", "pause", "hang", "cut", "split", "corrupt", "no_store", "stall")
COORDINATOR_KINDS = ("coordinator_crash", "coordinator_pause", "coordinator_cut")

WINDOW_S = 0.12
"""Faults at a time begin within it."""

LONGEST_S = 0.3
"""No pause and no cut lasts longer."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When the `nth` event of type `event` is handled anywhere."""

    event: type
    nth: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `keep`: how many of the actions of that event still happen; `side`: ranks cut off together.

    `told_s`: when the launcher reports the exit; `silent`: peers see no broken link (power loss).
    """

    kind: str
    at: Moment | float
    rank: Rank
    other: Rank
    side: frozenset[Rank]
    keep: int
    lasts_s: float
    told_s: float
    silent: bool


def draw(random: Random, world: int) -> tuple[Fault, ...]:
    """None to four faults; later ones often hit the recovery from the earlier ones."""
    count = random.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))
    faults = []
    for number in range(count):
        kinds = COORDINATOR_KINDS if random.random() < 0.2 else RANK_KINDS
        kind = random.choice((*kinds, "join")) if random.random() < 0.9 else "join"
        faults.append(_fault(random, world, kind, number))
    return tuple(faults)


def _fault(random: Random, world: int, kind: str, number: int) -> Fault:
    rank = Rank(random.randrange(world))
    return Fault(
        kind,
        _moment(random, kind, number),
        rank,
        Rank(random.randrange(world)),
        frozenset(Rank(r) for r in range(world) if random.random() < 0.5),
        random.randrange(4),
        random.choice((0.005, 0.03, 0.1, LONGEST_S)) * random.uniform(0.5, 1.0),
        random.choice((0.001, 0.005, 0.05, 0.2)),
        random.random() < 0.3,
    )


def _moment(random: Random, kind: str, number: int) -> Moment | float:
    if kind in ("join", "split", "cut", "corrupt") or random.random() < 0.2:
        return random.uniform(0.0, WINDOW_S)
    if kind in COORDINATOR_KINDS:
        event = random.choice(COORDINATOR_EVENTS)
    else:
        event = random.choice(RECOVERY_EVENTS if number and random.random() < 0.7 else STEP_EVENTS)
    return Moment(event, random.randrange(1, 8 if event in RECOVERY_EVENTS else 40))
