"""Only messages of the job, of known kinds and shapes, are ever taken."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from elaswave_fx.control import wire
from elaswave_fx.control.agent.ask_to_join import ask_to_join
from elaswave_fx.control.protocol.member_info import UNNUMBERED
from elaswave_fx.control.protocol.messages import (
    Activate,
    Connected,
    Disconnected,
    Ended,
    Fetch,
    FilePart,
    Gone,
    Granted,
    Heartbeat,
    JoinRequest,
    Leave,
    Members,
    MembersRequest,
    MustStay,
    NumberWanted,
    Offer,
    Over,
    Prepare,
    Prepared,
    ProbeStore,
    RankReport,
    Refused,
    Reshape,
    StoreSeen,
    Welcome,
)
from elaswave_fx.control.protocol.types import (
    SEED,
    Activation,
    Ballot,
    BoxId,
    Certificate,
    Part,
    Record,
    Replica,
    Report,
    Stamp,
    Term,
    Version,
    Vote,
)
from elaswave_fx.control.stream import GREETING_BYTES_MAX, WAITING_BYTES_MAX, Hello, answer
from elaswave_fx.control.tcp import is_dialed, listen, port_of
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, Message, RankSocket, decode, encode
from elaswave_fx.errors import CommError, ConfigError
from elaswave_fx.plan.work.spans import Span, WorkSpan
from elaswave_fx.plan.work.topology import Epoch, Rank
from tests.control.member_infos import info_of
from tests.control.toy_planner import first_assignment
from tests.waiting import WAIT_S, await_true

STAMP = Stamp(Version(7), Epoch(2))
VOTE = Vote(STAMP, Rank(1), (WorkSpan(Span(0, 2), Span(3, 6)),), b"\x00\xff")
CERTIFICATE = Certificate(STAMP, (VOTE,))
RECORD = Record(STAMP, (Part(Rank(0), (Span(0, 3),)),), 2**63 + 1)
REPORT = Report(
    Rank(1), Epoch(2), STAMP, {BoxId(3): Replica(STAMP, 2**64 - 1)}, {BoxId(3): (RECORD,)}, (VOTE,), (CERTIFICATE,),
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
    ProbeStore(Rank(1), 17.25),
    StoreSeen(Term(1), Epoch(2), True, 17.25, 4000.5),
    replace(info_of(3), versions={"torch": "2.13.0"}, data_digest="ff", memory_bytes=1 << 34),
    Refused("it has torch 2.12.0"),
    JoinRequest({"torch": "2.13.0"}),
    Welcome(
        Rank(4),
        '{"build": {"units": 3}}',
        (info_of(0), info_of(1)),
        (Offer("state.safetensors", 1 << 34, "ab" * 32),),
    ),
    Fetch("state.safetensors", 1 << 33),
    MembersRequest(info_of(1)),
    Members((info_of(0), info_of(1))),
    Members((), missing=(Rank(2), Rank(3))),
    FilePart("state.safetensors", 1 << 33, b"\x00\xff"),
    RankReport(Rank(4), "event", {"event": "joined", "epoch": 3, "at_s": 17.5}),
    replace(BEAT, leave=Leave.OVERDUE),
    Gone(Rank(1)),
    MustStay("it is the last rank of the job"),
    Reshape(2, 4),
    Reshape(None, None),
    Granted("the target layout is another"),
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
    """Nobody listens there yet."""
    with listen("127.0.0.1", 0) as place:
        port = port_of(place)
    yield ControlAddress("127.0.0.1", port, "t" * 32)


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
    sockets = [RankSocket(address, info_of(rank)) for rank in ranks]
    assert set(heard(coordinator, len(ranks), *sockets)) == {Connected(Rank(rank)) for rank in ranks}
    return sockets


def test_messages_go_both_ways(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    rank = RankSocket(address, info_of(1))
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
        rank = RankSocket(address, info_of(3))
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
    rank = RankSocket(address, info_of(0))
    turn(rank)  # there is nobody yet
    for _ in range(3):
        coordinator = CoordinatorSocket(address)
        with pytest.raises(CommError, match=f"cannot listen on 127.0.0.1:{address.port} .another process has the port"):
            CoordinatorSocket(address)
        assert heard(coordinator, 1, rank) == [Connected(Rank(0))]
        coordinator.send(0, Over("heard"))
        await_true(lambda: turn(rank) == [Over("heard")], "an answer")
        coordinator.close()
    rank.close()


def test_ranks_that_call_before_there_is_a_coordinator_are_kept_by_the_listener(address: ControlAddress) -> None:
    """As while a coordinator is started again: the launcher has the listener open all the time."""
    with listen(address.host, address.port) as listener:
        ranks = [RankSocket(address, info_of(rank)) for rank in range(40)]
        turn(*ranks)
        turn(*ranks)  # nobody answers, and nobody has to dial again
        for _ in range(2):
            coordinator = CoordinatorSocket(address, listener.dup())
            assert set(heard(coordinator, 40, *ranks)) == {Connected(rank._rank) for rank in ranks}
            coordinator.close()
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_an_address_may_be_of_any_kind(host: str) -> None:
    with listen(host, 0) as listener:
        address = ControlAddress(host, port_of(listener), "t" * 32)
        coordinator = CoordinatorSocket(address, listener.dup())
        (rank,) = met(coordinator, address, 1)
        coordinator.send(1, Over("heard"))
        await_true(lambda: turn(rank) == [Over("heard")], "an answer")
        rank.close()
        coordinator.close()


def test_a_host_that_is_not_to_be_found_is_named() -> None:
    with pytest.raises(CommError, match=r"host 'nowhere\.invalid' cannot be resolved"):
        RankSocket(ControlAddress("nowhere.invalid", 1, "t" * 32), info_of(0))
    with pytest.raises(CommError, match="cannot be resolved .it is no name of a host"):
        listen("ü" * 80, 0)
    with pytest.raises(CommError, match=r"cannot listen on \[2001:db8::1\]:0"):
        listen("2001:db8::1", 0)


def test_a_dialer_that_meets_itself_hangs_up() -> None:
    """The kernel gives a dialer any free port, maybe the one that it dials."""
    with listen("127.0.0.1", 0) as place:
        port = port_of(place)
    with socket.socket() as dialed:
        dialed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialed.bind(("127.0.0.1", port))
        dialed.connect(("127.0.0.1", port))
        with pytest.raises(OSError, match="its own other end"):
            is_dialed(dialed)


def test_what_was_said_last_arrives_though_something_lies_unread(
    coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    """A connection that is closed with something unread is torn at once, with what was still on its way."""
    (rank,) = met(coordinator, address, 1)
    for _ in range(3):
        coordinator.send(1, Over("x" * 1_000_000))
    for _ in range(50):
        rank.send(BEAT)
    rank.send(Ended(Rank(1)))
    closing = threading.Thread(target=rank.close, args=(WAIT_S,))
    closing.start()
    assert heard(coordinator, 52)[-2:] == [Ended(Rank(1)), Disconnected(Rank(1))]
    closing.join()


def test_a_rank_that_is_refused_hears_why_and_comes_no_more(
    coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    coordinator.admit = lambda info: "it has torch 2.12.0" if info.number == 1 else None
    refused, friend = RankSocket(address, info_of(1)), RankSocket(address, info_of(2))
    for rank in (refused, friend):
        rank.connect(time.monotonic())
        rank.send(beat(rank._rank))
    said: list[object] = []
    await_true(lambda: (said.extend(coordinator.receive()), turn(friend), turn(refused))[-1] != [], "an answer")
    assert said + heard(coordinator, 2 - len(said), friend) == [Connected(Rank(2)), beat(2)]
    assert turn(refused) == [] and refused.connect(time.monotonic() + 60.0) is not None
    await_true(lambda: (coordinator.receive(), len(coordinator._connections))[-1] == 1, "its end is closed")
    friend.close()


@pytest.mark.parametrize("shown", [info_of(2), BEAT], ids=["another's", "none"])
def test_a_rank_without_a_card_of_its_own_is_cut_off(
    shown: Message, coordinator: CoordinatorSocket, address: ControlAddress
) -> None:
    rank = RankSocket(address, info_of(1))
    rank._info = encode(shown)
    turn(rank)
    await_true(lambda: (turn(rank), coordinator.receive(), coordinator.refused)[-1] == 1, "it is turned away")
    assert coordinator.receive() == []
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
    stranger = socket.create_connection((address.host, address.port))
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
    stranger = RankSocket(replace(address, token="guess"), info_of(0))
    friend = RankSocket(address, info_of(1))
    for rank in (stranger, friend):
        rank.connect(time.monotonic())
        rank.send(BEAT)
    assert heard(coordinator, 2, stranger, friend) == [Connected(Rank(1)), BEAT]
    stranger.close()
    friend.close()


def test_the_token_never_travels(address: ControlAddress) -> None:
    """Somebody has the coordinator's place who does not hold the token: it gets a HELLO, and nothing after that."""
    listener = socket.create_server((address.host, address.port))
    rank = RankSocket(address, info_of(1))
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
        first.sendall(proof + framed(encode(info_of(1))))
        assert heard(coordinator, 1) == [Connected(Rank(1))]
    assert heard(coordinator, 1) == [Disconnected(Rank(1))]
    with dialed(address) as second:
        second.sendall(framed(hello.frame) + proof + framed(encode(info_of(1))))
        await_true(lambda: is_closed(coordinator, second), "the end is closed")


