"""What a message of a step waits behind a large one on the same link: one sent in bulk, or, as before, in its turn.

Both ends are endpoints of one process. In: a link of shared memory, of TCP over loopback, or of TCP in a network
namespace of its own whose loopback carries 800 Mbit/s, which takes root and `tc` of iproute2. Out: seconds.

    measure("tcp", 64 << 20, repeats=5)  ->  {"bulk": [0.0003, …], "step": [0.031, …], "alone": [...], …}
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from elaswave_fx import _native
from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.channel import Channel
from tools.bench.namespaces import hosts, missing, slow_loopback
from tools.bench.processes import TEST_TIMEOUT_S, Processes
from tools.bench.results import in_turns

SMALL = 64 << 10
LINKS = ("shm", "tcp", "800 Mbit/s")
"""Kinds of links; the last one is shaped."""

_SHAPED = LINKS[-1]
_BYTES_PER_S = 1e8

Samples = dict[str, list[float]]
"""Seconds by what was measured: the small message `alone`, behind `bulk`, behind a `step` message; and the large one by
itself, `large bulk` and `large step`."""


def measure(link: str, large: int, repeats: int) -> Samples:
    """Samples of a large message of `large` bytes and a small one, in turns. Raises `ConfigError` where the machine
    does not let us have a network of our own."""
    lacking = missing(("ip", "tc")) if link == _SHAPED else None
    if lacking is not None:
        raise ConfigError(lacking)
    with ExitStack() as stack:
        host = stack.enter_context(hosts(1))[0] if link == _SHAPED else None
        if host is not None:
            slow_loopback(host, _BYTES_PER_S)
        processes = stack.enter_context(Processes())

        def body(channel: Channel) -> None:
            if host is not None:
                host.enter()
            channel.send("measured", samples=_sample(_Pair(link, large), repeats))
            channel.receive(TEST_TIMEOUT_S)

        processes.fork("pair", body)
        return processes.hear(["pair"], "measured")["pair"]["samples"]


def _sample(pair: _Pair, repeats: int) -> Samples:
    settle_s = 0.2 * pair.large_s(bulk=False)  # by then the large message is well under way
    sides: dict[str, Callable[[], float]] = {
        "alone": pair.small_s,
        "bulk": lambda: pair.small_behind_s(settle_s, bulk=True),
        "step": lambda: pair.small_behind_s(settle_s, bulk=False),
        "large bulk": lambda: pair.large_s(bulk=True),
        "large step": lambda: pair.large_s(bulk=False),
    }
    return in_turns(sides, repeats, lambda turn: None)


class _Pair:
    """Rank 0, which sends, and rank 1."""

    def __init__(self, link: str, large: int) -> None:
        self._ends = [_native.Endpoint(rank, "t" * 32, host_id="host", allow_shm=link == "shm") for rank in range(2)]
        table = {end.rank: ("127.0.0.1", end.port, end.host_id) for end in self._ends}
        dialing = threading.Thread(target=self._ends[1].connect, args=(table, TEST_TIMEOUT_S))
        dialing.start()
        self._ends[0].connect(table, TEST_TIMEOUT_S)
        dialing.join()
        self._small, self._small_got = (torch.ones(SMALL, dtype=torch.uint8) for _ in range(2))
        self._large, self._large_got = (torch.ones(large, dtype=torch.uint8) for _ in range(2))

    def small_s(self) -> float:
        """Seconds of a small message, from its send to its arrival."""
        sender, receiver = self._ends
        taken = receiver.recv(0, 2, self._small_got)
        began = time.perf_counter()
        sent = sender.send(1, 2, self._small)
        receiver.wait(taken, TEST_TIMEOUT_S)
        ended = time.perf_counter()
        sender.wait(sent, TEST_TIMEOUT_S)
        return ended - began

    def large_s(self, bulk: bool) -> float:
        """The same of a large one."""
        began = time.perf_counter()
        self._begin_large(bulk)()
        return time.perf_counter() - began

    def small_behind_s(self, settle_s: float, bulk: bool) -> float:
        """Seconds of a small message that is sent `settle_s` after a large one."""
        finish = self._begin_large(bulk)
        time.sleep(settle_s)
        taken_s = self.small_s()
        finish()
        return taken_s

    def _begin_large(self, bulk: bool) -> Callable[[], None]:
        sender, receiver = self._ends
        taken = receiver.recv(0, 1, self._large_got)
        sent = sender.send(1, 1, self._large, bulk=bulk)

        def finish() -> None:
            receiver.wait(taken, TEST_TIMEOUT_S)
            sender.wait(sent, TEST_TIMEOUT_S)

        return finish
