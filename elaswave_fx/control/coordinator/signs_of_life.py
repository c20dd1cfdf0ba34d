"""Signs of life of a thread that is busy for long: another one gives them, for as long as that is to be believed.

signs = SignsOfLife(give=partial(tell, "alive"), every_s=0.5, at_most_s=600.0)
with signs():
    plan()      what takes long; `give` is called meanwhile, and never when the block has been left
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SignsOfLife:
    """One thread at a time enters. `give` is called by another, at most `at_most_s` after that: what takes longer
    hangs."""

    def __init__(self, give: Callable[[], object], every_s: float, at_most_s: float) -> None:
        self._give, self._every_s, self._at_most_s = give, every_s, at_most_s
        self._lock = threading.Lock()
        self._is_busy = threading.Event()
        self._until_s = 0.0
        threading.Thread(target=self._run, name="signs-of-life", daemon=True).start()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """For as long as the block lasts."""
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
