"""Which ranks are alive, on which hosts, how fast, with how much memory.

local_topology(4, ranks_per_host=2)  ->  ranks 0,1 on host 0, ranks 2,3 on host 1, epoch 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from elaswave_fx.errors import PlanError

Rank = NewType("Rank", int)
"""One worker process with one device."""

Host = NewType("Host", int)
"""The failure domain: what is lost together."""

Epoch = NewType("Epoch", int)
"""Grows by one at every agreed membership change."""

LINK_BYTES_PER_S = 3e9
"""Assumed until measured: send and receive over loopback."""

LIFE_S = 3600.0
"""Expected of a topology unless it is told: an hour between changes, seconds."""


@dataclass(frozen=True)
class Member:
    """One alive rank; `speed` is relative (1.0 = what unit costs were given for), `memory_bytes` None = not bounded."""

    rank: Rank
    host: Host
    speed: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Topology:
    """The alive ranks in rank order, and the epoch in which they were agreed upon. `life_s`: how long it is expected to
    last, seconds."""

    members: tuple[Member, ...]
    ranks_per_host: int = 2
    epoch: Epoch = Epoch(0)
    link_bytes_per_s: float = LINK_BYTES_PER_S
    life_s: float = LIFE_S

    def __post_init__(self) -> None:
        ranks = [m.rank for m in self.members]
        if not ranks or ranks != sorted(set(ranks)):
            raise PlanError(f"topology: ranks {ranks} must be distinct, ascending and at least one")
        for member in self.members:
            if not member.speed > 0:
                raise PlanError(f"topology: rank {member.rank} has speed {member.speed}; a speed is above 0")

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The alive ranks, ascending."""
        return tuple(m.rank for m in self.members)

    def member(self, rank: Rank) -> Member:
        """The member of that rank; PlanError if it is not alive."""
        for member in self.members:
            if member.rank == rank:
                return member
        raise PlanError(f"topology: rank {rank} is not alive in epoch {self.epoch}")


def local_topology(
    world_size: int,
    ranks_per_host: int = 2,
    memory_bytes: int | None = None,
    epoch: Epoch = Epoch(0),
) -> Topology:
    """`world_size` equal ranks, `ranks_per_host` neighbours sharing an (emulated) host."""
    members = tuple(Member(Rank(r), Host(r // ranks_per_host), memory_bytes=memory_bytes) for r in range(world_size))
    return Topology(members, ranks_per_host, epoch)