def _took(end: socket.socket, into: list[bytes]) -> bool:
    try:
        into.append(end.recv(1 << 12))
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "message",
    [beat(2), ProbeStore(Rank(2), 1.0), Over("a rank does not say so"), None],
    ids=["for another", "asks for another", "no rank's", "noise"],
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


def test_strangers_of_one_address_take_no_place_of_another(
    coordinator: CoordinatorSocket, address: ControlAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STRANGERS_MAX", 16)
    first = dialed(address)
    assert coordinator.receive() == []
    others = []
    for _ in range(64):
        others.append(socket.create_connection((address.host, address.port), source_address=("127.0.0.2", 0)))
        assert coordinator.receive() == []
    first.setblocking(False)
    with pytest.raises(BlockingIOError):  # It would read nothing if it were closed.
        first.recv(1)
    assert others[0].recv(1) == b""
    for stranger in (first, *others):
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
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        stranger = RankSocket(address, info_of(1))
        stranger.connect(time.monotonic())
        while stranger.connect(now_s=0.0) is None:  # so early it does not dial again
            stranger.receive()
        os._exit(0)
    heard_: list[object] = []
    await_true(lambda: (heard_.extend(coordinator.receive()), coordinator.refused)[-1] > 0, "it is turned away")
    os.waitpid(pid, 0)
    assert heard_ == [] and coordinator._connections == {}


def asked(address: ControlAddress, found: list[object]) -> threading.Thread:
    """A joiner that asks for a number; what it is told comes to `found`."""

    def ask() -> None:
        try:
            found.append(ask_to_join(address, {"torch": "2.13.0"}, WAIT_S))
        except ConfigError as error:
            found.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


def test_a_joiner_is_given_a_number_or_told_why_not(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    welcome = Welcome(Rank(4), '{"run_dir": "runs/today"}', (info_of(0),))
    for answer_of_job, told in (
        (welcome, welcome),
        (Refused("the job is full"), f"tcp://127.0.0.1:{address.port}: the job refuses this process: the job is full"),
    ):
        found: list[object] = []
        asking = asked(address, found)
        (wanted,) = heard(coordinator, 1)
        assert isinstance(wanted, NumberWanted) and wanted.versions == {"torch": "2.13.0"}
        coordinator.answer(wanted.connection, answer_of_job)
        coordinator.answer(wanted.connection, answer_of_job)  # it has gone
        asking.join()
        assert found == [told] and coordinator.receive() == []


def test_a_joiner_without_the_token_gets_nothing(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    found: list[object] = []
    asking = asked(replace(address, token="f" * 32), found)
    said: list[object] = []
    await_true(lambda: (said.extend(coordinator.receive()), not asking.is_alive())[-1], "it has given up")
    assert said == [] and len(found) == 1 and "does not hold the job's token" in str(found[0])


def test_a_joiner_is_nobody_else(coordinator: CoordinatorSocket, address: ControlAddress) -> None:
    """Neither does a rank ask for a number, nor is an info without one taken."""
    for number, said in ((1, JoinRequest()), (UNNUMBERED, info_of(UNNUMBERED))):
        rank = RankSocket(address, replace(info_of(1), number=Rank(number)))
        rank._info = encode(said)
        refused = coordinator.refused
        coordinator.admit = lambda info: "no rank of the job has that number"
        await_true(lambda r=rank, n=refused: (turn(r), coordinator.receive(), coordinator.refused > n)[-1], "refused")
        rank.close()
