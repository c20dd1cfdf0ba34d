"""A coordinator for a job that has lost its launcher and its coordinator: a process of its own, started by a rank.

start_coordinator(address)   ->   python -m elaswave_fx.coordinator --if-missing …/job.json
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.wire import ControlAddress


def start_coordinator(address: ControlAddress) -> None:
    """Returns at once. It ends by itself, at once if there is a coordinator. A system that has no room for another
    process is asked again by the caller."""
    command = [sys.executable, "-m", "elaswave_fx.coordinator", "--if-missing", str(address.job_file)]
    with contextlib.suppress(OSError), _log(address) as log:
        own = FileStore(address.store, address.folder).alive_descriptors()
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=own)


@contextlib.contextmanager
def _log(address: ControlAddress) -> Iterator[int]:
    """Where coordinators write; where this process does if the run directory is gone."""
    try:
        log = os.open(address.store / "logs" / "coordinator.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        log = os.dup(2)
    try:
        yield log
    finally:
        os.close(log)
