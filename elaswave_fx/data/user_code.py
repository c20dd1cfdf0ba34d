"""Execution of user code that reads samples: on a separate thread, with a deadline for its callers.

    code = UserCode(deadline_s=60, error=DataError)
    code.run(lambda: reads(7))      # in which `with code.watched("data._target_=mine.Points", "sample 7"): …`
      ->  DataError("data._target_=mine.Points: sample 7 has not been read after 60 s (data.deadline_s)")

A thread cannot be ended from outside: one that hangs is abandoned, and ends with its process. If it also holds the
interpreter's lock, the parent ends the process a quarter of the deadline later (`watchdog`).
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from elaswave_fx import watchdog
from elaswave_fx.errors import ElasWaveError

Result = TypeVar("Result")

_LOOK_S = 1.0
"""Interval between two checks of the thread's progress."""

_PATIENCE, _PATIENCE_S = 0.25, 5.0
"""Fraction of a deadline, and minimum in seconds, before the parent ends the process. Until then the process may report
the hang itself, with its place. Silent ranks are evicted one after another before that; all of it must take at most
three deadlines."""


@dataclass(frozen=True)
class _Call:
    """An unfinished call of user code."""

    place: str
    what: str
    since_s: float
    deadline_s: float

    def overdue(self) -> str:
        return f"{self.place}: {self.what} has not been read after {self.deadline_s:g} s (data.deadline_s)"


class UserCode:
    """Runs user code on one thread, so that a dataset need not be thread-safe; any thread may wait for it.

    `error`: raised in the waiting thread for a call that raises or takes longer than `deadline_s`.
    """

    def __init__(self, deadline_s: float, error: type[ElasWaveError]) -> None:
        self._deadline_s, self._error = deadline_s, error
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._call: _Call | None = None
        self._waited = watchdog.Waited()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], Result]) -> Result:
        """The result or the error of `job`. The first job starts the thread, and must come after forking. A job that
        runs another job runs it directly."""
        if threading.current_thread() is self._thread:
            return job()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="user code", daemon=True)
            self._thread.start()
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        while not wait([future], self._patience_s()).done:
            pass
        return future.result()

    def within(self, deadline_s: float) -> "UserCode":
        """The same thread, with another deadline."""
        return _Within(self, deadline_s)

    @contextmanager
    def watched(self, place: str, what: str, deadline_s: float | None = None) -> Iterator[None]:
        """Wrap each call of user code within a job: the deadline counts from here."""
        self._call = call = _Call(place, what, time.monotonic(), deadline_s or self._deadline_s)
        patience_s = max(_PATIENCE * call.deadline_s, _PATIENCE_S)
        watchdog.expect(call.deadline_s + patience_s, call.overdue())
        try:
            yield
        except ElasWaveError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise self._error(f"{place}: {what} cannot be read ({reason})") from error
        finally:
            watchdog.fulfilled()
            self._call = None

    def progress(self) -> str:
        """The current read and its seconds; empty if there is none."""
        call = self._call
        return f"reads {call.what} for {time.monotonic() - call.since_s:.0f} s" if call is not None else ""

    def _patience_s(self) -> float:
        """Seconds until the next check of the present call. Raises if it is overdue."""
        call = self._call
        waited_s = self._waited.look(call, time.monotonic())
        if call is None:
            return _LOOK_S
        if waited_s < call.deadline_s:
            return min(call.deadline_s - waited_s, _LOOK_S)
        error = self._error(call.overdue())
        error.add_note(f"It hangs here:\n{self._stack()}")
        raise error

    def _stack(self) -> str:
        """Stack of the thread, newest call last."""
        thread = self._thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _serve(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - not handled here: `run` raises it
                future.set_exception(error)


class _Within(UserCode):
    """The thread of another instance, with its own deadline."""

    def __init__(self, code: UserCode, deadline_s: float) -> None:
        super().__init__(deadline_s, code._error)
        self._code = code

    def run(self, job: Callable[[], Result]) -> Result:
        return self._code.run(job)

    def watched(self, place: str, what: str, deadline_s: float | None = None) -> AbstractContextManager[None]:
        return self._code.watched(place, what, deadline_s or self._deadline_s)

    def progress(self) -> str:
        return self._code.progress()
