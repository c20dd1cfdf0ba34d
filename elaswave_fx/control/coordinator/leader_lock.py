"""The lock of a job's coordinator, which one process holds at a time: a file in the job folder, and the address.

In: the job folder, the address, and the launcher's listener, if any. Out: the coordinator's socket. The kernel releases
the lock whenever the process ends.

    with leader_lock(job_folder, address, listener) as socket:   ->  CoordinatorSocket, or CommError: it is held
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket
from elaswave_fx.errors import CommError


@contextmanager
def leader_lock(
    job_folder: JobFolder, address: ControlAddress, listener: socket.socket | None, linger_s: float = 0.0
) -> Iterator[CoordinatorSocket]:
    """The coordinator's socket, closed with the block; `linger_s`: time for its last messages to leave. Raises
    `CommError` if another process has the lock or, without a listener, the address."""
    lock = _lock(job_folder)
    try:
        coordinator = CoordinatorSocket(address, listener)
        try:
            yield coordinator
        finally:
            coordinator.close(linger_s)
    finally:
        os.close(lock)


def _lock(job_folder: JobFolder) -> int:
    try:
        lock = os.open(job_folder.leader_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CommError(f"control: {job_folder.leader_lock} cannot be taken ({error})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise CommError(f"control: {job_folder.leader_lock} cannot be taken, another coordinator has it") from error
    return lock
