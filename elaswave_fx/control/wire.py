"""Messages of the control plane on sockets: ranks call the coordinator, which answers on the same connections.

In: the values of `messages.py`. Out: the same values at the other end. A message is two frames, the job's token and a
body of MessagePack, `[kind, fields]`, decoded by the table below; nothing else is ever built from what arrives.
Sockets connect again by themselves; a message to somebody who is not there is lost, as the protocol expects.

    b"<token>" | ["Ack", {"term": 1, "epoch": 4, "member": true, "ledgered": 120}]
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from elaswave_fx.control.protocol.messages import Ack, Activate, Ended, Heartbeat, Over, Prepare, Prepared
from elaswave_fx.errors import CommError

OfRank = Heartbeat | Prepared | Ended
"""What ranks send, and the coordinator takes."""

Message = OfRank | Ack | Prepare | Activate | Over
"""All that travels between a rank and the coordinator."""

MESSAGE_BYTES_MAX = 64 << 20
"""An epoch's plan is the longest one; above it the connection is closed."""

QUEUE_MESSAGES = 1000
"""Kept for an end that does not read; more are dropped."""

RECONNECT_MS, RECONNECT_MS_MAX = 20, 500
"""The first and the longest wait between attempts to reach a coordinator that is away."""

_DECODERS = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (Heartbeat, Prepared, Ended, Ack, Prepare, Activate, Over)
}
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a job's control plane is. `store`: the run directory, for `FileStore`; `launcher`: its pid, or 0."""

    url: str
    token: str
    store: Path
    launcher: int = 0


def job_file_in(run_dir: Path) -> Path:
    """Where the `JobFile` of a run lies while it runs; it holds the token, and goes when the job is over."""
    return run_dir / "control" / "job.json"


def encode(message: Message) -> bytes:
    """The body of a message."""
    return _ENCODER.encode([type(message).__name__, message])


def decode(body: bytes) -> Message:
    """The message of a body. Raises `CommError` for anything that is none."""
    try:
        kind, fields = _ENVELOPE.decode(body)
        return _DECODERS[kind].decode(fields)
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise CommError(f"control: a body of {len(body)} bytes is no message ({error})") from error


class RankSocket:
    """A rank's end. One thread uses it, the one that made it; `refused` counts what was not from this job."""

    def __init__(self, address: ControlAddress) -> None:
        self._token = address.token.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _set_up(self._socket)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._socket.connect(address.url)
        self.refused = 0

    @property
    def pollable(self) -> Any:
        """For `zmq.Poller`."""
        return self._socket

    def send(self, message: Message) -> None:
        """Never blocks; lost if nobody has read the queue for long."""
        try:
            self._socket.send_multipart([self._token, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self) -> Message | None:
        """The next message, None if none has arrived."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = _open(frames, self._token)
            if message is not None:
                return message
            self.refused += 1

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long what was sent last may take to leave."""
        self._socket.close(linger_ms)
        self._context.term()


class CoordinatorSocket:
    """The coordinator's end. A rank is answered where its last message came from."""

    def __init__(self, url: str, token: str) -> None:
        """Raises `CommError` when the address cannot be taken, as while another coordinator has it."""
        self._token = token.encode()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _set_up(self._socket)
        self._ways: dict[int, bytes] = {}
        self._last: tuple[Message | None, bytes] = (None, b"")  # what goes to every rank is encoded once
        self.refused = 0
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self.close()
            raise CommError(f"control: {url} cannot be taken ({error})") from error

    @property
    def pollable(self) -> Any:
        """For `zmq.Poller`."""
        return self._socket

    def send(self, rank: int, message: Message) -> None:
        """To a rank that has been heard; never blocks."""
        way = self._ways.get(rank)
        if way is None:
            return
        if message is not self._last[0]:
            self._last = (message, encode(message))
        try:
            self._socket.send_multipart([way, self._token, self._last[1]], zmq.NOBLOCK)
        except zmq.Again:
            return

    def receive(self) -> OfRank | None:
        """The next message, None if none has arrived."""
        while True:
            try:
                way, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = _open(frames, self._token)
            if isinstance(message, OfRank):
                self._ways[message.report.rank if isinstance(message, Prepared) else message.rank] = way
                return message
            self.refused += 1

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long what was sent last may take to leave."""
        self._socket.close(linger_ms)
        self._context.term()


def _set_up(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)


def _open(frames: list[bytes], token: bytes) -> Message | None:
    if len(frames) != 2 or not hmac.compare_digest(frames[0], token):
        return None
    try:
        return decode(frames[1])
    except CommError:
        return None
