"""A lower bound of an edit: the exchanges that it needs and nothing else, in loops that have run before.

In: the number of ranks. Out: `LowerBound`, seconds from the first survivor's end of its barrier to the last checked
exchange on the new groups, and how much of it comes after the last answer. Links and groups are ours. Each survivor
says one word to a registrar, which writes a page once it has heard all, and answers each; nothing is decided,
checked, planned, installed or copied, and nobody is told to leave. So it is what is left for any agreement with a
central store, however it is programmed, on these links and this machine.

    lower_bound(ranks=16, depth=2, victim=5)   ->  LowerBound(total_s=0.0065, exchanges_s=0.0022)
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx import _native
from elaswave_fx.errors import CommError
from elaswave_fx.files import replace_file
from elaswave_fx.launch.channel import Channel
from tools.bench.processes import TEST_TIMEOUT_S, Processes, meet
from tools.bench.views import Checks, Group, Views

WARM_ROUNDS = 5
"""The same with nobody lost, before the clock runs."""

PAGE_BYTES = 4096
WORD = bytes(64)
QUIET_S = 0.3
"""Until everybody stands in the barrier that the victim does not enter."""


@dataclass(frozen=True)
class LowerBound:
    """One measured round. `exchanges_s`: what remains when the last survivor has its answer."""

    total_s: float
    exchanges_s: float


def lower_bound(ranks: int, depth: int, victim: int) -> LowerBound:
    """Kill `victim` and take the time. Raises BenchFailed."""
    names = [f"rank-{rank}" for rank in range(ranks)]
    with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener, Processes() as processes:
        port = listener.getsockname()[1]
        for rank, name in enumerate(names):
            processes.fork(name, _rank_body(rank, Views.first(ranks, depth), victim, port))
        processes.fork("registrar", _registrar_body(listener, ranks, processes.folder / "page"))
        processes.introduce(names)
        processes.hear(names, "ready")
        time.sleep(QUIET_S)
        processes.kill(names[victim])
        laps = processes.hear([name for name in names if name != names[victim]], "done").values()
        done = max(lap["done"] for lap in laps)
        return LowerBound(done - min(lap["left"] for lap in laps), done - max(lap["answered"] for lap in laps))


def _registrar_body(listener: socket.socket, ranks: int, page: Path) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        links = {link.fileno(): link for link in (listener.accept()[0] for _ in range(ranks))}
        poll = select.epoll()
        for number, link in links.items():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            poll.register(number, select.EPOLLIN)
        for turn in range(WARM_ROUNDS + 1):
            _one_turn(links, poll, page, awaited=ranks if turn < WARM_ROUNDS else ranks - 1)
        channel.receive(TEST_TIMEOUT_S)

    return body


def _one_turn(links: dict[int, socket.socket], poll: select.epoll, page: Path, awaited: int) -> None:
    """Hear so many words, write, answer."""
    heard = []
    while len(heard) < awaited:
        for number, _ in poll.poll():
            if links[number].recv(len(WORD), socket.MSG_WAITALL):
                heard.append(number)
            else:
                poll.unregister(number)  # the victim's
    replace_file(page, bytes(PAGE_BYTES))
    for number in heard:
        links[number].sendall(WORD)


def _rank_body(rank: int, views: Views, victim: int, port: int) -> Callable[[Channel], None]:
    """The groups of a rank are all ranks and its stage, as an engine has them."""
    before, after = views.of(rank)[:2], views.less(victim).of(rank)[:2] if rank != victim else ()

    def body(channel: Channel) -> None:
        endpoint = _native.Endpoint(rank, "t" * 32, host_id=_host_of(rank))
        meet(endpoint, channel, _host_of)
        registrar = socket.create_connection(("127.0.0.1", port))
        registrar.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for epoch in range(1, WARM_ROUNDS + 1):
            _round(registrar, endpoint, Checks(rank, before), epoch)
        world, checks = _group(endpoint, 1, before[0], WARM_ROUNDS), Checks(rank, after)
        channel.send("ready")
        if rank != victim:
            left = _stand(world)
            answered = _round(registrar, endpoint, checks, WARM_ROUNDS + 1)
            channel.send("done", left=left, answered=answered, done=time.monotonic())
        channel.receive(TEST_TIMEOUT_S)

    return body


def _host_of(rank: int) -> str:
    """Neighbours share a host."""
    return f"host-{rank // 2}"


def _stand(world: Any) -> float:
    """Wait in a barrier that the victim never enters; return when it was left."""
    try:
        world.barrier(TEST_TIMEOUT_S)
    except CommError:
        return time.monotonic()
    raise ValueError("a barrier opened without the lost rank")


def _round(registrar: socket.socket, endpoint: Any, checks: Checks, epoch: int) -> float:
    """When the answer came."""
    registrar.sendall(WORD)
    registrar.recv(len(WORD), socket.MSG_WAITALL)
    answered = time.monotonic()
    endpoint.advance(epoch)
    for number, members in enumerate(checks.groups):
        group = _group(endpoint, 1 + number, members, epoch)
        checks(members, lambda data, spans, group=group: group.all_gather(data, spans, TEST_TIMEOUT_S))
    return answered


def _group(endpoint: Any, number: int, members: Group, epoch: int) -> Any:
    return _native.Group(endpoint, number, list(members), epoch)
