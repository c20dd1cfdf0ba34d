"""Ctrl-C and SIGTERM as a wish that the launcher looks at, instead of an exception wherever it happens to be."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """While it is entered, SIGINT and SIGTERM are counted and do not raise. Outside the main thread nobody can ask."""

    def __init__(self) -> None:
        self.requests = 0
        self.number: signal.Signals | None = None  # This one came first.
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        self.number = self.number or signal.Signals(number)
