"""Only messages of the job, of known kinds and shapes, are ever taken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elaswave_fx.control import wire
from elaswave_fx.control.protocol.messages import (
    Activate,
    Connected,
    Disconnected,
    Ended,
    Heartbeat,
    Over,
    Prepare,
    Prepared,
)
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Ballot,
    BoxId,
    Certificate,
    Copy,
    Part,
    Record,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
    WorkSpan,
)
from elaswave_fx.control.stream import GREETING_BYTES_MAX, WAITING_BYTES_MAX, Hello, answer
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, Message, RankSocket, decode, encode
from elaswave_fx.errors import CommError
from elaswave_fx.plan.box import Span
from elaswave_fx.plan.topology import Epoch, Rank
from tests.control.toy_planner import first_assignment
from tests.waiting import await_true

STAMP = Stamp(Version(7), Epoch(2))
VOTE = Vote(STAMP, Rank(1), (WorkSpan(Span(0, 2), Span(3, 6)),), b"\x00\xff")
CERTIFICATE = Certificate(STAMP, (VOTE,))
RECORD = Record(STAMP, (Part(Rank(0), (Span(0, 3),)),), 2**63 + 1)
REPORT = Report(
    Rank(1), Epoch(2), STAMP, {BoxId(3): Copy(STAMP, 2**64 - 1)}, {BoxId(3): (RECORD,)}, (VOTE,), (CERTIFICATE,),
    frozenset({Rank(2)}),
)  # fmt: skip
BEAT = Heartbeat(Rank(1), Epoch(2), Version(7), "FORWARD 3", Rank(0), None, False, True, (CERTIFICATE,))
MESSAGES: list[Message] = [
    BEAT,
    Prepared(Ballot(Term(1), 2), REPORT),
    Ended(Rank(1)),
    Prepare(Ballot(Term(1), 2), Version(9)),
    Activate(Ballot(Term(1), 2), Activation(Epoch(3), first_assignment(4, 2), STAMP, SEED, CERTIFICATE), "{}"),
    Over("2 ranks are too few"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x92\xa4Beat\x80", encode(BEAT)[:-1], b"\x92\xa3Bad\x80"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(CommError, match="is no message"):
        decode(body)


@pytest.fixture
def address() -> Iterator[ControlAddress]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield ControlAddress(Path(folder), "t" * 32, Path())


@pytest.fixture
def coordinator(address: ControlAddress) -> Iterator[CoordinatorSocket]:
    socket = CoordinatorSocket(address)
    yield socket
    socket.close()


def beat(rank: int) -> Heartbeat:
    return replace(BEAT, rank=Rank(rank))


def turn(*ranks: RankSocket) -> list[Message]:
    """What the ranks hear, after they have opened their streams."""
    return [message for rank in ranks if rank.connect(time.monotonic()) is None for message in rank.receive()]


def heard(coordinator: CoordinatorSocket, count: int, *ranks: RankSocket) -> list[object]:
    """The next events at the coordinator, in order."""
    found: list[object] = []

    def came() -> bool:
        turn(*ranks)
        found.extend(coordinator.receive())
        return len(found) >= count

    await_true(came, f"{count} events")
    return found


def met(coordinator: CoordinatorSocket, address: ControlAddress, *ranks: int) -> list[RankSocket]:
    """Ranks whose streams are open."""
    sockets = [RankSocket(address, Rank(rank)) for rank in ranks]
    assert set(heard(coordinator, len(ranks), *sockets)) == {Connected(Rank(rank)) for rank in ranks}
    return sockets


def test_messages_go_both_ways(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    rank = RankSocket(address, Rank(1))
    rank.connect(time.monotonic())
    rank.send(BEAT)  # before the coordinator has answered
    assert heard(coordinator, 2, rank) == [Connected(Rank(1)), BEAT]
    plan = replace(MESSAGES[4], plan="x" * 3_000_000)
    for message in (plan, Over("done")):
        coordinator.send(0, Over("nobody is there"))
        coordinator.send(1, message)
    said: list[Message] = []
    await_true(lambda: (said.extend(turn(rank)), coordinator.receive(), len(said) == 2)[-1], "two messages")
    assert said == [plan, Over("done")]
    rank.send(Ended(Rank(1)))
    rank.close(linger_s=1.0)
    assert heard(coordinator, 2) == [Ended(Rank(1)), Disconnected(Rank(1))]


def test_a_killed_process_is_told_of_without_a_word_of_its_own(
    coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    pid = os.fork()
    if pid == 0:
        rank = RankSocket(address, Rank(3))
        while True:
            turn(rank)
            time.sleep(0.001)
    try:
        assert heard(coordinator, 1) == [Connected(Rank(3))]
        assert coordinator.receive() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert heard(coordinator, 1) == [Disconnected(Rank(3))]


def test_a_rank_finds_the_next_coordinator(address: ControlAddress) -> None:
    rank = RankSocket(address, Rank(0))
    turn(rank)  # there is nobody yet
    for _ in range(3):
        coordinator = CoordinatorSocket(address)
        with pytest.raises(CommError, match="another coordinator has it"):
            CoordinatorSocket(address)
        assert heard(coordinator, 1, rank) == [Connected(Rank(0))]
        coordinator.send(0, Over("heard"))
        await_true(lambda: turn(rank) == [Over("heard")], "an answer")
        coordinator.close()
    rank.close()


def test_of_two_streams_of_a_rank_the_end_of_one_says_nothing(
    coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    (old,) = met(coordinator, address, 1)
    (new,) = met(coordinator, address, 1)
    old.close()
    (other,) = met(coordinator, address, 2)
    new.close()
    assert heard(coordinator, 1, other) == [Disconnected(Rank(1))]


def test_many_ranks_come_at_once(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    for rank in met(coordinator, address, *range(300)):
        rank.close()


def dialed(address: ControlAddress) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(address.path)
    stranger.settimeout(0.001)
    return stranger


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def is_closed(coordinator: CoordinatorSocket, stranger: socket.socket) -> bool:
    assert coordinator.receive() == []
    try:
        return stranger.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "said",
    [
        framed(b"hello"),
        framed(b""),
        framed(encode(BEAT)),
        struct.pack("<I", GREETING_BYTES_MAX + 1),
        b"\xff" * 100,
        framed(Hello.of(Rank(1)).frame) + framed(encode(BEAT)),
        framed(Hello.of(Rank(1)).frame) + framed(b"p" * 32),
    ],
    ids=["words", "nothing", "a message", "too much", "noise", "no proof", "a wrong proof"],
)
def test_strangers_are_turned_away(said: bytes, coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    with dialed(address) as stranger:
        stranger.sendall(said)
        await_true(lambda: is_closed(coordinator, stranger), "the end is closed")
    (rank,) = met(coordinator, address, 5)
    rank.close()


def test_a_rank_with_another_token_is_turned_away(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    stranger = RankSocket(replace(address, token="guess"), Rank(0))
    friend = RankSocket(address, Rank(1))
    for rank in (stranger, friend):
        rank.connect(time.monotonic())
        rank.send(BEAT)
    assert heard(coordinator, 2, stranger, friend) == [Connected(Rank(1)), BEAT]
    stranger.close()
    friend.close()


def test_the_token_never_travels(address: ControlAddress) -> None:
    """Somebody has the coordinator's place who does not hold the token: it gets a HELLO, and nothing after that."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address.path)
    listener.listen()
    rank = RankSocket(address, Rank(1))
    rank.connect(time.monotonic())
    rank.send(BEAT)
    accepted, _ = listener.accept()
    accepted.sendall(framed(b"c" * 64) + framed(encode(Over("end yourself"))))
    assert turn(rank) == []
    heard_ = accepted.recv(1 << 16)
    assert accepted.recv(1) == b""
    assert address.token.encode() not in heard_ and len(heard_) < 64
    listener.close()


