"""What a rank is given that no launcher has started: what the coordinator told it, instead of what was forked with it.

In: `Welcome`, the files that came with it, the address that it was asked at. Out: `JoinedContext`, a `WorkerContext`
whose reports go through the coordinator.

    files_for_joiners(program, state)   what the builder shares
    build_here(welcome.facts, folder)     what it has made, with those files as they are here
    context = JoinedContext(welcome, built, address, "127.0.0.1", here(), Conditions(versions(), digest))
    context.relay.tell = agent.tell
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from elaswave_fx.control.coordinator.file_server import SharedFile
from elaswave_fx.control.protocol.member_info import Conditions, MemberInfo
from elaswave_fx.control.protocol.messages import Welcome
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.launch.job import BuildResult, Relay, WorkerContext
from elaswave_fx.launch.location import Location
from elaswave_fx.plan.work.topology import emulated_host

_PROGRAM, _STATE = "program", "state.safetensors"


def files_for_joiners(program: Mapping[str, Path], state: Path) -> dict[str, SharedFile]:
    """By name: the files of the artifact's folder, and the initial tensors; all of them stay as they are."""
    shared = {f"{_PROGRAM}/{name}": SharedFile.of(path) for name, path in program.items()}
    return {**shared, _STATE: SharedFile.of(state)}


def build_here(facts: Mapping[str, Any], folder: Path) -> BuildResult:
    """What the job's builder has made, with the files as they lie in `folder`, under the names by which they are
    shared."""
    told = msgspec.convert({**facts["build"], "lines": ()}, BuildResult)
    data = dataclasses.replace(told.data, artifact=str(folder / _PROGRAM), state=str(folder / _STATE))
    return dataclasses.replace(told, data=data)


def place_in_job(facts: Mapping[str, Any], number: int, ranks_per_host: int, place: Location) -> Location:
    """Where a rank is lost, and may share memory. Where the launcher is hosts are emulated for joiners, too."""
    at_launcher = place == Location(**facts["place"])
    return dataclasses.replace(place, host=emulated_host(number, ranks_per_host)) if at_launcher else place


def reaches_run_dir(facts: Mapping[str, Any]) -> bool:
    """Whether the job's run directory is here under its name, and not another folder: it leads to the job's store."""
    control = Path(facts["run_dir"]) / "control"
    return control.is_symlink() and control.readlink().name == Path(facts["store"]).name


class JoinedContext(WorkerContext):
    """The worker's main thread alone uses it. `relay`: its way to the launcher, once the agent runs."""

    def __init__(
        self, welcome: Welcome, built: BuildResult, address: ControlAddress, host: str, place: Location, own: Conditions
    ) -> None:
        """`host`: this machine as the other ranks reach it. `own`: versions and data as they are here."""
        self.relay = Relay()
        super().__init__(
            rank=welcome.number,
            host=host,
            host_id=place.host,
            machine=place.machine,
            world=welcome.number + 1,
            run_dir=Path(welcome.facts["run_dir"]),
            has_run_dir=reaches_run_dir(welcome.facts),
            token=address.token,
            port=0,
            build=built,
            channel=self.relay,
            control=address,
            job_folder=None,
            first=None,
            conditions=own,
        )
        self._others = welcome.infos

    def meet(self, port: int, timeout_s: float = 0.0) -> tuple[MemberInfo, dict[int, MemberInfo]]:
        """This rank's info, which says that it listens on `port`, and those of all ranks as it was told."""
        info = self.info(port)
        return info, {each.number: each for each in (*self._others, info)}

    def detach(self, job_time: Callable[[float], float]) -> None:
        """There is no launcher to survive. `job_time`: as for any rank."""
        self._job_time = job_time
