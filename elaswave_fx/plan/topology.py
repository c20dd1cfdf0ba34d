"""Which ranks are alive, on which hosts, how fast, with how much memory, over which links.

local_topology(4, ranks_per_host=2)  ->  ranks 0,1 on host 0, ranks 2,3 on host 1, epoch 0
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NewType

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.operating_points import Power

Rank = NewType("Rank", int)
"""One worker process with one device."""

Host = NewType("Host", int)
"""The failure domain: what is lost together."""

Epoch = NewType("Epoch", int)
"""Grows by one at every agreed membership change."""

LINK_BYTES_PER_S = 3e9
"""Assumed of a link that nobody has measured: send and receive over loopback."""

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
class Link:
    """What lies between a rank and another: their messages go one after another at `bytes_per_s`, and each is under way
    for `latency_s` more."""

    latency_s: float = 0.0
    bytes_per_s: float = LINK_BYTES_PER_S


@dataclass(frozen=True)
class HostLink:
    """The link of each rank on one of two hosts with each rank on the other."""

    hosts: tuple[Host, Host]
    link: Link


@dataclass(frozen=True)
class Topology:
    """The alive ranks in rank order, and the epoch in which they were agreed upon.

    `links`: those of pairs of hosts that are known; others have `between_hosts`, and ranks of one host, which share
    its memory, `within_host`.
    `power`: what clocks can be chosen from; None: they are what they are. `life_s`: how long it is expected to last,
    in seconds.
    """

    members: tuple[Member, ...]
    ranks_per_host: int = 2
    epoch: Epoch = Epoch(0)
    within_host: Link = Link()
    between_hosts: Link = Link()
    links: tuple[HostLink, ...] = ()
    power: Power | None = None
    life_s: float = LIFE_S

    def __post_init__(self) -> None:
        ranks = [m.rank for m in self.members]
        if not ranks or ranks != sorted(set(ranks)):
            raise PlanError(f"topology: ranks {ranks} must be distinct, ascending and at least one")
        for member in self.members:
            if not member.speed > 0:
                raise PlanError(f"topology: rank {member.rank} has speed {member.speed}; a speed is above 0")
        for link in (self.within_host, self.between_hosts, *(each.link for each in self.links)):
            if not (link.latency_s >= 0 and link.bytes_per_s > 0):
                raise PlanError(f"topology: {link}; a latency is at least 0 and a rate above 0")

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The alive ranks, ascending."""
        return tuple(m.rank for m in self.members)

    def member(self, rank: Rank) -> Member:
        """The member of that rank; PlanError if it is not alive."""
        if rank not in self._members:
            raise PlanError(f"topology: rank {rank} is not alive in epoch {self.epoch}")
        return self._members[rank]

    @property
    def is_uniform(self) -> bool:
        """Whether all links are alike, whoever is on which host."""
        return self.between_hosts == self.within_host and not self.links

    def link(self, a: Rank, b: Rank) -> Link:
        """The link between two ranks that are alive."""
        hosts = self._members[a].host, self._members[b].host
        return self.within_host if hosts[0] == hosts[1] else self._links.get(hosts, self.between_hosts)

    def links_among(self, ranks: Sequence[Rank]) -> tuple[Link, ...]:
        """Of each two of them, (0, 1), (0, 2), …, (1, 2), … by their places; a single one if all are alike."""
        if self.is_uniform:
            return (self.within_host,)
        found = tuple(self.link(a, b) for a, b in itertools.combinations(ranks, 2)) or (self.within_host,)
        return found if len(set(found)) > 1 else found[:1]

    @cached_property
    def _members(self) -> dict[Rank, Member]:
        return {member.rank: member for member in self.members}

    @cached_property
    def _links(self) -> dict[tuple[Host, Host], Link]:
        return {pair: each.link for each in self.links for pair in (each.hosts, (each.hosts[1], each.hosts[0]))}


def local_topology(
    world_size: int,
    ranks_per_host: int = 2,
    memory_bytes: int | None = None,
    epoch: Epoch = Epoch(0),
    speeds: Sequence[float] | None = None,
) -> Topology:
    """`world_size` ranks, `ranks_per_host` neighbours sharing an (emulated) host; all alike if `speeds` is None."""
    members = tuple(
        Member(Rank(r), Host(r // ranks_per_host), 1.0 if speeds is None else speeds[r], memory_bytes)
        for r in range(world_size)
    )
    return Topology(members, ranks_per_host, epoch)
