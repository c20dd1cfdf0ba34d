"""The words of the control protocol: versions, copies, records, votes, and what a new epoch says.

In: nothing. Out: immutable values that both machines (`rank.py` at each rank, `coordinator.py`) exchange; the messages
that carry them are in `messages.py`.

    Stamp(7, 3)  =  version 7 as committed by the votes of epoch 3; version 7 of epoch 4 is another one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

from elaswave_fx.plan.work.box import Box, BoxId, Span
from elaswave_fx.plan.work.topology import Epoch, Rank

Version = NewType("Version", int)
"""Committed steps since the beginning: version v is the state after step v."""

Term = NewType("Term", int)
"""Grows by one with every coordinator process that takes over."""


STOPPED = "stopped"
"""The phase, on heartbeats, of a rank that has left its step and waits for the next epoch."""

HANDING_BACK = "hands back"
"""What that of a rank begins with that takes no more steps: it writes the last checkpoint, and the model with the
others. What follows is another text when it gets on."""


def hands_back(phase: str) -> bool:
    """Whether a rank in this phase takes no more steps."""
    return phase.startswith(HANDING_BACK)


class Stamp(NamedTuple):
    """A version and the epoch whose votes committed it: two sides can never make the same stamp."""

    version: Version
    epoch: Epoch


SEED = Stamp(Version(0), Epoch(0))
"""The initial state, which needs no vote."""


class Ballot(NamedTuple):
    """Order of attempts to make an epoch; a rank that promised one refuses lower ones."""

    term: Term
    serial: int


NO_BALLOT = Ballot(Term(0), 0)
"""Below every attempt."""


class Copy(NamedTuple):
    """A base of a box in a rank's memory; `digest` as computed from its bytes."""

    stamp: Stamp
    digest: int


class Part(NamedTuple):
    """A summand of a reduced gradient: who computed it from which samples of the step."""

    rank: Rank
    samples: tuple[Span, ...]


class Record(NamedTuple):
    """The redo log record of one box: the summed gradient, by its summands; `base_digest` is the owner's at v-1."""

    stamp: Stamp
    parts: tuple[Part, ...]
    base_digest: int


class WorkSpan(NamedTuple):
    """A rectangle of the work plane; samples count within the step."""

    units: Span
    samples: Span


class Vote(NamedTuple):
    """Yes of one rank to one version: all records of its boxes are there; and what it consumed, span by span.

    `payload`: the vote as the engine cast it; `ledger.py` alone reads it.
    """

    stamp: Stamp
    rank: Rank
    consumed: tuple[WorkSpan, ...]
    payload: bytes = b""


class Certificate(NamedTuple):
    """The votes of all members of an epoch: the proof of a commit, and all that a ledger line needs."""

    stamp: Stamp
    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """What control needs of the epoch's Plan: who its ranks are, who keeps what, and the hash of the plan's text.

    The place of a box in `boxes` is its BoxId.
    """

    members: tuple[Rank, ...]
    boxes: tuple[Box, ...]
    plan_hash: int


@dataclass(frozen=True, slots=True)
class Activation:
    """What a new epoch says: go on from `resume`, reached from `previous` by `certificate`, with `assignment`.

    `rollback`: copies of a box are gone; everybody loads `resume` from the checkpoint (the seed if version 0).
    `copies_agree`: all copies stood at `resume`, and those of a box had one digest: what was made of them is right.
    """

    epoch: Epoch
    assignment: Assignment
    resume: Stamp
    previous: Stamp
    certificate: Certificate | None
    rollback: bool = False
    copies_agree: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank that has stopped has in memory; a promise that it votes no more in its epoch.

    `suspect`: whom it accuses of having broken the step.
    """

    rank: Rank
    epoch: Epoch
    committed: Stamp
    copies: dict[BoxId, Copy]
    records: dict[BoxId, tuple[Record, ...]]
    votes: tuple[Vote, ...]
    certificates: tuple[Certificate, ...]
    broken: frozenset[Rank]
    suspect: Rank | None = None
