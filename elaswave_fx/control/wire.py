"""Messages of the control plane: ranks call the coordinator over TCP, which answers on the same streams.

In: the values of `messages.py`. Out: the same values at the other end, and at the coordinator's `Connected` and
`Disconnected`, which say whether a rank's process is there: the kernel closes its stream with it, or the way to it is
broken; which of the two, a stream cannot say. A message is MessagePack, `[kind, fields]`, decoded by the table below;
nothing else is ever built from what arrives. A message to somebody who is not there is lost, as the protocol expects.
A job has one address for as long as it lives, whichever process is its coordinator.

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
"""What ranks send, and the coordinator takes."""

Question = JoinRequest | Fetch | Reshape
"""What somebody without a number asks."""

Answer = Welcome | FilePart | Granted | Refused
"""What comes of it."""

Message = OfRank | MemberInfo | Question | Answer | Ack | Prepare | Activate | MustStay | Over | StoreSeen
"""All that travels between a rank, or who wants to be one, and the coordinator."""

Wanted = NumberWanted | PartWanted | ReshapeWanted
"""A question, as the coordinator hears it."""

Heard = OfRank | Connected | Disconnected | Wanted
"""What the coordinator hears."""

RECONNECT_S, RECONNECT_S_MAX = 0.02, 0.5
"""The first and the longest wait between attempts to reach a coordinator that is away."""

UNSENT_MAX = 100
"""Messages kept while a coordinator has not answered yet; older ones are dropped."""

STRANGERS_MAX = 1024
"""Connections that have not proved yet who they are; the oldest is closed for a newer one."""

DIAL_S = 1.0
"""A connection that is under way for so long is given up for another one: SYNs that were lost are sent again late."""

_KINDS = (
    MemberInfo, JoinRequest, Fetch, Reshape, Heartbeat, Prepared, Ended, Gone, ProbeStore, RankReport, Ack, Prepare,
    Activate, MustStay, Over, StoreSeen, Refused, Welcome, FilePart, Granted,
)  # fmt: skip
_DECODERS = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in _KINDS}
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a job's coordinator listens: `host` is an address or a name, as ranks reach it. `token`: what both ends
    have to prove that they hold."""

    host: str
    port: int
    token: str


def encode(message: Message) -> bytes:
    """The body of a message."""
    return _ENCODER.encode([type(message).__name__, message])


def decode(body: bytes) -> Message:
    """The message of a body. Raises `CommError` for anything that is none."""
    try:
        kind, fields = _ENVELOPE.decode(body)
        return _DECODERS[kind].decode(fields)
    except (msgspec.MsgspecError, KeyError, ValueError, PlanError, RecursionError) as error:
        raise CommError(f"control: a body of {len(body)} bytes is no message ({error})") from error


