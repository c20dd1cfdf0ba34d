"""Cost of a message between two ranks of this machine, measured before planning.

In: a configuration, or whether ranks share a host. Out: each `Link`. Two endpoints in this process exchange messages,
each in its own thread, over the links of ranks (`native/comm`): shared memory on one host, TCP between hosts, emulated
ones included. Links between machines are not measured yet.

    links_of(config)             ->  (Link(…), Link(…))     # within a host, between hosts; cached
    measure_link(one_host=True)  ->  Link(latency_s=3.4e-06, bytes_per_s=5700000000.0)
"""

from __future__ import annotations

import json
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from elaswave_fx import _native
from elaswave_fx.build.program_cache import cache_folder
from elaswave_fx.config.keys import Config
from elaswave_fx.data.cached import cached_json, digest
from elaswave_fx.plan.work.topology import Link

_SMALL_BYTES, _SMALL_EXCHANGES = 64, 200
_LARGE_BYTES, _LARGE_EXCHANGES = 4 << 20, 15
"""A message that no cache of a core holds, and whose transfer takes some milliseconds."""

_TIMEOUT_S = 10.0
_DIGITS = 2
"""Significant digits kept: further ones are not reproducible."""


def links_of(config: Config) -> tuple[Link, Link]:
    """Measured links between two ranks of one host, and of different hosts, emulated or not; cached. If the job has
    only one kind, it stands for both."""
    parallel = config.parallel
    if parallel.ranks == 1:
        return Link(), Link()
    within = _link_of(config, one_host=True) if parallel.ranks_per_host > 1 else None
    between = _link_of(config, one_host=False) if parallel.ranks > parallel.ranks_per_host else None
    known = within or between
    assert known is not None
    return within or known, between or known


def _link_of(config: Config, one_host: bool) -> Link:
    def make() -> str:
        link = measure_link(one_host)
        return json.dumps([link.latency_s, link.bytes_per_s])

    key = digest("shortest", torch.__version__, platform.node(), Path(_native.__file__).stat().st_size)
    name = "link" if one_host else "link_of_hosts"
    found = cached_json(cache_folder(config), name, key, make)
    latency_s, bytes_per_s = json.loads(found)
    return Link(latency_s, bytes_per_s)


def measure_link(one_host: bool) -> Link:
    """The link: half of a small message's round trip is the latency, and a large message's extra time gives the rate.

    Raise CommError if two endpoints cannot be linked.
    """
    hosts = ["one", "one" if one_host else "other"]
    ends = [_native.Endpoint(rank, "m" * 32, host_id=hosts[rank]) for rank in range(2)]
    try:
        with ThreadPoolExecutor(1) as other:
            linked = other.submit(ends[1].connect, {0: ("127.0.0.1", ends[0].port, hosts[0])}, _TIMEOUT_S)
            ends[0].connect({1: ("127.0.0.1", ends[1].port, hosts[1])}, _TIMEOUT_S)
            linked.result()
            latency_s = _one_way_s(ends, other, _SMALL_BYTES, _SMALL_EXCHANGES)
            large_s = _one_way_s(ends, other, _LARGE_BYTES, _LARGE_EXCHANGES)
    finally:
        for end in ends:
            end.close()
    bytes_per_s = _LARGE_BYTES / max(large_s - latency_s, 1e-9)
    return Link(_rounded(latency_s), _rounded(bytes_per_s))


def _one_way_s(ends: list[_native.Endpoint], other: ThreadPoolExecutor, size: int, count: int) -> float:
    """Half of the shortest round trip of a message of that size: longer ones waited for a core, which is no property of
    the link."""
    here, there = (torch.zeros(size, dtype=torch.uint8) for _ in ends)

    def answer() -> None:
        for _ in range(count):
            ends[1].wait(ends[1].recv(0, 1, there), _TIMEOUT_S)
            ends[1].wait(ends[1].send(0, 1, there), _TIMEOUT_S)

    answering, taken = other.submit(answer), []
    for _ in range(count):
        began = time.perf_counter()
        ends[0].wait(ends[0].send(1, 1, here), _TIMEOUT_S)
        ends[0].wait(ends[0].recv(1, 1, here), _TIMEOUT_S)
        taken.append(time.perf_counter() - began)
    answering.result()
    return min(taken) / 2


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
