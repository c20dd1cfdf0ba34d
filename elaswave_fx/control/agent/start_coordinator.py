"""A coordinator for a job that has lost its launcher and its coordinator: a process of its own, started by a rank.

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
    """Returns at once. It ends by itself, at once if there is a coordinator. A system that has no room for another
    process is asked again by the caller. Raises `CommError` if the job's folder is gone."""
    if not job_folder.path.exists():
        raise CommError(f"control: {job_folder.path} was removed, without which no job can go on")
    command = [sys.executable, "-m", "elaswave_fx.coordinator", "--if-missing", str(job_folder.job_file)]
    with contextlib.suppress(OSError), _log(job_folder) as log:
        own = FileStore(job_folder.run_dir, job_folder.path).alive_descriptors()
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=own)


@contextlib.contextmanager
def _log(job_folder: JobFolder) -> Iterator[int]:
    """Where coordinators write; where this process does if the run directory is gone."""
    try:
        log = open_log(job_folder.run_dir / "logs" / "coordinator.log")
    except OSError:
        log = os.dup(2)
    try:
        yield log
    finally:
        os.close(log)
