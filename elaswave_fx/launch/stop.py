"""Signals that stop a run, counted as requests for the launcher to poll instead of raised as exceptions.

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
"""Ctrl-C, the stop of an init system or a scheduler, a closed terminal. A second one ends the run immediately."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGPWR)
"""Warnings of schedulers and kernel that time (or power) is nearly up. They may repeat; an order may follow."""

STOPPING = (*ORDERS, *WARNINGS)

SIGNALLED = 128
"""Exit code minus signal number of a stopped command, as in shells: 130 for SIGINT, 143 for SIGTERM."""


class Stop:
    """Counts these signals while entered. Has no effect outside the main thread."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None  # the first one received
        self._orders = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requests(self) -> int:
        """0: continue; 1: save and end; more: end immediately. A repeated warning is no second request."""
        return max(self._orders, int(self.number is not None))

    def ask(self, number: signal.Signals) -> None:
        """Record a signal that this process or another one of the job received."""
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
