"""Signals that stop a run as a wish that the launcher looks at, instead of an exception wherever it is.

with Stop() as stop:
    …; stop.requests   ->  0, 1 after SIGUSR1, still 1 after SIGTERM, 2 after another SIGTERM
128 + stop.number      ->  138, the exit code of a run that was stopped by SIGUSR1
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

ORDERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A terminal's Ctrl-C, an init system's or a scheduler's stop, a terminal that is closed. A second one means: at
once."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR)
"""Schedulers (and the kernel, of processor time and of power) say by these that time is nearly up. They may repeat
themselves, and an order may follow."""

STOPPING = (*ORDERS, *WARNINGS)

SIGNALLED = 128
"""The exit code of a command that a signal has stopped is this and the signal's number, as shells say it of a process
that one has ended: 130 for SIGINT, 143 for SIGTERM."""


class Stop:
    """While it is entered, these signals are counted and do not raise. Outside the main thread nobody can ask."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None  # This one came first.
        self._orders = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requests(self) -> int:
        """0: go on; 1: save and end; more: end at once. A warning is no second request, however often it comes."""
        return max(self._orders, int(self.number is not None))

    def ask(self, number: signal.Signals) -> None:
        """This signal has come, here or to a process of the job."""
        self._orders += number in ORDERS
        self.number = self.number or number

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number))
