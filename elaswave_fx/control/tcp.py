"""TCP connections of the control plane: listening, dialing without blocking, socket options.

In: an address (IPv4, IPv6) or a name. Out: non-blocking sockets.

    listener = listen("127.0.0.1", 0)           a port that is reserved while the listener is open
    dial(resolve("127.0.0.1", port_of(listener))[0])   ->  a socket, to check with `is_dialed`

The kernel closes a connection when its process ends, which the other end sees immediately. A cut network gives no sign:
the kernel closes a connection whose other end has acknowledged nothing for `CUT_S`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import NamedTuple

from elaswave_fx.errors import CommError

CUT_S = 2
"""Timeout, equal to that of links between ranks (`native/comm`): a reconnect does not wait for retransmissions."""

PROBES = 8
"""Unanswered probes, one per second, after which an idle connection ends."""

BACKLOG = 1024
"""Connections that the kernel keeps for a coordinator that has not accepted them, or is starting."""

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_QUESTION = struct.Struct("=BBBBI")  # inet_diag_req_v2 up to its inet_diag_sockid
_FOUND = struct.Struct("=BBBB")  # inet_diag_msg up to its inet_diag_sockid
_SOCKET_ID = struct.Struct(">HH16s16s12s")  # inet_diag_sockid: ports, addresses, interface and cookie
_OWNER = struct.Struct("=12xI")  # the user, after it
_ANY_COOKIE = b"\0" * 4 + b"\xff" * 8


class Location(NamedTuple):
    """An address to bind or connect a socket to."""

    family: int
    address: tuple[str | int, ...]


def resolve(host: str, port: int) -> tuple[Location, ...]:
    """The addresses of a name or address. May ask a name server. Raises `CommError`."""
    # Python would first load a codec for a str, in each process.
    name = host.encode() if host.isascii() else host
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise CommError(f"control: host {host!r} cannot be resolved ({why})") from error
    return tuple(dict.fromkeys(Location(family, (str(at[0]), *map(int, at[1:]))) for family, _, _, _, at in found))


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port, 0: any free one. Raises `CommError` for a used port, or a host of another machine."""
    why = "no address"
    for place in resolve(host, port):
        listener = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Connections of an ended coordinator may still be closing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place.address)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            why = "another process has the port" if error.errno == errno.EADDRINUSE else str(error.strerror)
    raise CommError(f"control: cannot listen on {shown(host, port)} ({why})")


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def shown(host: str, port: int) -> str:
    """The address as text: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial(place: Location) -> socket.socket:
    """Begin to connect, see `is_dialed`. Raises `OSError` if no process listens there."""
    dialed = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    tune(dialed)
    try:
        dialed.connect(place.address)
    except BlockingIOError:
        return dialed
    except OSError:
        dialed.close()
        raise
    return dialed


def is_dialed(dialed: socket.socket) -> bool:
    """Whether the connection is open; False while it is in progress. Raises `OSError` if it failed."""
    error = dialed.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    try:
        there = dialed.getpeername()
    except OSError as unconnected:
        if unconnected.errno == errno.ENOTCONN:
            return False
        raise
    if there == dialed.getsockname():
        # Without a listener on a port of the kernel's range, a dialer may be given that port and connect to itself.
        raise OSError(errno.ECONNREFUSED, "it is its own other end")
    return True


def tune(connected: socket.socket) -> None:
    """Send messages without delay; let the kernel detect an end that disappeared."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * CUT_S)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def is_of_another_user(connected: socket.socket) -> bool:
    """Whether another user of this machine, except root, opened the other end; False if unknown or remote."""
    user = _user_of_other_end(connected)
    return user is not None and user not in (os.geteuid(), 0)


def _user_of_other_end(connected: socket.socket) -> int | None:
    """Ask sock_diag(7), which finds one connection by its ports and addresses."""
    try:
        here, there = connected.getsockname(), connected.getpeername()
        ends = [socket.inet_pton(connected.family, end[0].partition("%")[0]).ljust(16, b"\0") for end in (there, here)]
        wanted = _SOCKET_ID.pack(there[1], here[1], *ends, _ANY_COOKIE)
        body = _QUESTION.pack(connected.family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + wanted
        header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(header + body)
            answer = kernel.recv(4096)  # available since `send`
    except OSError:
        return None
    at = _HEADER.size + _FOUND.size
    if len(answer) < at + _SOCKET_ID.size + _OWNER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    # Without such a connection here, a listener at that port may be found instead.
    if _SOCKET_ID.unpack_from(answer, at)[:2] != (there[1], here[1]):
        return None
    return int(_OWNER.unpack_from(answer, at + _SOCKET_ID.size)[0])
