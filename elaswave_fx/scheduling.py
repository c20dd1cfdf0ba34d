"""Scheduling hints: short waits for threads with little work, and rare garbage collection.

answer_soon()               # in a thread that has little work, for which other threads wait
collect_rarely()            # in a process whose long-lived objects exist
with collection_paused():   # around imports: torch's objects are many, and stay
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import struct
from collections.abc import Iterator

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")
"""`struct sched_attr` of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period, clamps."""

_SLICE_NS = 100_000
"""The shortest slice that Linux accepts."""

_GARBAGE = 50_000
"""New objects before a collection; Python's default of 700 is fewer than a plan has."""

_libc = ctypes.CDLL(None, use_errno=True)


def answer_soon() -> None:
    """Give the calling thread, and threads that it starts later, short time slices, so that they run soon after they
    wake.

    Linux (6.12 and later) schedules threads with shorter slices first; shares of a core do not change. No effect on
    older kernels and other systems.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0, 0, 0)
    _libc.syscall(number, 0, ctypes.create_string_buffer(attributes, len(attributes)), 0)


def collect_rarely() -> None:
    """Freeze all present objects and collect rarely, so that no rank waits while the collector scans a new plan."""
    gc.freeze()
    gc.set_threshold(_GARBAGE)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disable garbage collection inside the block: it takes time, and may run arbitrary code (finalizers)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
