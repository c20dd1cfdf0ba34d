"""That nobody waits for what is not urgent.

answer_soon()      # in a thread that has little to do, and that others wait for when it has
collect_rarely()   # in a process whose objects are all there
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import struct

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")
"""`struct sched_attr` of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period, clamps."""

_SLICE_NS = 100_000
"""The shortest that Linux takes."""

_GARBAGE = 50_000
"""Objects more than before that may be garbage until somebody looks; Python's own 700 are fewer than a plan has."""

_libc = ctypes.CDLL(None, use_errno=True)


def answer_soon() -> None:
    """Have the calling thread, and those that it starts from now on, run soon after they wake, for a short while each.

    Linux (6.12 and later) lets a thread with shorter slices go before those that compute, and takes nothing else from
    them: no thread gets more of a core for it. Older kernels and other systems stay as they are.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0, 0, 0)
    _libc.syscall(number, 0, ctypes.create_string_buffer(attributes, len(attributes)), 0)


def collect_rarely() -> None:
    """Leave alone what there is by now, and do not look through what comes, a new plan above all, while others wait
    for it."""
    gc.freeze()
    gc.set_threshold(_GARBAGE)
