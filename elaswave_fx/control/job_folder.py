"""The files of a job on the machine of its store, for its launcher and its coordinators.

A rank on another machine has no `JobFolder`. A rank on this machine uses it only to start a coordinator when launcher
and coordinator have died.
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
        """Path of the `JobFile`, which has the token; removed at the end of the job."""
        return self.path / "job.json"

    @property
    def leader_lock(self) -> Path:
        """Path of the file that the job's coordinator locks."""
        return self.path / "coordinator.lock"
