"""The values of the control protocol: versions, replicas, records, votes, activations.

Immutable values that both machines (`rank.py` at each rank, `coordinator.py`) exchange by `messages.py`.

    Stamp(7, 3)  =  version 7 as committed by the votes of epoch 3; version 7 of epoch 4 is another one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

from elaswave_fx.plan.work.box import Box, BoxId
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank

Version = NewType("Version", int)
"""Committed steps since the beginning: version v is the state after step v."""

Term = NewType("Term", int)
"""Raised by one by every coordinator process that takes over."""


STOPPED = "stopped"
"""The heartbeat phase of a rank that has left its step and waits for the next epoch."""

EXPORTING = "exports"
"""Prefix of the heartbeat phase of a rank that takes no more steps: it writes the last checkpoint and exports the
model. The rest of the text changes with its progress."""


def exports(phase: str) -> bool:
    """Whether a rank in this phase takes no more steps."""
    return phase.startswith(EXPORTING)


class Stamp(NamedTuple):
    """A version and the epoch whose votes committed it; a stamp is unique even across partitions."""

    version: Version
    epoch: Epoch


SEED = Stamp(Version(0), Epoch(0))
"""The initial state, which needs no vote."""


class Ballot(NamedTuple):
    """The order of attempts to make an epoch; a rank that promised one refuses lower ones."""

    term: Term
    serial: int


NO_BALLOT = Ballot(Term(0), 0)
"""Below every attempt."""


class Replica(NamedTuple):
    """A replica of a box in a rank's memory; `digest` is computed from its bytes."""

    stamp: Stamp
    digest: int


class Part(NamedTuple):
    """A summand of a reduced gradient: the rank that computed it, and its samples of the step."""

    rank: Rank
    samples: tuple[Span, ...]


class Record(NamedTuple):
    """The redo log record of one box: the summed gradient, by its summands; `base_digest` is the owner's at v-1."""

    stamp: Stamp
    parts: tuple[Part, ...]
    base_digest: int


class Vote(NamedTuple):
    """A rank's yes to a version: it has all records of its boxes; and what it consumed, span by span.

    `payload`: the vote as the engine cast it; only `ledger.py` reads it.
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
    """The control plane's part of the epoch's Plan: its ranks, its boxes, and the hash of the plan's text.

    The index of a box in `boxes` is its BoxId.
    """

    members: tuple[Rank, ...]
    boxes: tuple[Box, ...]
    plan_hash: int


@dataclass(frozen=True, slots=True)
class Activation:
    """The start of an epoch: at `resume`, reached from `previous` by `certificate`, with `assignment`.

    `rollback`: a box has no replica left; all ranks load `resume` from the checkpoint (the seed if version 0).
    `copies_agree`: all replicas were at `resume`, with one digest per box: values made from them are right.
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
    """The memory of a stopped rank, and its promise not to vote any more in its epoch.

    `suspect`: the rank that it blames for the failed step.
    """

    rank: Rank
    epoch: Epoch
    committed: Stamp
    copies: dict[BoxId, Replica]
    records: dict[BoxId, tuple[Record, ...]]
    votes: tuple[Vote, ...]
    certificates: tuple[Certificate, ...]
    broken: frozenset[Rank]
    suspect: Rank | None = None
