"""`python -m elaswave_fx.coordinator [--if-missing] RUN`: the coordinator of a running job, apart from its launcher.

RUN is the run directory, or the job file in it (`control/job.json`, readable by its owner alone). A job has a
coordinator already as long as its launcher lives: another one waits until the place is free, then takes over, or ends
with `--if-missing`. It ends by itself when no rank has spoken for a while. Ranks that have lost both their launcher and
their coordinator start one.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.coordinator.service import run_coordinator
from elaswave_fx.entry import run_command
from elaswave_fx.launch.stop import WARNINGS


def main(words: list[str]) -> int:
    """The command line above; returns the exit code."""
    waits = "--if-missing" not in words
    words = [word for word in words if word != "--if-missing"]
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    for number in WARNINGS:  # Ranks save and end; they need it for as long as that takes.
        signal.signal(number, signal.SIG_IGN)
    return run_coordinator(JobFile.read(Path(words[0])).spec(), None, waits=waits)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
