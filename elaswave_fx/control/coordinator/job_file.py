"""What a coordinator must know of a job, in a file of the job's folder in memory that only its owner can enter.

In: `RUN` or `RUN/control/job.json`. Out: `CoordinatorSpec`.

    {"folder": "/dev/shm/elaswave-…", "token": "…", "run_dir": "runs/today", "copies": 1, "allow_rollback": false,
     "launcher": 4711}
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elaswave_fx.control.coordinator.plan_cache import Planner
from elaswave_fx.control.coordinator.service import CoordinatorSpec
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One job. `launcher`: its pid."""

    folder: str
    token: str
    run_dir: str
    copies: int
    allow_rollback: bool
    launcher: int = 0

    def address(self) -> ControlAddress:
        """Where ranks and coordinators of the job meet; its store is the run directory."""
        return ControlAddress(Path(self.folder), self.token, Path(self.run_dir), self.launcher)

    def spec(self) -> CoordinatorSpec:
        """What a coordinator of the job needs."""
        planner = Planner(self.copies)
        return CoordinatorSpec(
            address=self.address(),
            planning=planner,
            allow_rollback=self.allow_rollback,
        )

    def write(self) -> Path:
        """Beside the store, which is there; holds the job's token, so nobody else may read it."""
        path = self.address().job_file
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(msgspec.json.encode(self))
        return path

    @staticmethod
    def read(path: Path) -> JobFile:
        """The file, or that of a run directory. Raises `ConfigError` when there is none."""
        file = path / "control" / "job.json" if path.is_dir() else path
        try:
            return msgspec.json.decode(file.read_bytes(), type=JobFile)
        except OSError as error:
            raise ConfigError(f"{path}: holds no job that runs ({error.strerror})") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: is no job file ({error})") from error
