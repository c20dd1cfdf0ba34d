"""Threads of the coordinator beside its loop: one for background work, one that keeps it alive while it plans.

background = BackgroundThread(); background.submit(partial(print, "epoch 1 …", flush=True)); background.close(1.0)

keep_alive = KeepAlive(give=partial(tell, "alive"), every_s=0.5, at_most_s=600.0)
with keep_alive():
    plan()      `give` is called meanwhile
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BackgroundThread:
    """A thread that runs work in order, which may wait for a disk. After an OSError it continues with the next."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Queue work; returns immediately."""
        self._queue.put(work)

    def close(self, within_s: float) -> None:
        """Wait until the queue is empty, at most `within_s`."""
        self._queue.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            with contextlib.suppress(OSError):  # such as a log line on a full disk
                work()


class KeepAlive:
    """Calls `give` every `every_s` from its own thread while another thread is in the block, for at most `at_most_s`:
    after that it counts as hung. One thread at a time enters."""

    def __init__(self, give: Callable[[], object], every_s: float, at_most_s: float) -> None:
        self._give, self._every_s, self._at_most_s = give, every_s, at_most_s
        self._lock = threading.Lock()
        self._is_busy = threading.Event()
        self._until_s = 0.0
        threading.Thread(target=self._run, name="keep-alive", daemon=True).start()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep alive while the block lasts."""
        self._until_s = time.monotonic() + self._at_most_s
        self._is_busy.set()
        try:
            yield
        finally:
            with self._lock:
                self._is_busy.clear()

    def _run(self) -> None:
        while True:
            self._is_busy.wait()
            time.sleep(self._every_s)
            with self._lock:
                if self._is_busy.is_set() and time.monotonic() < self._until_s:
                    self._give()