def test_what_was_said_once_proves_nothing_the_next_time(
    coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    hello = Hello.of(Rank(1))
    with dialed(address) as first:
        first.sendall(framed(hello.frame))
        answers: list[bytes] = []
        await_true(lambda: bool(coordinator.receive() or _took(first, answers)), "a challenge")
        proof = framed(answer(address.token.encode(), hello, answers[0][4:]))
        first.sendall(proof)
        assert heard(coordinator, 1) == [Connected(Rank(1))]
    assert heard(coordinator, 1) == [Disconnected(Rank(1))]
    with dialed(address) as second:
        second.sendall(framed(hello.frame) + proof)
        await_true(lambda: is_closed(coordinator, second), "the end is closed")


def _took(end: socket.socket, into: list[bytes]) -> bool:
    try:
        into.append(end.recv(1 << 12))
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "message", [beat(2), Over("a rank does not say so"), None], ids=["for another", "no rank's", "noise"]
)
def test_a_rank_that_says_what_it_may_not_is_cut_off(
    message: Message | None, coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    (rank,) = met(coordinator, address, 1)
    if message is None:
        assert rank._stream is not None
        rank._stream.send(b"\xc1")
    else:
        rank.send(message)
    assert heard(coordinator, 1) == [Disconnected(Rank(1))]
    assert coordinator.refused == 1
    rank.close()


def test_strangers_who_say_nothing_do_not_keep_ranks_out(
    coordinator: CoordinatorSocket, address: ControlAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STRANGERS_MAX", 16)
    silent = []
    for _ in range(64):
        silent.append(dialed(address))
        assert coordinator.receive() == []
    (rank,) = met(coordinator, address, 5)
    for stranger in (*silent, rank):
        stranger.close()


def test_what_a_stranger_sends_is_not_kept(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    before = psutil.Process().memory_info().rss
    with dialed(address) as stranger, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(1000):
            with contextlib.suppress(TimeoutError):
                stranger.send(struct.pack("<I", 32 << 20) + b"x" * 100_000)
            assert coordinator.receive() == []
    assert psutil.Process().memory_info().rss - before < 20 << 20
    assert coordinator.refused + len(coordinator._connections) <= 1


def test_a_rank_that_does_not_read_costs_bounded_memory(
    coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    (rank,) = met(coordinator, address, 1)
    for _ in range(100):
        coordinator.send(1, Over("x" * 1_000_000))
    waiting = coordinator._of_rank[1].stream._out
    assert len(waiting) <= WAITING_BYTES_MAX + 1_000_100
    rank.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_even_heard(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    os.chmod(address.folder, 0o755)  # as if it could enter
    os.chmod(address.path, 0o777)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        stranger = RankSocket(address, Rank(1))
        stranger.connect(time.monotonic())
        while stranger.connect(now_s=0.0) is None:  # so early it does not dial again
            stranger.receive()
        os._exit(0)
    heard_: list[object] = []
    await_true(lambda: (heard_.extend(coordinator.receive()), coordinator.refused)[-1] > 0, "it is turned away")
    os.waitpid(pid, 0)
    assert heard_ == [] and coordinator._connections == {}
    os.chmod(address.folder, 0o700)
