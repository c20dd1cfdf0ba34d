"""Messages of the control plane: ranks connect to the coordinator over TCP, and it answers on the same streams.

In: the values of `messages.py`. Out: the same values at the other end, and at the coordinator's `Connected` and
`Disconnected`. A stream that closes means that the process ended or that the network broke; it does not tell which. A
message is MessagePack, `[kind, fields]`, decoded by the table below; nothing else is ever built from input. Messages to
an absent peer are lost, as the protocol expects. A job keeps one address, whichever process is its coordinator.

    ["Ack", {"term": 1, "epoch": 4, "member": true, "ledgered": 120}]
"""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from elaswave_fx.control import stream, tcp
from elaswave_fx.control.protocol.member_info import UNNUMBERED, MemberInfo
from elaswave_fx.control.protocol.messages import (
    Ack,
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
    Members,
    MembersRequest,
    MembersWanted,
    MustStay,
    NumberWanted,
    Over,
    PartWanted,
    Prepare,
    Prepared,
    ProbeStore,
    RankReport,
    Refused,
    Reshape,
    ReshapeWanted,
    StoreSeen,
    Welcome,
)
from elaswave_fx.control.protocol.validate import fault_of_reshape
from elaswave_fx.control.stream import Hello, Stream
from elaswave_fx.errors import CommError, PlanError
from elaswave_fx.plan.next.replan_request import ReshapeRequest
from elaswave_fx.plan.work.topology import Rank

OfRank = Heartbeat | Prepared | Ended | Gone | ProbeStore | RankReport
"""Messages from ranks to the coordinator."""

Question = JoinRequest | Fetch | MembersRequest | Reshape
"""Requests on a connection of its own, which belongs to no rank; one at a time."""

Answer = Welcome | FilePart | Members | Granted | Refused
"""Answers to these requests."""

Message = OfRank | MemberInfo | Question | Answer | Ack | Prepare | Activate | MustStay | Over | StoreSeen
"""All messages between a rank or a joiner and the coordinator."""

Wanted = NumberWanted | PartWanted | MembersWanted | ReshapeWanted
"""A request as an event of the coordinator."""

Heard = OfRank | Connected | Disconnected | Wanted
"""All events of the coordinator's socket."""

RECONNECT_S, RECONNECT_S_MAX = 0.02, 0.5
"""First and longest pause between attempts to reach an absent coordinator."""

UNSENT_MAX = 100
"""Messages kept until a coordinator has proved the token; older ones are dropped."""

STRANGERS_MAX = 1024
"""Maximum number of unauthenticated connections; a newer one closes the oldest."""

DIAL_S = 1.0
"""Timeout of a connection attempt: lost SYNs are resent only late."""

_KINDS = (
    MemberInfo, JoinRequest, Fetch, MembersRequest, Reshape, Heartbeat, Prepared, Ended, Gone, ProbeStore, RankReport,
    Ack, Prepare, Activate, MustStay, Over, StoreSeen, Refused, Welcome, FilePart, Members, Granted,
)  # fmt: skip
_DECODERS = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in _KINDS}
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Address of a job's coordinator: `host` is an address or a name, for ranks. `token`: both ends must prove it."""

    host: str
    port: int
    token: str


def encode(message: Message) -> bytes:
    return _ENCODER.encode([type(message).__name__, message])


def decode(body: bytes) -> Message:
    """Decode a message. Raises `CommError` if the body is none."""
    try:
        kind, fields = _ENVELOPE.decode(body)
        return _DECODERS[kind].decode(fields)
    except (msgspec.MsgspecError, KeyError, ValueError, PlanError, RecursionError) as error:
        raise CommError(f"control: a body of {len(body)} bytes is no message ({error})") from error


