"""Messages of the control plane: ranks call the coordinator, which answers on the same streams.

In: the values of `messages.py`. Out: the same values at the other end, and at the coordinator's `Connected` and
`Disconnected`, which say whether a rank's process is there: the kernel closes its stream with it, or the way to it is
broken; which of the two, a stream cannot say. A message is MessagePack, `[kind, fields]`, decoded by the table below;
nothing else is ever built from what arrives. A message to somebody who is not there is lost, as the protocol expects.

    ["Ack", {"term": 1, "epoch": 4, "member": true, "ledgered": 120}]
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elaswave_fx.control import stream
from elaswave_fx.control.protocol.messages import (
    Ack,
    Activate,
    Connected,
    Disconnected,
    Ended,
    Heartbeat,
    Over,
    Prepare,
    Prepared,
)
from elaswave_fx.control.stream import Hello, Stream
from elaswave_fx.errors import CommError, PlanError
from elaswave_fx.plan.topology import Rank

OfRank = Heartbeat | Prepared | Ended
"""What ranks send, and the coordinator takes."""

Message = OfRank | Ack | Prepare | Activate | Over
"""All that travels between a rank and the coordinator."""

RECONNECT_S, RECONNECT_S_MAX = 0.02, 0.5
"""The first and the longest wait between attempts to reach a coordinator that is away."""

UNSENT_MAX = 100
"""Messages kept while a coordinator has not answered yet; older ones are dropped."""

STRANGERS_MAX = 1024
"""Connections that have not proved yet who they are; the oldest is closed for a newer one."""

_BACKLOG = 1024
_DECODERS = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (Heartbeat, Prepared, Ended, Ack, Prepare, Activate, Over)
}
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a job's control plane is. `folder`: that of its store in memory, which only its owner can enter; `store`:
    the run directory; `launcher`: its pid, or 0."""

    folder: Path
    token: str
    store: Path
    launcher: int = 0

    @property
    def path(self) -> str:
        """Where the coordinator listens."""
        return str(self.folder / "coordinator.sock")

    @property
    def job_file(self) -> Path:
        """Where the `JobFile` lies while the job runs; it holds the token, and goes when the job is over."""
        return self.folder / "job.json"


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

    def __init__(self, address: ControlAddress, rank: Rank) -> None:
        self._path, self._token, self._rank = address.path, address.token.encode(), rank
        self._stream: Stream | None = None
        self._hello: Hello | None = None  # said, and not answered yet
        self._unsent: deque[bytes] = deque(maxlen=UNSENT_MAX)  # until then
        self._again_s = 0.0
        self._pause_s = RECONNECT_S

    def watch(self, poll: select.poll) -> None:
        """Let `poll` wake up when there is something to receive, or to send. To be called before every poll."""
        if self._stream is not None:
            poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._stream.waits else 0))

    def connect(self, now_s: float) -> float | None:
        """Open the stream if it is not; returns when to try again, None while it is open."""
        if self._stream is None and now_s >= self._again_s:
            self._dial()
            self._again_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, RECONNECT_S_MAX)
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
        if self._stream is not None:
            _drain([self._stream], linger_s)
            self._drop()

    def _dial(self) -> None:
        dialed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            dialed.connect(self._path)
            self._stream = Stream(dialed)
        except (OSError, CommError):
            dialed.close()
            return
        self._hello = Hello.of(self._rank)
        self._stream.send(self._hello.frame)

    def _messages(self, stream_: Stream) -> list[Message]:
        messages = []
        for frame in stream_.receive():
            if self._hello is not None:
                self._answer(stream_, stream.answer(self._token, self._hello, frame))
            else:
                messages.append(decode(frame))
        if stream_.ended:
            self._drop()
        return messages

    def _answer(self, stream_: Stream, proof: bytes) -> None:
        """The coordinator has proved the token, so does the rank; then it may say what it has kept."""
        stream_.send(proof)
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
    """A stream at the coordinator; `rank` once it has proved who it is."""

    def __init__(self, stream_: Stream) -> None:
        self.stream = stream_
        self.rank: Rank | None = None
        self.asked: tuple[Hello, bytes] | None = None  # what it said, and what it is to answer


