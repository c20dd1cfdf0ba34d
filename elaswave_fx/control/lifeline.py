"""A plain stream beside the control messages, which shows that a rank's process is gone when the kernel closes it.

In: a rank opens it to the coordinator and says who it is. Out: `Connected(rank)`, and `Disconnected(rank)` when it
closes. Nothing else travels on it. The sockets of `wire.py` connect again by themselves and tell nobody that they had
to; here the end of the stream is the message. It says that a process has ended or that the way to it is broken, which
of the two it cannot say: alone it excludes nobody.

    "<token> 3\\n" ... end of stream   ->   Connected(3), Disconnected(3)
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import time
from dataclasses import dataclass, field

from elaswave_fx.control.protocol.messages import Connected, Disconnected
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import CommError
from elaswave_fx.plan.topology import Rank

GREETING_BYTES_MAX = 256
"""A token and a rank; whoever sends more is no rank."""

STRANGERS_MAX = 64
"""Connections that have not said yet who they are; the oldest is closed for a newer one."""

BACKLOG = 1024
BIND_S, BIND_RETRY_S = 2.0, 0.005
"""The address may be a coordinator's that was killed just now, and whose sockets are being closed."""


class Lifeline:
    """A rank's end. One thread uses it; `keep` is called with every heartbeat."""

    def __init__(self, address: ControlAddress, rank: Rank) -> None:
        self._path = path_of(address)
        self._greeting = f"{address.token} {rank}\n".encode()
        self._socket: socket.socket | None = None

    def keep(self) -> None:
        """Open it, unless it is open. Never blocks; without a coordinator the next call tries again."""
        if self._socket is not None and not _has_ended(self._socket):
            return
        self.close()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(self._path)
            self._socket.sendall(self._greeting)
        except OSError:
            self.close()

    def close(self) -> None:
        """The end of the stream is the coordinator's to interpret. Called again, it does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass
class _Connection:
    """One stream at the coordinator; `rank` once it has said who it is."""

    socket: socket.socket
    greeting: bytearray = field(default_factory=bytearray)
    rank: Rank | None = None


class Lifelines:
    """The coordinator's ends. One thread uses it; `fileno` is readable while `events` has something to say."""

    def __init__(self, address: ControlAddress) -> None:
        """Raises `CommError` when the address cannot be taken."""
        self._token = address.token.encode()
        self._listener = _listen(path_of(address))
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}  # by file descriptor, oldest first

    def fileno(self) -> int:
        """For pollers."""
        return self._poll.fileno()

    def events(self) -> list[Connected | Disconnected]:
        """What has happened since the last call. A rank that has opened a newer stream is not told of its older one."""
        found: list[Connected | Disconnected] = []
        for number, _ in self._poll.poll(0):
            if number == self._listener.fileno():
                found += self._accept()
            elif number in self._connections:
                found += self._read(self._connections[number])
        return found

    def close(self) -> None:
        """Ranks notice, and look for another coordinator."""
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._poll.close()
        self._listener.close()

    def _accept(self) -> list[Connected | Disconnected]:
        """Whoever has connected; a rank has said by then who it is, as a rule."""
        found: list[Connected | Disconnected] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                stream, _ = self._listener.accept()
                stream.setblocking(False)
                connection = _Connection(stream)
                self._connections[stream.fileno()] = connection
                self._poll.register(stream, select.EPOLLIN)
                found += self._read(connection)
                strangers = [each for each in self._connections.values() if each.rank is None]
                if len(strangers) > STRANGERS_MAX:
                    self._drop(strangers[0])
        return found

    def _read(self, connection: _Connection) -> list[Connected | Disconnected]:
        try:
            data = connection.socket.recv(GREETING_BYTES_MAX)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if connection.rank is not None:
            return [] if data else self._ended(connection)
        connection.greeting += data
        if data and b"\n" not in connection.greeting and len(connection.greeting) < GREETING_BYTES_MAX:
            return []
        connection.rank = self._rank_in(bytes(connection.greeting))
        if connection.rank is None:
            self._drop(connection)
            return []
        connected = Connected(connection.rank)
        return [connected] if data else [connected, *self._ended(connection)]

    def _ended(self, connection: _Connection) -> list[Connected | Disconnected]:
        self._drop(connection)
        assert connection.rank is not None
        newer = any(other.rank == connection.rank for other in self._connections.values())
        return [] if newer else [Disconnected(connection.rank)]

    def _rank_in(self, greeting: bytes) -> Rank | None:
        token, _, rank = greeting.rstrip(b"\n").partition(b" ")
        if not greeting.endswith(b"\n") or not hmac.compare_digest(token, self._token) or not rank.isdigit():
            return None
        return Rank(int(rank))

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.socket.fileno()]
        self._poll.unregister(connection.socket)
        connection.socket.close()


def path_of(address: ControlAddress) -> str:
    """Where the streams of a control plane meet: beside its messages. Raises `CommError` for an address elsewhere."""
    scheme, _, path = address.url.partition("://")
    if scheme != "ipc" or not path:
        raise CommError(f"control: {address.url} is no local address; the control plane meets at ipc://")
    return ("\0" + path[1:] if path.startswith("@") else path) + "-lifeline"


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    by_s = time.monotonic() + BIND_S
    while True:
        try:
            if not path.startswith("\0"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # whoever has the address of the messages has this one too
            listener.bind(path)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            if time.monotonic() > by_s:
                listener.close()
                raise CommError(f"control: {path!r} cannot be taken ({error})") from error
            time.sleep(BIND_RETRY_S)


def _has_ended(stream: socket.socket) -> bool:
    try:
        return not stream.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