class RankSocket:
    """A rank's end. One thread uses it."""

    def __init__(self, address: ControlAddress, info: MemberInfo) -> None:
        """`info`: what it shows whenever it has opened the stream. Raises `CommError` for a host that cannot be
        resolved."""
        self._places = itertools.cycle(tcp.resolve(address.host, address.port))
        self._token, self._rank, self._info = address.token.encode(), info.number, encode(info)
        self._refused = False  # for good
        self._dialed: socket.socket | None = None  # a connection that is under way
        self._stream: Stream | None = None
        self._hello: Hello | None = None  # said, and not answered yet
        self._unsent: deque[bytes] = deque(maxlen=UNSENT_MAX)  # until then
        self._again_s = 0.0
        self._pause_s = RECONNECT_S

    @property
    def is_open(self) -> bool:
        """Whether there is a stream to a coordinator, as far as is known."""
        return self._stream is not None

    def watch(self, poll: select.poll) -> None:
        """Let `poll` wake up when there is something to receive, or to send. To be called before every poll."""
        if self._stream is not None:
            poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._stream.waits else 0))
        elif self._dialed is not None:
            poll.register(self._dialed, select.POLLOUT)

    def connect(self, now_s: float) -> float | None:
        """Open the stream if it is not; returns when to try again, None while it is open."""
        if self._dialed is not None:
            self._greet(self._dialed, now_s)
        if self._stream is None and self._dialed is None and now_s >= self._again_s and not self._refused:
            self._dial(now_s)
        return self._again_s if self._stream is None else None

    def send(self, message: Message) -> None:
        """Never blocks; lost if no coordinator is there."""
        if self._stream is None:
            return
        if self._hello is not None:
            self._unsent.append(encode(message))
        else:
            self._stream.send(encode(message))

    def receive(self) -> list[Message]:
        """What has arrived."""
        if self._stream is None:
            return []
        self._stream.flush()
        try:
            return self._messages(self._stream)
        except CommError:
            self._drop()  # the other end is none of the job's, or has lost its mind
            return []

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: how long what was sent last may take to leave. Called again, it does nothing."""
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
        """Say hello on a connection if it is open by now; give it up if it cannot be, or takes too long."""
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
        """Before the next attempt, the longer the more of them have led to nobody."""
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
        """The coordinator has proved the token, so does the rank; then it shows its info, and may say what it has
        kept."""
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
    """A stream at the coordinator; `rank` once it has proved that it holds the token, and its info was taken."""

    def __init__(self, stream_: Stream, host: str, port: int) -> None:
        """`host`, `port`: of the other end."""
        self.stream, self.host, self.place = stream_, host, tcp.shown(host, port)
        self.rank: Rank | None = None
        self.asked: tuple[Hello, bytes] | None = None  # what it said, and what it is to answer
        self.proved = False
        self.name: int | None = None  # of a joiner's, once it has asked something
        self.asks = False  # it waits for an answer
        self.refused = False  # it has been told why, and is not heard any more


class CoordinatorSocket:
    """The coordinator's end, of which a job has one at a time. One thread uses it; `fileno` is for pollers."""

    def __init__(self, address: ControlAddress, listener: socket.socket | None = None) -> None:
        """`listener`: at the job's address, to be closed with this; None: it is opened here. Raises `CommError` when
        the address cannot be taken, as while another process has it.

        `admit(info)` says why a rank that shows it is refused, or None; until it is set, nobody is. `doubt(message)`
        says what is wrong with what a rank has said, or None; the rank loses its connection then. `on_stranger(why)`
        hears of connections that end before they have proved the token, though they had begun to speak, `on_fault(why)`
        of those that end for what was said after that."""
        self.admit: Callable[[MemberInfo], str | None] = lambda info: None
        self.doubt: Callable[[OfRank], str | None] = lambda message: None
        self.on_fault: Callable[[str], None] = lambda why: None
        self.on_stranger: Callable[[str], None] = lambda why: None
        self._token = address.token.encode()
        self._listener = listener or tcp.listen(address.host, address.port)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}  # by file descriptor, oldest first
        self._of_rank: dict[int, _Connection] = {}  # the newest of each
        self._joiners: dict[int, _Connection] = {}  # by name
        self._names = itertools.count()
        self._last: tuple[Message | None, bytes] = (None, b"")  # what goes to every rank is encoded once
        self.refused = 0

    def fileno(self) -> int:
        """Readable while `receive` has something to say."""
        return self._poll.fileno()

    def send(self, rank: int, message: Message) -> None:
        """To a rank that is connected; never blocks."""
        connection = self._of_rank.get(rank)
        if connection is None:
            return
        if message is not self._last[0]:
            self._last = (message, encode(message))
        connection.stream.send(self._last[1])
        self._watch(connection)

    def answer(self, joiner: int, message: Answer) -> None:
        """To the question of who has no number; nothing if it has gone. One that is refused closes its end then."""
        connection = self._joiners.get(joiner)
        if connection is None or not connection.asks:
            return
        connection.asks = False
        if isinstance(message, Refused):
            self.refused += 1
            connection.refused = True
        connection.stream.send(encode(message))
        self._watch(connection)

    def receive(self) -> list[Heard]:
        """What has happened since the last call, in order; all that a rank has said before its stream ended."""
        found: list[Heard] = []
        for number, _ in self._poll.poll(0):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._connections:
                found += self._hear(self._connections[number])
        return found

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: how long what was sent last may take to leave. Ranks notice, and look for another coordinator."""
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
                accepted.close()  # unread: it could have a place that a rank needs
                self.refused += 1
                continue
            accepted.setblocking(False)
            tcp.tune(accepted)
            self._connections[accepted.fileno()] = _Connection(Stream(accepted), *place[:2])
            self._poll.register(accepted, select.EPOLLIN)
            strangers = [each for each in self._connections.values() if not each.proved]
            if len(strangers) > STRANGERS_MAX:  # The oldest goes of the address that has most.
                ((most, _),) = Counter(each.host for each in strangers).most_common(1)
                self._refuse(next(each for each in strangers if each.host == most))

    def _hear(self, connection: _Connection) -> list[Heard]:
        connection.stream.flush()
        found: list[Heard] = []
        # A dialer that holds another token sees it from the challenge, and goes without a word.
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
        """One step of the handshake. Raises `CommError` for a stranger."""
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
        """Who has no number asks one thing at a time. Raises `CommError` for one that does not wait for the answer."""
        if connection.asks:
            raise CommError("control: somebody asks again before the answer is there")
        if connection.name is None:
            connection.name = next(self._names)
            self._joiners[connection.name] = connection
        connection.asks = True
        if isinstance(question, Fetch):
            return PartWanted(connection.name, question)
        if isinstance(question, Reshape):
            wrong = fault_of_reshape(question)
            if wrong is not None:
                raise CommError(f"control: {wrong}")
            return ReshapeWanted(connection.name, ReshapeRequest(question.dp, question.pp))
        return NumberWanted(connection.name, question.versions)

    def _show(self, connection: _Connection, rank: Rank, info: Message) -> list[Connected | Wanted]:
        """A rank shows its info. One that is refused hears why, and closes its end."""
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
        """A message of a rank. Raises `CommError` for what no rank says, or says for itself."""
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
        """A rank that has opened a newer stream is not told of its older one."""
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
            self._joiners.pop(connection.name, None)
        del self._connections[connection.stream.fileno()]
        self._poll.unregister(connection.stream)
        connection.stream.close()

    def _watch(self, connection: _Connection) -> None:
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.stream.waits else 0)
        self._poll.modify(connection.stream, wanted)


def _finish(streams: list[Stream], linger_s: float) -> None:
    """Until the other ends have taken all and closed theirs, or the time is over."""
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
