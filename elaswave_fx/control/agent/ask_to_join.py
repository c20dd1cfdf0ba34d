"""A process that has no number asks the coordinator for one, and for files of the job; it waits for each answer.

In: the job's address and token, versions. Out: `Welcome`, or a `ConfigError` that says why there is none: nobody is
there, somebody without the job's token, or the coordinator refuses.

    ask_to_join(ControlAddress("127.0.0.1", 41213, token), versions(), timeout_s=20.0)  ->  Welcome(4, {…}, …)
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Iterator, Mapping

from elaswave_fx.control import stream, tcp
from elaswave_fx.control.protocol.member_info import UNNUMBERED
from elaswave_fx.control.protocol.messages import JoinRequest, Refused, Welcome
from elaswave_fx.control.stream import Hello, Stream
from elaswave_fx.control.wire import ControlAddress, Message, Question, decode, encode
from elaswave_fx.errors import CommError, ConfigError

AGAIN_S = 0.1
"""Between two attempts: a coordinator that is being started has no listener, if the launcher is gone."""


def ask_to_join(address: ControlAddress, versions: Mapping[str, str], timeout_s: float) -> Welcome:
    """The number of this process, and what it has to know. Raises `ConfigError` when there is none, in time."""
    with asking(address) as line:
        answer = line.ask(JoinRequest(dict(versions)), timeout_s)
    if not isinstance(answer, Welcome):
        raise ConfigError(f"tcp://{line.where}: a joiner is answered by {type(answer).__name__}")
    return answer


@contextlib.contextmanager
def asking(address: ControlAddress) -> Iterator[Line]:
    """A way to ask, closed with the block."""
    line = Line(address)
    try:
        yield line
    finally:
        line.hang_up()


class Line:
    """A joiner's connection to whichever coordinator the job has: opened when something is to be asked, and again
    when the coordinator has gone. `where`: the other end, as people write it."""

    def __init__(self, address: ControlAddress) -> None:
        self.where = tcp.shown(address.host, address.port)
        self._address = address
        self._connected: socket.socket | None = None
        self._stream: Stream | None = None  # on it, once the token was proved on both sides

    def ask(self, question: Question, timeout_s: float) -> Message:
        """The answer. Raises `ConfigError` when there is none in time, or the coordinator refuses."""
        by_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answer(question, by_s)
            except (OSError, _Gone) as error:
                self.hang_up()
                if time.monotonic() + AGAIN_S < by_s:
                    time.sleep(AGAIN_S)
                    continue
                raise ConfigError(f"tcp://{self.where}: cannot be reached ({error})") from error
            except CommError as error:
                raise ConfigError(f"tcp://{self.where}: {error}") from error
            if isinstance(answer, Refused):
                raise ConfigError(f"tcp://{self.where}: the job refuses this process: {answer.reason}")
            return answer

    def hang_up(self) -> None:
        """Called again, it does nothing."""
        if self._connected is not None:
            self._connected.close()
        self._connected = self._stream = None

    def _answer(self, question: Question, by_s: float) -> Message:
        """One attempt. Raises `CommError` for an end that is none of the job's."""
        if self._stream is None:
            self._stream = self._opened(by_s)
        self._stream.send(encode(question))
        return decode(_frame(self._stream, by_s))

    def _opened(self, by_s: float) -> Stream:
        left_s = max(AGAIN_S, by_s - time.monotonic())  # without any, nobody could be reached
        self._connected = socket.create_connection((self._address.host, self._address.port), timeout=left_s)
        self._connected.setblocking(False)
        tcp.tune(self._connected)
        opened, hello = Stream(self._connected), Hello.of(UNNUMBERED)
        opened.send(hello.frame)
        opened.send(stream.answer(self._address.token.encode(), hello, _frame(opened, by_s)))
        opened.most = stream.MESSAGE_BYTES_MAX
        return opened


class _Gone(Exception):
    """The other end has closed, or says nothing; another coordinator may come."""


def _frame(opened: Stream, by_s: float) -> bytes:
    """The next one. Raises `_Gone` if there is none in time."""
    while True:
        opened.flush()
        for frame in opened.receive():
            return frame
        if opened.ended:
            raise _Gone("the connection was closed")
        left_s = by_s - time.monotonic()
        if left_s <= 0:
            raise _Gone("it does not answer")
        poll = select.poll()
        poll.register(opened, select.POLLIN | (select.POLLOUT if opened.waits else 0))
        poll.poll(math.ceil(1e3 * left_s))
