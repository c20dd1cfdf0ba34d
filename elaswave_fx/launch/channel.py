"""The control channel between the launcher and one of its children: length-prefixed messages, encoded as those of
`control/wire.py`: MessagePack, `[kind, fields]`.

    launcher, child = Channel.pair()
    child.send("warned", signal=15)
    launcher.drain()  ->  [Message("warned", {"signal": 15})]

Kinds from a worker: detached{} step{…} eval{…} event{…} share{summary} done{summary} warned{signal}
error{classes, message, lost_rank}; from the launcher: halt{}. From the builder: built{result} or error.
From the coordinator: event{…} told{rank, what, fields} ended{rank} trouble{text} alive{}; to it: exited{rank}
finished{rank} saved{version, epoch}. A message has at most `MESSAGE_BYTES_MAX` bytes, so tensors do not travel here.
One thread uses an end at a time.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from elaswave_fx.errors import CommError

MESSAGE_BYTES_MAX = 64 << 20
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class ChannelClosed(CommError):
    """The other end is closed."""


@dataclass(frozen=True)
class Message:
    """One message: its kind and plain fields."""

    kind: str
    fields: Mapping[str, Any]


class Channel:
    """One end. Sending blocks while the other end does not read; reading blocks as long as the caller allows."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self._messages: deque[Message] = deque()
        self.closed = False  # The other end is closed; earlier messages may still be queued.

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends, for a process and the child that it will fork."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(left), Channel(right)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def packed(kind: str, **fields: Any) -> bytes:
        """A message as bytes. Raises `CommError` if it is too long, `TypeError` or `OverflowError` for a value that no
        message has."""
        try:
            body = msgspec.msgpack.encode([kind, fields], enc_hook=_plain)
        except UnicodeEncodeError:  # such as an error about a path whose bytes are no UTF-8
            body = msgspec.msgpack.encode([kind, _printable(fields)], enc_hook=_plain)
        if len(body) > MESSAGE_BYTES_MAX:
            raise CommError(f"channel: message {kind} has {len(body)} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
        return _LENGTH.pack(len(body)) + body

    @staticmethod
    def unpacked(message: bytes | bytearray) -> Message:
        return Message(*msgspec.msgpack.decode(memoryview(message)[_LENGTH.size :]))

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises `ChannelClosed` if the other end is closed, `CommError` if the message is too long."""
        self.send_packed(self.packed(kind, **fields))

    def send_packed(self, message: bytes) -> None:
        """Send the bytes that `packed` returned. Raises `ChannelClosed` if the other end is closed."""
        try:
            self._socket.sendall(message)
        except OSError as error:
            kind = self.unpacked(message).kind
            raise ChannelClosed(f"channel: {kind} was not sent, the other end is gone") from error

    def drain(self) -> list[Message]:
        """Return every message that has arrived, without waiting; sets `closed` at the end of the stream."""
        while not self.closed:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self.closed = not data
            self._buffer += data
            self._split()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, None after the timeout. Raises `ChannelClosed` if none can arrive any more."""
        end = time.monotonic() + timeout_s
        while True:
            self._messages.extend(self.drain())
            if self._messages:
                return self._messages.popleft()
            if self.closed:
                raise ChannelClosed("channel: the other end is gone")
            ready, _, _ = select.select([self._socket], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None

    def _split(self) -> None:
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MESSAGE_BYTES_MAX:
                raise CommError(f"channel: a message of {length} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
            if len(self._buffer) < _LENGTH.size + length:
                return
            self._messages.append(self.unpacked(self._buffer[: _LENGTH.size + length]))
            del self._buffer[: _LENGTH.size + length]


def _plain(value: object) -> float | str:
    """A number or text of a subclass, such as a NumPy float that a user's schedule returns."""
    match value:
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case _:
            raise TypeError(f"channel: {type(value).__name__} is no type of a message")


def _printable(value: Any) -> Any:
    """The plain value with `\\udc80` for what no UTF-8 has."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_printable(key): _printable(each) for key, each in value.items()}
        case list() | tuple():
            return [_printable(each) for each in value]
        case _:
            return value
