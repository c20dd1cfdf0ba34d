"""Start of a coordinator process by a rank whose job has lost launcher and coordinator.

start_coordinator(job_folder)   ->   python -m elaswave_fx.coordinator --if-missing …/job.json
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.errors import CommError
from elaswave_fx.files import open_log


def start_coordinator(job_folder: JobFolder) -> None:
    """Start it without waiting. It ends immediately if there is a coordinator. If the system cannot start a process,
    the caller retries later. Raises `CommError` if the job's folder was removed."""
    if not job_folder.path.exists():
        raise CommError(f"control: {job_folder.path} was removed, without which no job can go on")
    command = [sys.executable, "-m", "elaswave_fx.coordinator", "--if-missing", str(job_folder.job_file)]
    with contextlib.suppress(OSError), _log(job_folder) as log:
        own = FileStore(job_folder.run_dir, job_folder.path).alive_descriptors()
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=own)


@contextlib.contextmanager
def _log(job_folder: JobFolder) -> Iterator[int]:
    """The coordinators' log, or this process's standard error if the run directory was removed."""
    try:
        log = open_log(job_folder.run_dir / "logs" / "coordinator.log")
    except OSError:
        log = os.dup(2)
    try:
        yield log
    finally:
        os.close(log)
