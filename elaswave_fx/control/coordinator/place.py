"""The place of a job's coordinator, which one process has at a time: a lock in the job's folder, and its address.

In: where the job is at home, its address, and the listener if the launcher has opened one. Out: the coordinator's end
of the wire. The kernel takes the lock back when the process ends, however it does.

    with taken_place(home, address, listener) as socket:   ->  CoordinatorSocket, or CommError: somebody else has it
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from elaswave_fx.control.home import JobHome
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket
from elaswave_fx.errors import CommError


@contextmanager
def taken_place(
    home: JobHome, address: ControlAddress, listener: socket.socket | None, linger_s: float = 0.0
) -> Iterator[CoordinatorSocket]:
    """The coordinator's end, closed with the block; `linger_s`: how long what was said last may take to leave. Raises
    `CommError` when another process has the lock or, unless a listener is given, the address."""
    place = _lock(home)
    try:
        coordinator = CoordinatorSocket(address, listener)
        try:
            yield coordinator
        finally:
            coordinator.close(linger_s)
    finally:
        os.close(place)


def _lock(home: JobHome) -> int:
    try:
        place = os.open(home.place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CommError(f"control: {home.place} cannot be taken ({error})") from error
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(place)
        raise CommError(f"control: {home.place} cannot be taken, another coordinator has it") from error
    return place
