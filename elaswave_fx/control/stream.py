"""A stream between a rank and the coordinator: frames on a TCP connection whose ends prove the job's token.

    rank -> coordinator   HELLO      the rank, a nonce
    coordinator -> rank   CHALLENGE  a nonce, HMAC(token, "coordinator" HELLO nonce)
    rank -> coordinator   PROOF      HMAC(token, "rank" HELLO CHALLENGE)

then messages, both ways. A frame is its length in four bytes, and its bytes. The token is never sent, and an end that
has not proved it may send nothing longer than a HELLO. Messages are neither encrypted nor signed: the network is
trusted not to forge packets, as for links between ranks. No call blocks: unsent bytes are kept, with a bound.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from elaswave_fx.errors import CommError
from elaswave_fx.plan.work.topology import Rank

MESSAGE_BYTES_MAX = 64 << 20
"""Maximum length of a frame (an epoch's plan is the longest); a longer one ends the stream."""

WAITING_BYTES_MAX = 4 << 20
"""Unsent bytes beyond which further messages are dropped."""

_GREETING = b"elaswave"
_HELLO = struct.Struct(f"<{len(_GREETING)}si32s")
_NONCE_BYTES = _DIGEST_BYTES = 32
_CHALLENGE_BYTES = _NONCE_BYTES + _DIGEST_BYTES
GREETING_BYTES_MAX = max(_HELLO.size, _CHALLENGE_BYTES)
"""Maximum length of a frame before the other end has proved the token."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class Stream:
    """Frames on a connected non-blocking socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._in, self._out = bytearray(), bytearray()
        self.most = GREETING_BYTES_MAX
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether bytes wait for the other end to read."""
        return bool(self._out) and not self.ended

    def send(self, frame: bytes) -> None:
        """Send a frame as far as possible, the rest with `flush`; drop it if too much waits already."""
        if len(self._out) <= WAITING_BYTES_MAX:
            self._out += _LENGTH.pack(len(frame)) + frame
            self.flush()

    def flush(self) -> None:
        """Send waiting bytes as far as the other end reads."""
        try:
            while self._out and not self.ended:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            return
        except OSError:
            self.ended = True

    def receive(self) -> Iterator[bytes]:
        """Yield the frames that have arrived, each of at most `most` bytes; sets `ended` at the end of the stream."""
        try:
            data = self._socket.recv(min(_READ_BYTES, 4 * self.most))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = self.ended or not data
        self._in += data
        while (frame := self._split()) is not None:
            yield frame

    def finish(self) -> None:
        """Send waiting bytes as far as the other end reads, then end the stream. Further input is dropped: closing a
        connection with unread input resets it, which loses the last output."""
        self.flush()
        if self.ended:
            return
        try:
            if not self._out:
                self._socket.shutdown(socket.SHUT_WR)
            while data := self._socket.recv(_READ_BYTES):
                del data
            self.ended = True
        except BlockingIOError:
            return
        except OSError:
            self.ended = True

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    def _split(self) -> bytes | None:
        if len(self._in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        if length > self.most:
            self.ended = True
            self._in.clear()
            return None
        end = _LENGTH.size + length
        if len(self._in) < end:
            return None
        frame = bytes(self._in[_LENGTH.size : end])
        del self._in[:end]
        return frame


class Hello(NamedTuple):
    """The rank's first frame, and its claimed rank."""

    frame: bytes
    rank: Rank

    @staticmethod
    def of(rank: Rank) -> Hello:
        return Hello(_HELLO.pack(_GREETING, rank, os.urandom(_NONCE_BYTES)), rank)

    @staticmethod
    def read(frame: bytes) -> Hello:
        """Parse a frame. Raises `CommError` if it is no HELLO."""
        if len(frame) != _HELLO.size or not frame.startswith(_GREETING):
            raise CommError("control: somebody came who is no rank")
        return Hello(frame, Rank(_HELLO.unpack(frame)[1]))


def challenge(token: bytes, hello: Hello) -> bytes:
    """Return the coordinator's answer, which proves the token."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + _digest(token, b"coordinator", hello.frame, nonce)


def answer(token: bytes, hello: Hello, challenge: bytes) -> bytes:
    """Return the rank's proof. Raises `CommError` if the challenger does not hold the token."""
    nonce, claimed = challenge[:_NONCE_BYTES], challenge[_NONCE_BYTES:]
    if not hmac.compare_digest(claimed, _digest(token, b"coordinator", hello.frame, nonce)):
        raise CommError("control: whoever has the coordinator's place does not hold the job's token")
    return _digest(token, b"rank", hello.frame, challenge)


def is_proof(token: bytes, hello: Hello, challenge: bytes, proof: bytes) -> bool:
    """Whether the rank that sent `hello` holds the token."""
    return hmac.compare_digest(proof, _digest(token, b"rank", hello.frame, challenge))


def _digest(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256")
