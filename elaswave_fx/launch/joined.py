"""The inputs of a joiner, which come from the coordinator instead of from a fork of the launcher.

In: `Welcome`, its files, the coordinator's address. Out: `JoinedContext`, a `WorkerContext` whose reports go through
the coordinator.

    files_for_joiners(program, state)   what the builder shares
    facts = JobFacts.read(welcome.facts)  of the job
    build_here(facts, folder)             the builder's result, with local paths of those files
    context = JoinedContext(welcome, facts, built, address, "127.0.0.1", here(), Conditions(versions(), digest))
    context.relay.tell = agent.tell
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from elaswave_fx.control.coordinator.file_server import SharedFile
from elaswave_fx.control.protocol.member_info import Conditions
from elaswave_fx.control.protocol.messages import Welcome
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.launch.job import BuildResult, Relay, WorkerContext
from elaswave_fx.launch.job_facts import JobFacts
from elaswave_fx.launch.location import Location
from elaswave_fx.plan.work.topology import emulated_host

_PROGRAM, _STATE = "program", "state.safetensors"


def files_for_joiners(program: Mapping[str, Path], state: Path) -> dict[str, SharedFile]:
    """Name -> file of the artifact's folder or the initial tensors; none of them changes."""
    shared = {f"{_PROGRAM}/{name}": SharedFile.of(path) for name, path in program.items()}
    return {**shared, _STATE: SharedFile.of(state)}


def build_here(facts: JobFacts, folder: Path) -> BuildResult:
    """The result of the job's builder, with the shared files in `folder`."""
    data = dataclasses.replace(facts.build.data, artifact=str(folder / _PROGRAM), state=str(folder / _STATE))
    return dataclasses.replace(facts.build, data=data)


def place_in_job(launcher: Location, number: int, ranks_per_host: int, place: Location) -> Location:
    """The failure domain and memory domain of a joiner. On the launcher's host its hosts are emulated, too."""
    return dataclasses.replace(place, host=emulated_host(number, ranks_per_host)) if place == launcher else place


class JoinedContext(WorkerContext):
    """A joiner's side of the job, for its main thread. `relay`: the channel to the launcher once the agent runs."""

    def __init__(
        self, welcome: Welcome, facts: JobFacts, built: BuildResult, address: ControlAddress, host: str,
        place: Location, own: Conditions,
    ) -> None:  # fmt: skip
        """`host`: address of this machine for other ranks. `own`: local versions and data digest."""
        self.relay = Relay()
        super().__init__(
            rank=welcome.number,
            host=host,
            host_id=place.host,
            machine=place.machine,
            run_dir=Path(facts.run_dir),
            has_run_dir=facts.reach_run_dir,
            token=address.token,
            port=0,
            build=built,
            channel=self.relay,
            control=address,
            job_folder=None,
            first=None,
            conditions=own,
        )

    def detach(self, job_time: Callable[[float], float]) -> None:
        """Set `job_time`, see `WorkerContext.detach`; there is no launcher to survive."""
        self._job_time = job_time
