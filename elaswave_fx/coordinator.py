"""`python -m elaswave_fx.coordinator RUN`: the coordinator of a running job, apart from its launcher.

RUN is the run directory, or the job file in it (`control/job.json`, readable by its owner alone). A job has a
coordinator already as long as its launcher lives: another one waits until the address is free, then takes over. It ends
by itself when no rank has spoken for a while.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.coordinator.service import run_coordinator
from elaswave_fx.errors import ConfigError


def main(words: list[str]) -> int:
    """The command line above; returns the exit code."""
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        spec = JobFile.read(Path(words[0])).spec()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_coordinator(spec, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
