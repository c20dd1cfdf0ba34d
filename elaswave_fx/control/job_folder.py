"""The files of a job on the machine of its store, which its launcher and its coordinators use.

A rank on another machine has no `JobFolder`. One that was started on this machine has it for one purpose: to start a
coordinator when launcher and coordinator have died.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JobFolder:
    """`path`: the store in memory, which only its owner can enter; `run_dir`; `launcher`: its pid, or 0."""

    path: Path
    run_dir: Path
    launcher: int = 0

    @property
    def job_file(self) -> Path:
        """Where the `JobFile` lies while the job runs; it holds the token, and goes when the job is over."""
        return self.path / "job.json"

    @property
    def leader_lock(self) -> Path:
        """Locked by the process that is the job's coordinator."""
        return self.path / "coordinator.lock"
