"""Liveness of a rank whose main thread waits for a disk, which may take long.

with disk_work("writes a checkpoint"):
    …                                     disk_work.progress()  ->  "writes a checkpoint for 12 s"
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

DISK_S = 3600.0
"""Bound of every wait for a disk, and for a rank that waits for one. A lost peer ends such a wait early; a rank that
waits for its own thread checks periodically whether its epoch is over."""


class _Work(NamedTuple):
    what: str
    since_s: float


class DiskWork:
    """The disk operation of a rank's main thread; any thread may read it."""

    def __init__(self) -> None:
        self._work: _Work | None = None

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Show `what` as in progress during the block, for at most `DISK_S`: then it hangs. Blocks do not nest."""
        self._work = _Work(what, time.monotonic())
        try:
            yield
        finally:
            self._work = None

    def progress(self) -> str:
        """The operation and its duration in seconds, so the text changes every second; empty if there is none."""
        work = self._work
        if work is None:
            return ""
        return f"{work.what} for {min(time.monotonic() - work.since_s, DISK_S):.0f} s"
