"""What a job has on the machine on which its store lies: files that its launcher and its coordinators use.

In: nothing. Out: `JobHome`. A rank on another machine has none; one that was started on this machine gets it for one
purpose: to start a coordinator when launcher and coordinator are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JobHome:
    """`folder`: the store in memory, which only its owner can enter; `run_dir`; `launcher`: its pid, or 0."""

    folder: Path
    run_dir: Path
    launcher: int = 0

    @property
    def job_file(self) -> Path:
        """Where the `JobFile` lies while the job runs; it holds the token, and goes when the job is over."""
        return self.folder / "job.json"

    @property
    def place(self) -> Path:
        """Locked by the process that is the job's coordinator."""
        return self.folder / "coordinator.lock"