class RankSocket:
    """A rank's socket. One thread uses it."""

    def __init__(self, address: ControlAddress, info: MemberInfo) -> None:
        """`info`: sent whenever the stream opens. Raises `CommError` if the host cannot be resolved."""
        self._places = itertools.cycle(tcp.resolve(address.host, address.port))
        self._token, self._rank, self._info = address.token.encode(), info.number, encode(info)
        self._refused = False  # for good
        self._dialed: socket.socket | None = None  # a connection in progress
        self._stream: Stream | None = None
        self._hello: Hello | None = None  # sent and not answered yet
        self._unsent: deque[bytes] = deque(maxlen=UNSENT_MAX)  # messages until the handshake ends
        self._again_s = 0.0
        self._pause_s = RECONNECT_S

    @property
    def is_open(self) -> bool:
        """Whether there is a stream to a coordinator, as far as known."""
        return self._stream is not None

    def watch(self, poll: select.poll) -> None:
        """Let `poll` wake up for input or possible output. To be called before every poll."""
        if self._stream is not None:
            poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._stream.waits else 0))
        elif self._dialed is not None:
            poll.register(self._dialed, select.POLLOUT)

    def connect(self, now_s: float) -> float | None:
        """Open the stream if needed; return when to try again, None while it is open."""
        if self._dialed is not None:
            self._greet(self._dialed, now_s)
        if self._stream is None and self._dialed is None and now_s >= self._again_s and not self._refused:
            self._dial(now_s)
        return self._again_s if self._stream is None else None

    def send(self, message: Message) -> None:
        """Send without blocking; the message is lost if there is no coordinator."""
        if self._stream is None:
            return
        if self._hello is not None:
            self._unsent.append(encode(message))
        else:
            self._stream.send(encode(message))

    def receive(self) -> list[Message]:
        if self._stream is None:
            return []
        self._stream.flush()
        try:
            return self._messages(self._stream)
        except CommError:
            self._drop()  # the other end is not the job's, or sent garbage
            return []

    def close(self, linger_s: float = 0.0) -> None:
        """Close; `linger_s`: time for the last messages to leave. Idempotent."""
        if self._dialed is not None:
            self._dialed.close()
            self._dialed = None
        if self._stream is not None:
            if self._hello is None:
                _finish([self._stream], linger_s)
            self._drop()

    def _dial(self, now_s: float) -> None:
        try:
            self._dialed = tcp.dial(next(self._places))
        except OSError:
            self._wait(now_s)
            return
        self._again_s = now_s + DIAL_S
        self._greet(self._dialed, now_s)

    def _greet(self, dialed: socket.socket, now_s: float) -> None:
        """Send HELLO if the connection is open; close it if it failed or took too long."""
        try:
            if not tcp.is_dialed(dialed):
                if now_s < self._again_s:
                    return
                raise TimeoutError
        except OSError:
            dialed.close()
        else:
            self._stream, self._hello = Stream(dialed), Hello.of(self._rank)
            self._stream.send(self._hello.frame)
        self._dialed = None
        self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        """Schedule the next attempt, later for every failed one."""
        self._again_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RECONNECT_S_MAX)

    def _messages(self, stream_: Stream) -> list[Message]:
        messages = []
        for frame in stream_.receive():
            if self._hello is not None:
                self._answer(stream_, stream.answer(self._token, self._hello, frame))
            else:
                messages.append(decode(frame))
        self._refused = self._refused or any(isinstance(message, Refused) for message in messages)
        if stream_.ended or self._refused:
            self._drop()
        return messages

    def _answer(self, stream_: Stream, proof: bytes) -> None:
        """Prove the token after the coordinator has; then send the info and the kept messages."""
        stream_.send(proof)
        stream_.send(self._info)
        stream_.most = stream.MESSAGE_BYTES_MAX
        self._hello, self._pause_s = None, RECONNECT_S
        while self._unsent:
            stream_.send(self._unsent.popleft())

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._hello = None, None
        self._unsent.clear()


class _Connection:
    """A stream at the coordinator; `rank` is set once it has proved the token and its info was accepted."""

    def __init__(self, stream_: Stream, host: str, port: int) -> None:
        """`host`, `port`: address of the other end."""
        self.stream, self.host, self.place = stream_, host, tcp.shown(host, port)
        self.rank: Rank | None = None
        self.asked: tuple[Hello, bytes] | None = None  # its hello, and our challenge
        self.proved = False
        self.name: int | None = None  # of an asker, after its first request
        self.asks = False  # a request is unanswered
        self.refused = False  # the reason was sent; further input is ignored


