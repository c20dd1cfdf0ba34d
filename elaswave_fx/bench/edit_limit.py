"""The least time in which ranks that share this machine's cores can edit their groups: processor time of messages.

In: the groups after the loss. Out: seconds. Each survivor says that it has stopped and hears of the new epoch, which
is first made durable by one write; an all-reduce of n members takes 2 (n - 1) messages. A message is one write, one
wake-up and one read over loopback TCP, as measured here; nothing is allowed for deciding, interpreters or waiting.

    least(views, Costs(message_s=7e-6, durable_s=4e-4))   ->  (7.4e-4, 97)
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.bench.processes import PLENTY_S, Processes
from elaswave_fx.bench.views import Views
from elaswave_fx.launch.channel import Channel

ROUND_TRIPS, TRIALS = 4000, 3
WRITES = 21
BYTES = 4096
"""Of a message and of a durable write: the size of the checked all-reduce."""


@dataclass(frozen=True)
class Costs:
    """Of this machine: processor seconds of a message at both ends, seconds of a write that survives a crash."""

    message_s: float
    durable_s: float


def costs() -> Costs:
    """Measured now; of the messages the quickest trial counts, for nothing can be below it."""
    return Costs(min(_message_s() for _ in range(TRIALS)), _durable_s())


def least(after: Views, costs: Costs) -> tuple[float, int]:
    """Seconds, and the messages that they are made of."""
    agreement = 2 * len(after.world)
    groups = sum(2 * (len(group) - 1) for group in (after.world, *after.stages, *after.pipelines))
    messages = agreement + groups
    return messages * costs.message_s / len(os.sched_getaffinity(0)) + costs.durable_s, messages


def _message_s() -> float:
    """Two processes throw a message to and fro."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve(channel: Channel) -> None:
        link, _ = listener.accept()
        channel.send("done", cpu_s=_throw(link, first=False))
        channel.receive(PLENTY_S)

    def call(channel: Channel) -> None:
        channel.send("done", cpu_s=_throw(socket.create_connection(("127.0.0.1", port)), first=True))
        channel.receive(PLENTY_S)

    with listener, Processes() as processes:
        processes.fork("serve", serve)
        processes.fork("call", call)
        said: dict[str, Any] = dict(processes.hear(["serve", "call"], "done"))
    return sum(fields["cpu_s"] for fields in said.values()) / (2 * ROUND_TRIPS)


def _throw(link: socket.socket, first: bool) -> float:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ball = memoryview(bytearray(BYTES))
    began = time.process_time()
    if first:
        link.sendall(ball)
    for number in range(ROUND_TRIPS):
        link.recv_into(ball, BYTES, socket.MSG_WAITALL)
        if not first or number + 1 < ROUND_TRIPS:
            link.sendall(ball)
    return time.process_time() - began


def _durable_s() -> float:
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as folder:
        path, taken = Path(folder) / "register", []
        for _ in range(WRITES):
            began = time.perf_counter()
            with path.open("wb") as file:
                file.write(bytes(BYTES))
                file.flush()
                os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)
