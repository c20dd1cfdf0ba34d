"""Processes that the launcher starts while a job runs, as a user would: `python -m elaswave_fx.worker RUN`.

In: the command. Out: one more rank, which contacts the coordinator itself. The coordinator detects its end as that of
any rank that no launcher has forked.

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
"""Time that joiners have to end by themselves at the end of a job."""

LOOK_S = 0.02


class Joiners:
    """The started joiners; only the launcher's one thread uses this. Their output goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """`command`: empty if no joiner can be started."""
        self._command, self._log = tuple(command), log
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> bool:
        """Start a joiner if possible; return whether. Its own process group keeps a terminal's Ctrl-C away from it."""
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
        """The log, or nothing if the run directory was removed or is full: the process matters more than its log."""
        try:
            return os.fdopen(open_log(self._log), "ab")
        except OSError:
            return open(os.devnull, "ab")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Wait until all joiners have ended, at most `LEAVE_S`, then kill the rest."""
        until_s = time.monotonic() + LEAVE_S
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        self.kill()
        for process in self._processes:
            process.wait()
