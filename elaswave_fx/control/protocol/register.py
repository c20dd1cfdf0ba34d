"""The register: which epoch exists, and the ledger behind it; changed by compare-and-swap only.

In: `Swap(expected key, new register, ledger lines)`. Out: the register after it; the swap took place if that is the
new one. A locked file serves a local job; a cluster store implements `Store` with its own compare-and-swap.

    swap(register at (1, 4, …), Swap((1, 4, …), register at (1, 5, …)))  ->  the new register, True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elaswave_fx.control.protocol.messages import ProbeStore
from elaswave_fx.control.protocol.types import Activation, BoxId, Certificate, Stamp, Term, Version
from elaswave_fx.plan.work.topology import Epoch, Rank


class Key(NamedTuple):
    """What a swap compares. `committed` is in it so that a ledger line and a new epoch cannot overtake each other,
    `numbers` so that a swap that is repeated late takes no number back."""

    term: Term
    epoch: Epoch
    plan_hash: int
    committed: Stamp
    checkpoint: Stamp
    numbers: int


@dataclass(frozen=True, slots=True)
class Absent:
    """An excluded rank that may be alive, with copies of `boxes` that may stand at `version`."""

    rank: Rank
    boxes: frozenset[BoxId]
    version: Version


@dataclass(frozen=True, slots=True)
class Register:
    """The truth about the job. `committed` is the last line of the ledger, `previous` the one before. `numbers`: so
    many numbers of ranks have been given, from 0 on; none is ever given again."""

    term: Term
    activation: Activation
    committed: Stamp
    previous: Stamp
    last: Certificate | None
    checkpoint: Stamp
    absent: tuple[Absent, ...] = ()
    numbers: int = 0

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that exists."""
        return self.activation.epoch

    @property
    def members(self) -> tuple[Rank, ...]:
        """The ranks of the newest epoch."""
        return self.activation.assignment.members

    @property
    def left_out(self) -> frozenset[Rank]:
        """Ranks that were left out, and nothing was committed since, as far as the ledger goes: until then their copies
        may still be wanted."""
        return frozenset(absent.rank for absent in self.absent if absent.version == self.committed.version)

    def needs(self, rank: Rank) -> bool:
        """Whether the rank is a member, or one whose copies may still be wanted."""
        return rank in self.members or rank in self.left_out

    @property
    def key(self) -> Key:
        """What a swap of this register has to expect."""
        plan_hash = self.activation.assignment.plan_hash
        return Key(self.term, self.epoch, plan_hash, self.committed, self.checkpoint, self.numbers)


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace the register if its key is `expected`, and append `lines` to the ledger with it."""

    expected: Key
    new: Register
    lines: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Read the register; `probe`: for a rank that has asked."""

    probe: ProbeStore | None = None


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The register after a Read or a Swap; a swap took place if it is the one proposed. `probe`: that of the Read."""

    register: Register
    probe: ProbeStore | None = None


def swap(register: Register, wanted: Swap) -> tuple[Register, bool]:
    """The register afterwards and whether it was swapped. Repeating a swap that took place changes nothing."""
    if register.key != wanted.expected:
        return register, False
    return wanted.new, True


class Store(Protocol):
    """Where the register lives. Both calls are atomic; any error means: not reached. What a swap has written outlives
    every process of the job."""

    def read(self) -> Register:
        """The current register."""
        ...

    def swap(self, wanted: Swap) -> Register:
        """Apply `swap` to the current register, append the lines if it took place, return the register afterwards."""
        ...
