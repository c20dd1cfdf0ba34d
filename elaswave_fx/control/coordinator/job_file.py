"""The description of a job for coordinators: a file in the job's memory folder, which only its owner can enter.

In: `RUN` or `RUN/control/job.json`. Out: `CoordinatorSpec`.

    {"folder": "/dev/shm/elaswave-…", "host": "127.0.0.1", "port": 41213, "token": "…", "run_dir": "runs/today",
     "copies": 1, "allow_rollback": false, "conditions": {"versions": …, "data_digest": …}, "launcher": 4711,
     "facts": "{…}", "files": {"state.safetensors": {"path": …, "size": 812, "digest": "9f…"}}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from elaswave_fx.control.coordinator.file_server import SharedFile
from elaswave_fx.control.coordinator.plan_cache import Planner
from elaswave_fx.control.coordinator.service import CoordinatorSpec
from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.protocol.member_info import Conditions
from elaswave_fx.control.token import TOKEN, given_token
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import ConfigError
from elaswave_fx.files import read_plain
from elaswave_fx.ownership import refuse_others


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """One job. `host`, `port`: its coordinator's address; `launcher`: its pid; `facts`, `files`: for joiners."""

    folder: str
    host: str
    port: int
    token: str
    run_dir: str
    copies: int
    allow_rollback: bool
    conditions: Conditions
    patience_s: float = 300.0
    launcher: int = 0
    facts: str = ""
    files: Mapping[str, SharedFile] = field(default_factory=dict[str, SharedFile])

    def address(self) -> ControlAddress:
        return ControlAddress(self.host, self.port, self.token)

    def job_folder(self) -> JobFolder:
        return JobFolder(Path(self.folder), Path(self.run_dir), self.launcher)

    def spec(self) -> CoordinatorSpec:
        """The spec of the job's coordinator."""
        planner = Planner(self.copies)
        return CoordinatorSpec(
            address=self.address(),
            job_folder=self.job_folder(),
            planning=planner,
            conditions=self.conditions,
            allow_rollback=self.allow_rollback,
            patience_s=self.patience_s,
            facts=self.facts,
            files=self.files,
        )

    def write(self) -> Path:
        """Write the file beside the store; it has the job's token, so only its owner may read it."""
        path = self.job_folder().job_file
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(msgspec.json.encode(self))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return path

    @staticmethod
    def read(path: Path) -> JobFile:
        """Read a job file, or that of a run directory. Raises `ConfigError` if there is none, or if another user may
        change it: its content selects the code that a joiner runs."""
        file = path / "control" / "job.json" if path.is_dir() else path
        try:
            refuse_others(Path(os.path.realpath(file.parent)), str(path))
            return msgspec.json.decode(read_plain(file), type=JobFile)
        except OSError as error:
            raise ConfigError(f"{path}: holds no job that runs ({error.strerror})") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: is no job file ({error})") from error


def address_of(job: str) -> ControlAddress:
    """The address of a job's coordinator, with the token. Raises `ConfigError`."""
    if not job.startswith("tcp://"):
        return JobFile.read(Path(job)).address()
    try:
        host, port = urlsplit(job).hostname, urlsplit(job).port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise ConfigError(f"{job}: is no tcp://HOST:PORT; nearest valid: tcp://127.0.0.1:4711")
    token = given_token()
    if token is None:
        raise ConfigError(f"{job}: {TOKEN} is not set to the job's token, which stands in RUN/control/job.json")
    return ControlAddress(host, port, token)