class CoordinatorSocket:
    """The coordinator's socket, of which a job has one at a time. One thread uses it; `fileno` is for pollers."""

    def __init__(self, address: ControlAddress, listener: socket.socket | None = None) -> None:
        """`listener`: at the job's address, closed with this; None: opened here. Raises `CommError` if the address is
        in use, as by another process.

        `admit(info)` returns why a rank is refused, or None; by default none is. `doubt(message)` returns the fault in
        a rank's message, or None; the rank then loses its connection. `on_stranger(why)` is called for connections that
        sent something but ended without proving the token; `on_fault(why)` for those that end for a later message.
        """
        self.admit: Callable[[MemberInfo], str | None] = lambda info: None
        self.doubt: Callable[[OfRank], str | None] = lambda message: None
        self.on_fault: Callable[[str], None] = lambda why: None
        self.on_stranger: Callable[[str], None] = lambda why: None
        self._token = address.token.encode()
        self._listener = listener or tcp.listen(address.host, address.port)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}  # by file descriptor, oldest first
        self._of_rank: dict[int, _Connection] = {}  # the newest of each rank
        self._askers: dict[int, _Connection] = {}  # by name
        self._names = itertools.count()
        self._last: tuple[Message | None, bytes] = (None, b"")  # a message to all ranks is encoded once
        self.refused = 0

    def fileno(self) -> int:
        """Return a descriptor that is readable while `receive` has events."""
        return self._poll.fileno()

    def send(self, rank: int, message: Message) -> None:
        """Send to a connected rank; never blocks."""
        connection = self._of_rank.get(rank)
        if connection is None:
            return
        if message is not self._last[0]:
            self._last = (message, encode(message))
        connection.stream.send(self._last[1])
        self._watch(connection)

    def answer(self, asker: int, message: Answer) -> None:
        """Answer a request; no-op if its connection has closed. A refused asker then closes its end."""
        connection = self._askers.get(asker)
        if connection is None or not connection.asks:
            return
        connection.asks = False
        if isinstance(message, Refused):
            self.refused += 1
            connection.refused = True
        connection.stream.send(encode(message))
        self._watch(connection)

    def receive(self) -> list[Heard]:
        """Return the events since the last call, in order, including all messages of a rank before its stream ended."""
        found: list[Heard] = []
        for number, _ in self._poll.poll(0):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._connections:
                found += self._hear(self._connections[number])
        return found

    def close(self, linger_s: float = 0.0) -> None:
        """Close; `linger_s`: time for the last messages to leave. Ranks then look for another coordinator."""
        self._listener.close()
        _finish(
            [connection.stream for connection in self._connections.values() if connection.rank is not None], linger_s
        )
        for connection in self._connections.values():
            connection.stream.close()
        self._connections.clear()
        self._poll.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, place = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            if tcp.is_of_another_user(accepted):
                accepted.close()  # unread: it could take a rank's place
                self.refused += 1
                continue
            accepted.setblocking(False)
            tcp.tune(accepted)
            self._connections[accepted.fileno()] = _Connection(Stream(accepted), *place[:2])
            self._poll.register(accepted, select.EPOLLIN)
            strangers = [each for each in self._connections.values() if not each.proved]
            if len(strangers) > STRANGERS_MAX:  # close the oldest one of the most frequent address
                ((most, _),) = Counter(each.host for each in strangers).most_common(1)
                self._refuse(next(each for each in strangers if each.host == most))

    def _hear(self, connection: _Connection) -> list[Heard]:
        connection.stream.flush()
        found: list[Heard] = []
        # A dialer with another token detects that from the challenge, and leaves silently.
        is_unproved = connection.asked is not None and not connection.proved
        why = "somebody came, and left without a proof of the job's token" if is_unproved else None
        try:
            for frame in connection.stream.receive():
                if connection.rank is not None:
                    found += self._said(connection, frame)
                elif not connection.refused:
                    found += self._greeted(connection, frame)
        except CommError as error:
            self.refused += 1
            connection.stream.ended = True
            why = str(error)
        if connection.stream.ended:
            if why is not None:
                tell = self.on_fault if connection.proved else self.on_stranger
                tell(f"{connection.place}: {why.removeprefix('control: ')}")
            return [*found, *self._ended(connection)]
        self._watch(connection)
        return found

    def _greeted(self, connection: _Connection, frame: bytes) -> list[Connected | Wanted]:
        """Handle one step of the handshake. Raises `CommError` for an unauthenticated peer."""
        if connection.asked is None:
            hello = Hello.read(frame)
            connection.asked = hello, stream.challenge(self._token, hello)
            connection.stream.send(connection.asked[1])
            return []
        hello, challenge = connection.asked
        if connection.proved:
            said = decode(frame)
            if hello.rank == UNNUMBERED and isinstance(said, Question):
                return [self._wanted(connection, said)]
            return self._show(connection, hello.rank, said)
        if not stream.is_proof(self._token, hello, challenge, frame):
            raise CommError("control: somebody came who does not hold the job's token")
        connection.proved, connection.stream.most = True, stream.MESSAGE_BYTES_MAX
        return []

    def _wanted(self, connection: _Connection, question: Question) -> Wanted:
        """Handle a request. Raises `CommError` if the previous one is unanswered."""
        if connection.asks:
            raise CommError("control: somebody asks again before the answer is there")
        if connection.name is None:
            connection.name = next(self._names)
            self._askers[connection.name] = connection
        connection.asks = True
        if isinstance(question, Fetch):
            return PartWanted(connection.name, question)
        if isinstance(question, MembersRequest):
            return MembersWanted(connection.name, question.info)
        if isinstance(question, Reshape):
            wrong = fault_of_reshape(question)
            if wrong is not None:
                raise CommError(f"control: {wrong}")
            return ReshapeWanted(connection.name, ReshapeRequest(question.dp, question.pp))
        return NumberWanted(connection.name, question.versions)

    def _show(self, connection: _Connection, rank: Rank, info: Message) -> list[Connected | Wanted]:
        """Handle a rank's info. A refused rank receives the reason and closes its end."""
        if not isinstance(info, MemberInfo) or info.number != rank:
            raise CommError(f"control: rank {rank} has not sent its own member info")
        reason = self.admit(info)
        if reason is not None:
            self.refused += 1
            connection.refused = True
            connection.stream.send(encode(Refused(reason)))
            return []
        connection.rank = rank
        self._of_rank[rank] = connection
        return [Connected(rank)]

    def _said(self, connection: _Connection, frame: bytes) -> list[OfRank]:
        """Decode a rank's message. Raises `CommError` if it is invalid, or names another rank."""
        message = decode(frame)
        if not isinstance(message, OfRank):
            raise CommError(f"control: rank {connection.rank} says {type(message).__name__}")
        rank = message.report.rank if isinstance(message, Prepared) else message.rank
        if rank != connection.rank:
            raise CommError(f"control: rank {connection.rank} speaks as rank {rank}")
        wrong = self.doubt(message)
        if wrong is not None:
            raise CommError(f"control: rank {rank} says what cannot be, in {type(message).__name__}: {wrong}")
        return [message]

    def _ended(self, connection: _Connection) -> list[Disconnected]:
        """Drop a connection; report it unless the rank has a newer one."""
        self._drop(connection)
        rank = connection.rank
        if rank is None or self._of_rank.get(rank) is not connection:
            return []
        del self._of_rank[rank]
        return [Disconnected(rank)]

    def _refuse(self, connection: _Connection) -> None:
        self.refused += 1
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.name is not None:
            self._askers.pop(connection.name, None)
        del self._connections[connection.stream.fileno()]
        self._poll.unregister(connection.stream)
        connection.stream.close()

    def _watch(self, connection: _Connection) -> None:
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.stream.waits else 0)
        self._poll.modify(connection.stream, wanted)


def _finish(streams: list[Stream], linger_s: float) -> None:
    """Flush until the other ends have read everything and closed, or the time is over."""
    by_s = time.monotonic() + linger_s
    while (left_s := by_s - time.monotonic()) > 0:
        for each in streams:
            each.finish()
        streams = [each for each in streams if not each.ended]
        if not streams:
            return
        poll = select.poll()
        for each in streams:
            poll.register(each, select.POLLIN | (select.POLLOUT if each.waits else 0))
        poll.poll(1e3 * left_s)
