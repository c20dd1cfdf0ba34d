"""What travels between ranks, with digests in place of tensors. `epoch` is the generation that links put on frames.

Frames of a run tell of `count` boxes, from `box` on, as messages of a real run do.
"""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_fx.control.protocol.types import BoxId, Record, Replica, Vote
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Epoch, Rank


@dataclass(frozen=True, slots=True)
class PartOf:
    """Reader to owner: its gradient of the boxes."""

    epoch: Epoch
    box: BoxId
    count: int
    samples: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class RecordOf:
    """Owner to holder: the reduced gradient of each box, with the version of the owner's state that it belongs to."""

    epoch: Epoch
    box: BoxId
    records: tuple[tuple[Record, int], ...]

    @property
    def count(self) -> int:
        return len(self.records)


@dataclass(frozen=True, slots=True)
class VoteCast:
    """A yes, to every member."""

    epoch: Epoch
    vote: Vote
    box: None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class ParametersOf:
    """Owner to a reader that does not make them itself: the parameters made from a replica of each box."""

    epoch: Epoch
    box: BoxId
    replicas: tuple[Replica, ...]

    @property
    def count(self) -> int:
        return len(self.replicas)


@dataclass(frozen=True, slots=True)
class StateOf:
    """Owner to a new holder: the whole state of a box, with the version and digest that the owner's machine has."""

    epoch: Epoch
    box: BoxId
    replica: Replica
    version: int
    digest: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class CatchUpRecordOf:
    """Owner to a syncing holder: a record after the state; `prompt`: it came with the frames of its step."""

    epoch: Epoch
    box: BoxId
    record: Record
    version: int
    prompt: bool
    count: int = 1


@dataclass(frozen=True, slots=True)
class StateAsked:
    """New holder to owner: the replica is of no use, another state is wanted."""

    epoch: Epoch
    box: BoxId
    count: int = 1


@dataclass(frozen=True, slots=True)
class NearlyInSync:
    """New holder to owner: the replica is nearly in sync."""

    epoch: Epoch
    box: BoxId
    count: int = 1


@dataclass(frozen=True, slots=True)
class Wishes:
    """Sent to every member at the start of an epoch: the buckets whose parameters the sender has to be sent."""

    epoch: Epoch
    buckets: frozenset[int]
    box: None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Abort:
    """Leave what is under way; every rank passes it on once."""

    epoch: Epoch
    suspect: Rank | None
    box: None = None
    count: int = 1


Frame = (
    PartOf | RecordOf | VoteCast | ParametersOf | StateOf | CatchUpRecordOf | StateAsked | NearlyInSync | Wishes | Abort
)
STEP_FRAMES: tuple[type, ...] = (PartOf, RecordOf, VoteCast, ParametersOf)
