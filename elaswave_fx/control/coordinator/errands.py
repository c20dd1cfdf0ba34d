"""Work that may have to wait for a disk, or takes long, done in a thread, in order; nobody waits for it.

errands = Errands(); errands.do(partial(print, "epoch 1 …", flush=True)); errands.close(within_s=1.0)
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable


class Errands:
    """One thread's list of things to do. What a disk refuses is over for this errand, and the next one is tried."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="errands", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """After all that was asked for before; returns at once."""
        self._queue.put(work)

    def close(self, within_s: float) -> None:
        """Wait until all is done, at most so long."""
        self._queue.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            with contextlib.suppress(OSError):  # a line of the log for which there is no room
                work()
