"""Requests to the coordinator on a connection of its own: for a number, for files, for the members. Each waits for its
answer.

In: the job's address and token, versions or a rank's info. Out: `Welcome`, infos; or a `ConfigError`: no peer answers
(for a rank: `CommError`), it lacks the job's token, or the coordinator refuses.

    ask_to_join(ControlAddress("127.0.0.1", 41213, token), versions(), timeout_s=20.0)  ->  Welcome(4, "{…}", …)
    with asking(address) as line: await_members(line, info, by_s)  ->  (MemberInfo(0, …), MemberInfo(1, …))
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Collection, Iterator, Mapping

from elaswave_fx.control import stream, tcp
from elaswave_fx.control.protocol.member_info import UNNUMBERED, MemberInfo
from elaswave_fx.control.protocol.messages import JoinRequest, Members, MembersRequest, Refused, Welcome
from elaswave_fx.control.stream import Hello, Stream
from elaswave_fx.control.wire import ControlAddress, Message, Question, decode, encode
from elaswave_fx.errors import CommError, ConfigError
from elaswave_fx.words import rank_words

AGAIN_S = 0.1
"""Pause between attempts: a starting coordinator has no listener if the launcher has died."""

POLL_S, POLL_S_MAX = 0.005, 0.2
"""First and longest pause between requests for members."""

ANSWER_S = 5.0
"""Timeout for the answer to one, after which the connection is opened again: the coordinator may hang or plan."""


class NoAnswer(ConfigError):
    """The coordinator cannot be reached, or did not answer in time."""


def ask_to_join(address: ControlAddress, versions: Mapping[str, str], timeout_s: float) -> Welcome:
    """Return this process's number and data to join. Raises `ConfigError` on a refusal or after the timeout."""
    with asking(address) as line:
        answer = line.ask(JoinRequest(dict(versions)), timeout_s)
    if not isinstance(answer, Welcome):
        raise ConfigError(f"tcp://{line.where}: a joiner is answered by {type(answer).__name__}")
    return answer


def await_members(line: Line, info: MemberInfo, by_s: float, linked: Collection[int] = ()) -> tuple[MemberInfo, ...]:
    """Register a rank's info; return those of all members, except of `linked` ranks that a new coordinator lacks.

    Waits until `by_s`, monotonic, for members that have not registered: first ranks come one after another. Raises
    `ConfigError` if the coordinator refuses the rank, `CommError` after that time.
    """
    pause_s, why = POLL_S, f"tcp://{line.where}: no answer"
    while True:
        try:
            answer = line.ask(MembersRequest(info), max(1.0, min(ANSWER_S, by_s - time.monotonic())))
        except NoAnswer as error:
            answer, why = None, str(error)
        if isinstance(answer, Members):
            missing = [rank for rank in answer.missing if rank not in linked]
            if not missing:
                return answer.infos
            why = f"{rank_words(missing)} {'has' if len(missing) == 1 else 'have'} not joined"
        elif answer is not None:
            raise ConfigError(f"tcp://{line.where}: a rank is answered by {type(answer).__name__}")
        if time.monotonic() + pause_s > by_s:
            raise CommError(why)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S_MAX)


@contextlib.contextmanager
def asking(address: ControlAddress) -> Iterator[Line]:
    """A `Line`, closed at the end of the block."""
    line = Line(address)
    try:
        yield line
    finally:
        line.hang_up()


class Line:
    """A connection for requests to the current coordinator: opened by the first one, and again after a coordinator's
    end. `where`: its address as text."""

    def __init__(self, address: ControlAddress) -> None:
        self.where = tcp.shown(address.host, address.port)
        self._address = address
        self._connected: socket.socket | None = None
        self._stream: Stream | None = None  # once both sides have proved the token

    def ask(self, question: Question, timeout_s: float) -> Message:
        """Return the answer. Raises `NoAnswer` after the timeout, `ConfigError` if the coordinator refuses."""
        by_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answer(question, by_s)
            except (OSError, _Gone) as error:
                self.hang_up()
                if time.monotonic() + AGAIN_S < by_s:
                    time.sleep(AGAIN_S)
                    continue
                raise NoAnswer(f"tcp://{self.where}: cannot be reached ({error})") from error
            except CommError as error:
                raise ConfigError(f"tcp://{self.where}: {error}") from error
            if isinstance(answer, Refused):
                raise ConfigError(f"tcp://{self.where}: the job refuses this process: {answer.reason}")
            return answer

    def hang_up(self) -> None:
        """Close the connection; idempotent."""
        if self._connected is not None:
            self._connected.close()
        self._connected = self._stream = None

    def _answer(self, question: Question, by_s: float) -> Message:
        """Make one attempt. Raises `CommError` if the other end lacks the job's token."""
        if self._stream is None:
            self._stream = self._opened(by_s)
        self._stream.send(encode(question))
        return decode(_frame(self._stream, by_s))

    def _opened(self, by_s: float) -> Stream:
        left_s = max(AGAIN_S, by_s - time.monotonic())  # some time, or no attempt could succeed
        self._connected = socket.create_connection((self._address.host, self._address.port), timeout=left_s)
        self._connected.setblocking(False)
        tcp.tune(self._connected)
        opened, hello = Stream(self._connected), Hello.of(UNNUMBERED)
        opened.send(hello.frame)
        opened.send(stream.answer(self._address.token.encode(), hello, _frame(opened, by_s)))
        opened.most = stream.MESSAGE_BYTES_MAX
        return opened


class _Gone(Exception):
    """The other end closed or did not answer; another coordinator may take over."""


def _frame(opened: Stream, by_s: float) -> bytes:
    """Return the next frame. Raises `_Gone` after the timeout."""
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