class CoordinatorSocket:
    """The coordinator's end, of which a job has one at a time. One thread uses it; `fileno` is for pollers."""

    def __init__(self, address: ControlAddress) -> None:
        """Raises `CommError` when the address cannot be taken, as while another coordinator has it."""
        self._token = address.token.encode()
        self._place = _take_place(address)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            Path(address.path).unlink(missing_ok=True)  # a dead coordinator's
            self._listener.bind(address.path)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            os.close(self._place)
            raise CommError(f"control: {address.path} cannot be taken ({error})") from error
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}  # by file descriptor, oldest first
        self._of_rank: dict[int, _Connection] = {}  # the newest of each
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

    def receive(self) -> list[OfRank | Connected | Disconnected]:
        """What has happened since the last call, in order; all that a rank has said before its stream ended."""
        found: list[OfRank | Connected | Disconnected] = []
        for number, _ in self._poll.poll(0):
            if number == self._listener.fileno():
                self._accept()
            elif number in self._connections:
                found += self._hear(self._connections[number])
        return found

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: how long what was sent last may take to leave. Ranks notice, and look for another coordinator."""
        _drain([connection.stream for connection in self._connections.values()], linger_s)
        for connection in self._connections.values():
            connection.stream.close()
        self._connections.clear()
        self._poll.close()
        self._listener.close()
        os.close(self._place)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                try:
                    connection = _Connection(Stream(accepted))
                except CommError:
                    self.refused += 1
                    continue
                self._connections[accepted.fileno()] = connection
                self._poll.register(accepted, select.EPOLLIN)
                strangers = [each for each in self._connections.values() if each.rank is None]
                if len(strangers) > STRANGERS_MAX:
                    self._refuse(strangers[0])

    def _hear(self, connection: _Connection) -> list[OfRank | Connected | Disconnected]:
        connection.stream.flush()
        found: list[OfRank | Connected | Disconnected] = []
        try:
            for frame in connection.stream.receive():
                found += self._greeted(connection, frame) if connection.rank is None else self._said(connection, frame)
        except CommError:
            self.refused += 1
            connection.stream.ended = True
        if connection.stream.ended:
            return [*found, *self._ended(connection)]
        self._watch(connection)
        return found

    def _greeted(self, connection: _Connection, frame: bytes) -> list[Connected]:
        """One step of the handshake. Raises `CommError` for a stranger."""
        if connection.asked is None:
            hello = Hello.read(frame)
            connection.asked = hello, stream.challenge(self._token, hello)
            connection.stream.send(connection.asked[1])
            return []
        hello, challenge = connection.asked
        if not stream.is_proof(self._token, hello, challenge, frame):
            raise CommError("control: somebody came who does not hold the job's token")
        connection.stream.most = stream.MESSAGE_BYTES_MAX
        connection.rank = hello.rank
        self._of_rank[hello.rank] = connection
        return [Connected(hello.rank)]

    def _said(self, connection: _Connection, frame: bytes) -> list[OfRank]:
        """A message of a rank. Raises `CommError` for what no rank says, or says for itself."""
        message = decode(frame)
        if not isinstance(message, OfRank):
            raise CommError(f"control: rank {connection.rank} says {type(message).__name__}")
        rank = message.report.rank if isinstance(message, Prepared) else message.rank
        if rank != connection.rank:
            raise CommError(f"control: rank {connection.rank} speaks as rank {rank}")
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
        del self._connections[connection.stream.fileno()]
        self._poll.unregister(connection.stream)
        connection.stream.close()

    def _watch(self, connection: _Connection) -> None:
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.stream.waits else 0)
        self._poll.modify(connection.stream, wanted)


def _take_place(address: ControlAddress) -> int:
    """The right to listen, which the kernel takes back when this process ends."""
    try:
        place = os.open(address.folder / "coordinator.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CommError(f"control: {address.path} cannot be taken ({error})") from error
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(place)
        raise CommError(f"control: {address.path} cannot be taken, another coordinator has it") from error
    return place


def _drain(streams: list[Stream], linger_s: float) -> None:
    by_s = time.monotonic() + linger_s
    while waiting := [each for each in streams if each.waits]:
        left_s = by_s - time.monotonic()
        if left_s <= 0:
            return
        poll = select.poll()
        for each in waiting:
            poll.register(each, select.POLLOUT)
        poll.poll(1e3 * left_s)
        for each in waiting:
            each.flush()
