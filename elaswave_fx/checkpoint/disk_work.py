"""Work that waits for a disk: it may take long, and shows meanwhile that the rank does not stand still.

with disk_work("writes a checkpoint"):
    …                                     disk_work.progress()  ->  "writes a checkpoint for 12 s"
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

DISK_S = 3600.0
"""Bound of every wait for a disk, and of the waits of others for who waits for one. A lost peer ends these at once; a
rank that waits for its own thread looks between whiles whether its epoch is over."""


class _Work(NamedTuple):
    what: str
    since_s: float


class DiskWork:
    """What a rank's main thread does at a disk; any thread may ask."""

    def __init__(self) -> None:
        self._work: _Work | None = None

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """For as long as the block lasts, but no longer than `DISK_S`: what takes longer hangs. Blocks do not nest."""
        self._work = _Work(what, time.monotonic())
        try:
            yield
        finally:
            self._work = None

    def progress(self) -> str:
        """What is being done, and for how many seconds, which is another text every second; empty if nothing is."""
        work = self._work
        if work is None:
            return ""
        return f"{work.what} for {min(time.monotonic() - work.since_s, DISK_S):.0f} s"
