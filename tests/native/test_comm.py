"""The Python view of native/comm: real processes, tensors, and the error classes. The C++ tests cover the library."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as connection_pipe

import pytest
import torch

from elaswave_fx import _native
from elaswave_fx.errors import CommError, DeadlineExceeded, PeerLost

TEST_TIMEOUT_S = 60.0
"""Far more than anything takes."""

Body = Callable[[_native.Endpoint, Connection], None]


def _member(rank: int, allow_shm: bool, to_parent: Connection, body: Body) -> None:
    endpoint = _native.Endpoint(rank, "token", host_id="host", allow_shm=allow_shm)
    to_parent.send(endpoint.port)
    ports = to_parent.recv()
    endpoint.connect({r: ("127.0.0.1", port, "host") for r, port in enumerate(ports)}, TEST_TIMEOUT_S)
    body(endpoint, to_parent)
    endpoint.close()


class Ranks:
    """Forked processes, one rank each, all linked; `pipes[rank]` leads to what the body got."""

    def __init__(self, size: int, allow_shm: bool, body: Body) -> None:
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = connection_pipe()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _member(rank, allow_shm, there, body)
                    code = 0
                except BaseException:  # noqa: BLE001 - the child's last frame: print, then leave without the parent's clean-up
                    traceback.print_exc(file=sys.stderr)
                os._exit(code)
            there.close()
            self.pids.append(pid)
            self.pipes.append(here)
        ports = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(ports)

    def join(self, rank: int) -> int:
        """The exit code of a rank, or the negative signal that ended it."""
        _, status = os.waitpid(self.pids[rank], 0)
        self.pids[rank] = 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        for pid in filter(None, self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def pair() -> Iterator[tuple[_native.Endpoint, _native.Endpoint]]:
    endpoints = [_native.Endpoint(rank, "token") for rank in (0, 1)]
    table = {e.rank: ("127.0.0.1", e.port, "") for e in endpoints}
    dialer = threading.Thread(target=endpoints[1].connect, args=(table, TEST_TIMEOUT_S))
    dialer.start()
    endpoints[0].connect(table, TEST_TIMEOUT_S)
    dialer.join()
    yield endpoints[0], endpoints[1]
    for endpoint in endpoints:
        endpoint.close()


@pytest.mark.parametrize("allow_shm", [False, True], ids=["tcp", "shm"])
def test_processes_exchange_tensors(allow_shm: bool) -> None:
    def body(endpoint: _native.Endpoint, _: Connection) -> None:
        rank, other = endpoint.rank, 1 - endpoint.rank
        assert endpoint.link_kind(other) == ("shm" if allow_shm else "tcp")
        got = torch.zeros(100_000)
        receive = endpoint.recv(other, 7, got)
        endpoint.wait([endpoint.send(other, 7, torch.full((100_000,), float(rank))), receive], TEST_TIMEOUT_S)
        assert bool((got == other).all())

        word = bytearray(5)
        receive = endpoint.recv(other, 8, word)
        endpoint.wait([endpoint.send(other, 8, b"hello"), receive], TEST_TIMEOUT_S)
        assert word == b"hello"

        group = _native.Group(endpoint, 1, [0, 1])
        whole = torch.full((10,), -1.0, dtype=torch.float64)
        whole[:7] = 0 if rank == 0 else -1
        whole[7:] = 1 if rank == 1 else -1
        group.all_gather(whole, [(0, 7), (7, 10)], TEST_TIMEOUT_S)
        assert whole.tolist() == [0.0] * 7 + [1.0] * 3
        group.barrier(TEST_TIMEOUT_S)

    ranks = Ranks(2, allow_shm, body)
    try:
        assert [ranks.join(rank) for rank in (0, 1)] == [0, 0]
    finally:
        ranks.end()


@pytest.mark.parametrize("allow_shm", [False, True], ids=["tcp", "shm"])
def test_a_killed_process_is_a_lost_peer(allow_shm: bool) -> None:
    def body(endpoint: _native.Endpoint, to_parent: Connection) -> None:
        to_parent.send("up")
        try:
            endpoint.wait(endpoint.recv(1 - endpoint.rank, 1, torch.zeros(1000)), TEST_TIMEOUT_S)
        except PeerLost as lost:
            to_parent.send((lost.rank, str(lost)))

    ranks = Ranks(2, allow_shm, body)
    try:
        assert [pipe.recv() for pipe in ranks.pipes] == ["up", "up"]
        os.kill(ranks.pids[1], signal.SIGKILL)
        lost, message = ranks.pipes[0].recv()
        assert lost == 1
        assert message.startswith("rank 0: rank 1 is lost: ")
        assert ranks.join(1) == -signal.SIGKILL
        assert ranks.join(0) == 0
    finally:
        ranks.end()


def test_errors_are_ours(pair: tuple[_native.Endpoint, _native.Endpoint]) -> None:
    zero, one = pair
    with pytest.raises(DeadlineExceeded, match="recv from rank 1, tag 0x5, 4 bytes"):
        zero.wait(zero.recv(1, 5, torch.zeros(1)), 0.01)
    with pytest.raises(CommError, match=f"127.0.0.1:{one.port}: the port is already in use"):
        _native.Endpoint(2, "token", port=one.port)
    stranger = _native.Endpoint(2, "guess")
    with pytest.raises(CommError, match="wrong token"):
        stranger.connect({0: ("127.0.0.1", zero.port, "")}, TEST_TIMEOUT_S)
    stranger.close()
    zero.abort("enough")
    with pytest.raises(CommError, match="aborted: enough"):
        zero.wait(zero.send(1, 1, torch.zeros(1)), TEST_TIMEOUT_S)


def test_buffers_that_cannot_be_used_are_refused(pair: tuple[_native.Endpoint, _native.Endpoint]) -> None:
    zero, _ = pair
    with pytest.raises(ValueError, match="only contiguous CPU tensors"):
        zero.send(1, 1, torch.zeros(4, 4).t())
    with pytest.raises(TypeError):
        zero.send(1, 1, 3)
    with pytest.raises((BufferError, TypeError)):
        zero.recv(1, 1, b"read only")
    group = _native.Group(zero, 1, [0, 1])
    with pytest.raises(ValueError, match=r"interval \[2, 9\) ends behind the 8 elements"):
        group.all_gather(torch.zeros(8), [(0, 2), (2, 9)], TEST_TIMEOUT_S)


def test_a_wait_lets_other_threads_run(pair: tuple[_native.Endpoint, _native.Endpoint]) -> None:
    zero, one = pair
    got = torch.zeros(3)
    entered = threading.Event()

    def wait() -> None:
        receive = zero.recv(1, 1, got)
        entered.set()
        zero.wait(receive, TEST_TIMEOUT_S)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert entered.wait(TEST_TIMEOUT_S)
    one.wait(one.send(0, 1, torch.ones(3)), TEST_TIMEOUT_S)
    waiter.join(TEST_TIMEOUT_S)
    assert got.tolist() == [1.0, 1.0, 1.0]
