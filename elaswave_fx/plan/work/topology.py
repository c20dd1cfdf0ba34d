"""Alive ranks: their hosts, speeds, memory and links.

local_topology(4, ranks_per_host=2)  ->  ranks 0,1 on host 0, ranks 2,3 on host 1, epoch 0
host_named("host-1")                 ->  1, the emulated host; a number of six digits for any other name
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NewType

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.operating_points import Power

Rank = NewType("Rank", int)
"""One worker process with one device."""

Host = NewType("Host", int)
"""The memory domain: ranks that may share memory. Emulated hosts, and containers, share a machine."""

_EMULATED = "host-"

Epoch = NewType("Epoch", int)
"""Grows by one at every agreed membership change."""

LINK_BYTES_PER_S = 3e9
"""Assumed bandwidth of an unmeasured link: send and receive over loopback."""

LIFE_S = 3600.0
"""Default life of a topology in seconds: an hour between changes."""


@dataclass(frozen=True)
class Member:
    """One alive rank; `speed` is relative (1.0 = that of the unit costs), `memory_bytes` None = unbounded. `machine`:
    the name of the failure domain; all ranks of a machine fail with it."""

    rank: Rank
    host: Host
    speed: float = 1.0
    memory_bytes: int | None = None
    machine: str = ""


@dataclass(frozen=True)
class Link:
    """The link between two ranks: messages pass one after another at `bytes_per_s`, each with a latency of
    `latency_s`."""

    latency_s: float = 0.0
    bytes_per_s: float = LINK_BYTES_PER_S


@dataclass(frozen=True)
class HostLink:
    """The link of each rank on one of two hosts with each rank on the other."""

    hosts: tuple[Host, Host]
    link: Link


@dataclass(frozen=True)
class Topology:
    """The alive ranks in rank order, and the epoch that agreed on them.

    `links`: known pairs of hosts; others have `between_hosts`, and ranks of one host, which share its memory,
    `within_host`. `power`: the choice of clocks; None: fixed clocks. `life_s`: expected duration, in seconds.
    `leaving`: draining members, ascending; the next plans give them no work and no replicas. `switch_bytes`: bound of a
    rank's memory for syncing replicas, beside its plan; None: all its free memory. `on_trial`: members whose speed is
    assumed, ascending: they were too slow for any work.
    """

    members: tuple[Member, ...]
    ranks_per_host: int = 2
    epoch: Epoch = Epoch(0)
    within_host: Link = Link()
    between_hosts: Link = Link()
    links: tuple[HostLink, ...] = ()
    power: Power | None = None
    life_s: float = LIFE_S
    leaving: tuple[Rank, ...] = ()
    switch_bytes: int | None = None
    on_trial: tuple[Rank, ...] = ()

    def __post_init__(self) -> None:
        ranks = [m.rank for m in self.members]
        if not ranks or ranks != sorted(set(ranks)):
            raise PlanError(f"topology: ranks {ranks} must be distinct, ascending and at least one")
        if not set(self.leaving) < set(ranks) or list(self.leaving) != sorted(set(self.leaving)):
            raise PlanError(
                f"topology: ranks {list(self.leaving)} leave; they must be members, ascending, and one must stay"
            )
        if not set(self.on_trial) <= set(ranks) or list(self.on_trial) != sorted(set(self.on_trial)):
            raise PlanError(f"topology: ranks {list(self.on_trial)} are on trial; they must be members, ascending")
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

    def with_speeds(self, speeds: Mapping[Rank, float]) -> Topology:
        """The topology with measured speeds of these ranks."""
        members = tuple(replace(m, speed=speeds.get(m.rank, m.speed)) for m in self.members)
        return replace(self, members=members, on_trial=tuple(rank for rank in self.on_trial if rank not in speeds))

    def with_trials(self, speeds: Mapping[Rank, float]) -> Topology:
        """The topology with assumed speeds of these ranks."""
        on_trial = tuple(sorted({*self.on_trial, *speeds}))
        return replace(self.with_speeds(speeds), on_trial=on_trial)

    def speeds_changed_from(self, before: Topology) -> dict[Rank, float]:
        """The speeds of ranks that had other speeds before; both topologies have the same ranks."""
        return {m.rank: m.speed for m in self.members if m.speed != before.member(m.rank).speed}

    def with_leaving(self, ranks: Sequence[Rank]) -> Topology:
        """The topology with these ranks as leaving."""
        return replace(self, leaving=tuple(sorted(ranks)))

    @property
    def staying(self) -> Topology:
        """The topology without leaving ranks."""
        if not self.leaving:
            return self
        return self.of(tuple(m for m in self.members if m.rank not in self.leaving))

    def of(self, members: tuple[Member, ...], leaving: Sequence[Rank] = ()) -> Topology:
        """The topology with other members, of which some leave."""
        on_trial = set(self.on_trial).intersection(m.rank for m in members)
        return replace(self, members=members, leaving=tuple(leaving), on_trial=tuple(sorted(on_trial)))

    @property
    def machines(self) -> tuple[str, ...]:
        """The failure domains of the members, each once, in rank order."""
        return tuple(dict.fromkeys(m.machine for m in self.members))

    @property
    def is_uniform(self) -> bool:
        """Whether all links are alike, whatever the hosts."""
        return self.between_hosts == self.within_host and not self.links

    def link(self, a: Rank, b: Rank) -> Link:
        hosts = self._members[a].host, self._members[b].host
        return self.within_host if hosts[0] == hosts[1] else self._links.get(hosts, self.between_hosts)

    def links_among(self, ranks: Sequence[Rank]) -> tuple[Link, ...]:
        """Links of each two of the ranks, (0, 1), (0, 2), …, (1, 2), … by place; a single one if all are alike."""
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
    machine: str = "",
) -> Topology:
    """`world_size` ranks of one machine, `ranks_per_host` neighbours per (emulated) host; all alike if `speeds` is
    None."""
    members = tuple(
        Member(Rank(r), Host(r // ranks_per_host), 1.0 if speeds is None else speeds[r], memory_bytes, machine)
        for r in range(world_size)
    )
    return Topology(members, ranks_per_host, epoch)


def emulated_host(rank: int, ranks_per_host: int) -> str:
    """Name of the host that a rank of the job's own machine emulates, by its number."""
    return f"{_EMULATED}{rank // ranks_per_host}"


def host_named(memory_domain: str) -> Host:
    """Number of a host, a function of its name alone, so that all plans of a job agree."""
    number = memory_domain.removeprefix(_EMULATED)
    if number != memory_domain and number.isdecimal():
        return Host(int(number))
    digest = hashlib.blake2b(memory_domain.encode(), digest_size=8).digest()
    return Host(100_000 + int.from_bytes(digest, "little") % 900_000)
