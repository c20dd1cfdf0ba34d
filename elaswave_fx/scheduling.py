"""How soon the kernel runs a thread that something has woken.

answer_soon()      # in a thread that has little to do, and that others wait for when it has
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("<IIQiIQQQII")
"""`struct sched_attr` of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period, clamps."""

_SLICE_NS = 100_000
"""The shortest that Linux takes."""

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
