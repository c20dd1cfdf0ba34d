"""Processes that the launcher starts while a job runs, as a user would: `python -m elaswave_fx.worker RUN`.

In: the command. Out: one more rank, which comes to the coordinator by itself; of its end that hears as it does of that
of any rank which no launcher has forked.

    joiners = Joiners(command, log); joiners.start();  …;  joiners.end()
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from elaswave_fx.files import open_log

LEAVE_S = 2.0
"""At the end of a job those that were ranks of it have so long to end by themselves."""

LOOK_S = 0.02


class Joiners:
    """The launcher's one thread uses it. What the processes say goes to `log`, one after the other."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """`command`: nothing, where nobody can be started."""
        self._command, self._log = tuple(command), log
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> bool:
        """Whether one was started. A terminal's Ctrl-C is for the launcher alone, so it has a process group of its
        own."""
        if not self._command:
            return False
        with self._opened() as log:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0,
                env={**os.environ},
            )  # fmt: skip
        self._processes.append(process)
        return True

    def _opened(self) -> IO[bytes]:
        """The log, or nothing, if the run directory was removed or is full: the process is needed more than its log."""
        try:
            return os.fdopen(open_log(self._log), "ab")
        except OSError:
            return open(os.devnull, "ab")

    def kill(self) -> None:
        """Those that are there, at once."""
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """The job is over. Returns when none is left."""
        until_s = time.monotonic() + LEAVE_S
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        self.kill()
        for process in self._processes:
            process.wait()
