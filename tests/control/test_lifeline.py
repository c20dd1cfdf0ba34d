"""The stream that shows when a rank's process is gone."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_fx.control.lifeline import GREETING_BYTES_MAX, STRANGERS_MAX, Lifeline, Lifelines, path_of
from elaswave_fx.control.protocol.messages import Connected, Disconnected
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import CommError
from elaswave_fx.plan.topology import Rank
from tests.waiting import await_true

WAIT_S = 20.0


@pytest.fixture
def address(tmp_path: Path) -> ControlAddress:
    return ControlAddress(f"ipc://@lifeline-{os.getpid()}-{os.urandom(4).hex()}", "t" * 32, tmp_path)


@pytest.fixture
def lifelines(address: ControlAddress) -> Iterator[Lifelines]:
    ends = Lifelines(address)
    yield ends
    ends.close()


def heard(lifelines: Lifelines, count: int) -> list[Connected | Disconnected]:
    """The next events."""
    found: list[Connected | Disconnected] = []
    end = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < end, f"{found} only"
        found += lifelines.events()
        time.sleep(0.001)
    return found


def test_a_killed_process_is_told_of_without_a_word_of_its_own(address: ControlAddress, lifelines: Lifelines) -> None:
    pid = os.fork()
    if pid == 0:
        line = Lifeline(address, Rank(3))
        line.keep()
        signal.pause()
    try:
        assert heard(lifelines, 1) == [Connected(Rank(3))]
        assert lifelines.events() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert heard(lifelines, 1) == [Disconnected(Rank(3))]


def test_a_rank_finds_the_next_coordinator(address: ControlAddress) -> None:
    line = Lifeline(address, Rank(0))
    line.keep()  # there is nobody yet
    first = Lifelines(address)
    line.keep()
    assert heard(first, 1) == [Connected(Rank(0))]
    first.close()
    second = Lifelines(address)
    line.keep()
    assert heard(second, 1) == [Connected(Rank(0))]
    line.keep()
    line.close()
    assert heard(second, 1) == [Disconnected(Rank(0))]
    second.close()


def test_of_two_streams_of_a_rank_the_end_of_one_says_nothing(address: ControlAddress, lifelines: Lifelines) -> None:
    old, new = Lifeline(address, Rank(1)), Lifeline(address, Rank(1))
    old.keep()
    new.keep()
    assert heard(lifelines, 2) == [Connected(Rank(1))] * 2
    old.close()
    other = Lifeline(address, Rank(2))
    other.keep()
    assert heard(lifelines, 1) == [Connected(Rank(2))]
    new.close()
    assert heard(lifelines, 1) == [Disconnected(Rank(1))]


def test_many_ranks_come_at_once(address: ControlAddress, lifelines: Lifelines) -> None:
    lines = [Lifeline(address, Rank(rank)) for rank in range(3 * STRANGERS_MAX)]
    for line in lines:
        line.keep()
    assert lifelines.events() == [Connected(Rank(rank)) for rank in range(len(lines))]


@pytest.mark.parametrize(
    "greeting",
    [b"wrong 1\n", b"t" * 32 + b"\n", b"t" * 32 + b" -1\n", b"t" * 32 + b" one\n", b"x" * GREETING_BYTES_MAX],
    ids=["token", "no rank", "negative", "no number", "endless"],
)
def test_strangers_are_turned_away(address: ControlAddress, lifelines: Lifelines, greeting: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(path_of(address))
        stranger.sendall(greeting)
        stranger.settimeout(0.001)
        events: list[object] = []

        def is_closed() -> bool:
            events.extend(lifelines.events())
            try:
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        await_true(is_closed, "the end is closed")
        assert events == []


def test_strangers_who_say_nothing_do_not_keep_ranks_out(address: ControlAddress, lifelines: Lifelines) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2 * STRANGERS_MAX)]
    for stranger in silent:
        stranger.connect(path_of(address))
    line = Lifeline(address, Rank(5))
    line.keep()
    assert heard(lifelines, 1) == [Connected(Rank(5))]
    for stranger in silent:
        stranger.close()


def test_an_address_that_is_taken_or_not_local_is_refused(
    address: ControlAddress, lifelines: Lifelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaswave_fx.control.lifeline.BIND_S", 0.0)
    with pytest.raises(CommError, match="cannot be taken"):
        Lifelines(address)
    with pytest.raises(CommError, match="no local address"):
        path_of(ControlAddress("tcp://127.0.0.1:4711", "t", Path("/")))
