"""Ctrl-C, SIGTERM and SIGHUP as a wish that the launcher looks at, instead of an exception wherever it is."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal's Ctrl-C, an init system's or a scheduler's stop, a terminal that is closed."""


class Stop:
    """While it is entered, these signals are counted and do not raise. Outside the main thread nobody can ask."""

    def __init__(self) -> None:
        self.requests = 0
        self.number: signal.Signals | None = None  # This one came first.
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
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
