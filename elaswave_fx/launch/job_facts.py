"""What a joiner must know of a job, from its launcher: it travels through the coordinator as text, which nobody reads.

JobFacts.of(spec, built, store).text()   in the job file and in `Welcome`
JobFacts.read(welcome.facts)             at the joiner
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elaswave_fx.errors import CommError
from elaswave_fx.launch.job import BuildResult, JobSpec
from elaswave_fx.launch.location import Location


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The builder's result without plan, lines and files, and the launcher's place: address, location, run directory,
    the job's folder in memory (`store`), to which the run directory links, and working directory (`folder`)."""

    build: BuildResult
    host: str
    place: Location
    run_dir: str
    store: str
    folder: str

    @staticmethod
    def of(spec: JobSpec, build: BuildResult, store: Path) -> JobFacts:
        return JobFacts(
            build=dataclasses.replace(build, plan="", lines=(), details=(), files={}),
            host=spec.host,
            place=spec.place,
            run_dir=str(spec.run_dir.absolute()),
            store=str(store),
            folder=os.getcwd(),
        )

    def text(self) -> str:
        """Return the facts as JSON: a user's options may have numbers for which MessagePack has no form."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> JobFacts:
        """Raises `CommError` for a text that `text` did not return."""
        try:
            return msgspec.convert(json.loads(text), JobFacts)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CommError(f"control: the facts of a job cannot be read ({error})") from error

    @property
    def reach_run_dir(self) -> bool:
        """Whether the job's run directory exists here, and not another folder of its name: it links to the job's
        store."""
        control = Path(self.run_dir) / "control"
        return control.is_symlink() and control.readlink().name == Path(self.store).name
