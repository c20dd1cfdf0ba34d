"""The register: the current epoch and the ledger; changed by compare-and-swap only.

In: `Swap(expected key, new register, ledger lines)`. Out: the resulting register; the swap took place if that is the
new one. Local jobs use a locked file; a cluster store implements `Store` with its own compare-and-swap.

    swap(register at (1, 4, …), Swap((1, 4, …), register at (1, 5, …)))  ->  the new register, True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elaswave_fx.control.protocol.messages import ProbeStore
from elaswave_fx.control.protocol.types import Activation, BoxId, Certificate, Stamp, Term, Version
from elaswave_fx.plan.work.topology import Epoch, Rank


class Key(NamedTuple):
    """The key that a swap compares. `committed` prevents that a ledger line and a new epoch overtake each other,
    `numbers` that a late repetition takes a number back."""

    term: Term
    epoch: Epoch
    plan_hash: int
    committed: Stamp
    checkpoint: Stamp
    numbers: int


@dataclass(frozen=True, slots=True)
class Absent:
    """An evicted rank that may be alive, with replicas of `boxes` that may be at `version`."""

    rank: Rank
    boxes: frozenset[BoxId]
    version: Version


@dataclass(frozen=True, slots=True)
class Register:
    """The authoritative state of the job. `committed` is the last line of the ledger, `previous` the one before.
    `numbers`: how many rank numbers were given, from 0 on; none is ever reused."""

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
        return self.activation.epoch

    @property
    def members(self) -> tuple[Rank, ...]:
        return self.activation.assignment.members

    @property
    def left_out(self) -> frozenset[Rank]:
        """Evicted ranks since whose eviction the ledger has no commit: their replicas may still be used."""
        return frozenset(absent.rank for absent in self.absent if absent.version == self.committed.version)

    def needs(self, rank: Rank) -> bool:
        """Whether the rank is a member, or an evicted one whose replicas may still be used."""
        return rank in self.members or rank in self.left_out

    @property
    def key(self) -> Key:
        """The key to expect in a swap of this register."""
        plan_hash = self.activation.assignment.plan_hash
        return Key(self.term, self.epoch, plan_hash, self.committed, self.checkpoint, self.numbers)


@dataclass(frozen=True, slots=True)
class Swap:
    """Replace the register if its key is `expected`, and append `lines` to the ledger."""

    expected: Key
    new: Register
    lines: tuple[Certificate, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Read the register; `probe`: the rank's request, if any."""

    probe: ProbeStore | None = None


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The register after a Read or a Swap, which took place if it is the proposed one. `probe`: the Read's."""

    register: Register
    probe: ProbeStore | None = None


def swap(register: Register, wanted: Swap) -> tuple[Register, bool]:
    """Return the resulting register and whether it was swapped. Repeating a successful swap changes nothing."""
    if register.key != wanted.expected:
        return register, False
    return wanted.new, True


class Store(Protocol):
    """The register's storage. Both calls are atomic; any error means: unreachable. A swap survives all processes."""

    def read(self) -> Register:
        """The current register."""
        ...

    def swap(self, wanted: Swap) -> Register:
        """Apply `swap` to the register, append the lines if it took place, and return the result."""
        ...
