"""Only messages of the job, of known kinds and shapes, are ever taken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from elaswave_fx.control.protocol.messages import Activate, Ended, Heartbeat, Over, Prepare, Prepared
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
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, Message, RankSocket, decode, encode
from elaswave_fx.errors import CommError
from elaswave_fx.plan.box import Span
from elaswave_fx.plan.topology import Epoch, Rank
from tests.control.toy_planner import first_assignment

STAMP = Stamp(Version(7), Epoch(2))
VOTE = Vote(STAMP, Rank(1), (WorkSpan(Span(0, 2), Span(3, 6)),), b"\x00\xff")
CERTIFICATE = Certificate(STAMP, (VOTE,))
RECORD = Record(STAMP, (Part(Rank(0), Span(0, 3)),), 2**63 + 1)
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


def until(receive: Callable[[], Message | None]) -> Message:
    end = time.monotonic() + 30
    while (message := receive()) is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    return message


def test_strangers_are_dropped_and_counted() -> None:
    url = f"ipc://@wire-{os.getpid()}-{os.urandom(4).hex()}"
    coordinator = CoordinatorSocket(url, "secret")
    friend, stranger = (RankSocket(ControlAddress(url, token, Path())) for token in ("secret", "guess"))
    context = zmq.Context()
    broken = context.socket(zmq.DEALER)
    broken.connect(url)
    for frames in ([b"secret"], [b"secret", b"\xc1"], [b"secret", encode(Over("a rank does not say so"))]):
        broken.send_multipart(frames)
    stranger.send(Ended(Rank(0)))
    friend.send(BEAT)
    assert until(coordinator.receive) == BEAT
    end = time.monotonic() + 30
    while coordinator.refused < 4 and time.monotonic() < end:
        assert coordinator.receive() is None
    assert coordinator.refused == 4
    coordinator.send(0, Over("nobody is there"))
    coordinator.send(1, Over("done"))
    assert until(friend.receive) == Over("done")
    with pytest.raises(CommError, match="cannot be taken"):
        CoordinatorSocket(url, "secret")
    broken.close(0)
    context.term()
    for socket in (friend, stranger, coordinator):
        socket.close()


def test_a_rank_finds_the_next_coordinator() -> None:
    url = f"ipc://@wire-{os.getpid()}-{os.urandom(4).hex()}"
    rank = RankSocket(ControlAddress(url, "secret", Path()))
    for _ in range(2):
        coordinator = CoordinatorSocket(url, "secret")
        end = time.monotonic() + 30
        while coordinator.receive() is None and time.monotonic() < end:
            rank.send(BEAT)
            time.sleep(0.01)
        coordinator.send(1, Over("heard"))
        assert until(rank.receive) == Over("heard")
        coordinator.close(200)
    rank.close()
