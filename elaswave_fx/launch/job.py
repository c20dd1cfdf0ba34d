"""This module says what a job is, seen from the launcher, and what a worker is given.

    spec = JobSpec(ranks=4, hosts=("host-0", "host-0", "host-1", "host-1"), run_dir=…, steps=200, builder=…, worker=…)
    launch(spec)   ->  exit code

The builder runs once, in a child of its own; then the worker runs in one child per rank. Both are called after a
fork, so they may be closures and see what the launcher held, `BuildResult` included.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from elaswave_fx.config.faults import Fault
from elaswave_fx.config.types import PowerConfig
from elaswave_fx.control.coordinator.file_server import SharedFile
from elaswave_fx.control.coordinator.plan_cache import Planning
from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.protocol.member_info import Conditions, MemberInfo
from elaswave_fx.control.protocol.types import Activation
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import CommError
from elaswave_fx.launch.channel import Channel, ChannelClosed, Message
from elaswave_fx.launch.location import Location, here
from elaswave_fx.launch.process import outlive_parent
from elaswave_fx.launch.stop import WARNINGS
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.rank_events import FaultStrikes, RankEvent
from elaswave_fx.observe.recorder import Recorder
from elaswave_fx.observe.run_event import event_of, fields_of
from elaswave_fx.plan.work.topology import Rank

_KEPT = 4096
"""So many of a rank's last reports are kept for the case that the launcher has not read them."""


@dataclass(frozen=True, kw_only=True)
class WorkerInputs:
    """What workers need of what the builder made.

    `artifact`: the program's folder; `state`: the file of initial tensors; `update`: the program of the optimizer's
    update; `fingerprint`: what else decides the bits of a step; `eval_batches`: global batches of an evaluation.
    `samples`: the digest of some, of data that may be another one in each process. Of checkpoints, for a run that makes
    or begins with one: `mark`, of the folder that all ranks write to; `first_step`, `resume_from`: where it begins;
    `contents`: what would be in them.
    """

    artifact: str
    state: str
    update: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    eval_batches: int = 0
    samples: str | None = None
    mark: str | None = None
    first_step: int = 0
    resume_from: str | None = None
    contents: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What the builder made: the plan's text (`plan-0.json`), `data` for workers, lines for the user and `details`,
    which are shown with log.level=debug.

    The program has `units` units, a step `samples` samples: height and width of the work plane. `run` is what
    `run.json` says of the run, for whoever verifies it; `fingerprint` is the hash by which ledger lines name what
    decides bits. `data_digest` is that of the samples which every rank has to read, "" if nobody has looked, `code`
    those of the files which it has to have.
    `memory_bytes`: what a rank may have, as plans reckon. `files`, by name: what a rank that joins fetches, program and
    initial tensors.
    """

    plan: str
    units: int
    samples: int
    data: WorkerInputs
    lines: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: str = ""
    data_digest: str = ""
    code: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    memory_bytes: int | None = None
    files: Mapping[str, SharedFile] = dataclasses.field(default_factory=dict[str, SharedFile])


class Relay:
    """The way to the launcher of a rank that joined: by `tell`, through its agent and the coordinator. What is said
    while there is none, or no agent yet, is lost; nothing comes back, for the wish to stop travels with votes."""

    closed = False

    def __init__(self) -> None:
        self.tell: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None

    def drain(self) -> list[Message]:
        """Nothing."""
        return []

    def send_packed(self, message: bytes) -> None:
        """What `Channel.packed` gave."""
        said = Channel.unpacked(message)
        self.tell(said.kind, dict(said.fields))


class WorkerContext:
    """A worker's side of the job. The worker's main thread alone uses it.

    The rank's `Agent` takes `control`, `job_folder` and `first`, the latter two None for a rank that joins. In the
    first epoch every rank loads the seed or the checkpoint. The rank listens on `port` (0: any free one) of `host`;
    `host_id` names the host, maybe an emulated one, of `machine` that it is on. `faults` are those of this rank. The
    worker ends once the launcher has died, see `stop_wanted`; the rank that has a share of the summary then writes
    what the launcher cannot.
    """

    def __init__(
        self, *, rank: int, host: str, host_id: str, machine: str, world: int, run_dir: Path, token: str, port: int,
        build: BuildResult, channel: Channel | Relay, control: ControlAddress, job_folder: JobFolder | None,
        first: Activation | None, conditions: Conditions,
        faults: tuple[Fault, ...] = (), began_s: float = 0.0, has_run_dir: bool = True,
    ) -> None:  # fmt: skip
        """`began_s`: when the launcher began, by the monotonic clock. `has_run_dir`: False where `run_dir` is only a
        name, which leads to nothing here or to something else."""
        self.rank, self.world = rank, world
        self.host, self.host_id, self.machine = host, host_id, machine
        self.port = port
        self.run_dir, self.token, self.build = run_dir, token, build
        self.has_run_dir = has_run_dir
        self.channel = channel
        self.control, self.job_folder, self.first, self.faults = control, job_folder, first, faults
        self._infos: dict[int, MemberInfo] | None = None
        self._conditions = conditions
        self._job_time: Callable[[float], float] = lambda at_s: at_s  # until there is a coordinator to compare with
        self._halted = False
        self._warning: int | None = None  # This signal has come, and the launcher does not know of it yet.
        self._began_s = began_s
        self._said: deque[bytes] = deque(maxlen=_KEPT)  # The launcher may have died before it read these.

    def meet(self, port: int, timeout_s: float = 120.0) -> tuple[MemberInfo, dict[int, MemberInfo]]:
        """Make this rank's info, which says that it listens on `port`, and wait until all have theirs; return it, and
        those of all ranks.

        Raises `CommError` when a rank has not shown its info in time.
        """
        assert isinstance(self.channel, Channel), "a rank that joins meets others by what it was told"
        info = self.info(port)
        self.channel.send("hello", info=dataclasses.asdict(info))
        end = time.monotonic() + timeout_s
        while self._infos is None and time.monotonic() < end:
            self._take(self.channel.receive(end - time.monotonic()))
        if self._infos is None:
            raise CommError(f"start: not all of {self.world} ranks said within {timeout_s:g} s where they listen")
        return info, self._infos

    def info(self, port: int) -> MemberInfo:
        """This rank's, which listens on `port`."""
        conditions = self._conditions
        return MemberInfo(
            Rank(self.rank), self.machine, self.host_id, self.host, port, self.build.memory_bytes, conditions.versions,
            conditions.data_digest, conditions.code,
        )  # fmt: skip

    def detach(self, job_time: Callable[[float], float]) -> None:
        """Survive the launcher: for when the rank's agent runs, which ends the process if nothing else does.

        `job_time` turns times of this machine's monotonic clock into those of the job's, for all that is reported.
        """
        self._job_time = job_time
        outlive_parent()
        # The launcher stops the run also if this process alone was warned: a limit of processor time is each process's
        # own, and ranks come to it first.
        for number in WARNINGS:
            signal.signal(number, self._on_warning)
        self._send("detached")

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        self._warning = number

    @property
    def stop_wanted(self) -> bool:
        """Whether the run is to end early, by a signal to the launcher or because that is gone. Costs a system call.

        Ranks learn of it at different times: the wish travels with their votes, and all stop after the same step.
        """
        for message in self.channel.drain():
            self._take(message)
        if self._warning is not None:
            number, self._warning = self._warning, None
            self._send("warned", signal=number)
        return self._halted or self.channel.closed

    @property
    def launcher_gone(self) -> bool:
        """Whether the launcher was seen to be gone; the exit code is 1 then."""
        return self.channel.closed

    def report_step(self, report: StepReport) -> None:
        """Report a committed step. Every rank reports every step, in order, and the first to do so is heard."""
        if report.alive_at_s is not None:
            report = dataclasses.replace(report, alive_at_s=self._job_time(report.alive_at_s))
        self._said.append(Channel.packed("step", **dataclasses.asdict(report)))
        self._send_packed(self._said[-1])

    def report_eval(self, step: int, loss: float, count: int) -> None:
        """Report the mean held-out loss over `count` targets after `step` steps; one rank does."""
        self._said.append(Channel.packed("eval", step=step, loss=loss, count=count))
        self._send_packed(self._said[-1])

    def report_share(self, share: Mapping[str, Any]) -> None:
        """Report what this rank adds to `summary.json`, before its end: it may be lost until then."""
        self._send("share", summary=dict(share))

    def report_event(self, event: RankEvent, epoch: int = 0) -> None:
        """Report what happens now, a line of `events.jsonl`."""
        packed = Channel.packed("event", epoch=epoch, at_s=self._job_time(time.monotonic()), **fields_of(event))
        if not self._send_packed(packed):
            self._said.append(packed)

    def report_end(self, share: Mapping[str, Any], steps: int) -> None:
        """Report that this rank has done its work in a run of `steps` steps. If the launcher is gone, the rank that has
        a share of the summary completes the run's files in its place. Raises `ChannelClosed` then."""
        if self._send("done", summary=dict(share)):
            return
        if share:
            self._finish_record(share, steps)
        raise ChannelClosed("the launcher is gone")

    def _finish_record(self, share: Mapping[str, Any], steps: int) -> None:
        assert self.first is not None, "the launcher has started this rank"
        recorder = Recorder.rejoin(self.run_dir, self.first.resume.version, self._began_s)
        for kind, fields in ((message.kind, dict(message.fields)) for message in map(Channel.unpacked, self._said)):
            if kind == "step":
                recorder.step(StepReport.from_fields(fields))
            elif kind == "eval":
                recorder.evaluation(**fields)
            else:
                epoch, at_s = fields.pop("epoch"), fields.pop("at_s")
                recorder.event(event_of(RankEvent, {**fields, "rank": self.rank}), epoch, at_s)
        recorder.ended(self.rank, share)
        if recorder.gave_up is not None:
            recorder.finish("failed", recorder.gave_up)
        elif recorder.steps >= steps:
            recorder.finish("completed", None)
        else:
            recorder.finish("interrupted", f"the launcher ended after {recorder.steps} of {steps} steps")

    def fault_words(self, fault: Fault, epoch: int) -> tuple[int, bytes]:
        """Return a descriptor, and what the engine writes to it at the last moment before a fault strikes."""
        assert isinstance(self.channel, Channel), "faults strike ranks that the launcher has started"
        strikes = FaultStrikes(step=fault.step, fault=fault.kind, phase=fault.phase, seconds=fault.seconds)
        return self.channel.fileno(), Channel.packed("event", epoch=epoch, at_s=None, **fields_of(strikes))

    def _send(self, kind: str, **fields: Any) -> bool:
        return self._send_packed(Channel.packed(kind, **fields))

    def _send_packed(self, message: bytes) -> bool:
        """Whether it was sent."""
        try:
            self.channel.send_packed(message)
        except ChannelClosed:
            self.channel.closed = True
        return not self.channel.closed

    def _take(self, message: Message | None) -> None:
        if message is None:
            return
        if message.kind == "peers":
            self._infos = {info["number"]: MemberInfo(**info) for info in message.fields["infos"]}
        elif message.kind == "halt":
            self._halted = True
        else:
            raise CommError(f"channel: a worker does not know the message {message.kind}")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run. Raises nothing itself; `launch` checks it.

    Args:
        hosts: the host id of each rank, all of them of `place`; their number is the number of ranks.
        builder: raises `ConfigError` and its kin for the user's mistakes.
        worker: returns its share of `summary.json` (rank 0 wins where two say the same key); `params_digest` is one.
            None: the rank has left, as it was told, and has said so.
        steps: how many steps the run is to commit, for the progress.
        first_step: so many of them were committed before, by a run that this one goes on with.
        same_run: that run had this run directory, so its lines are kept.
        host: this machine as the others reach it, an address or a name.
        port: rank r listens on port + r; 0: any.
        control_port: where the coordinator listens; 0: any.
        preload: modules imported before the forks, so that every child finds them in memory.
        grace_s: seconds that ranks which were left out have to end by themselves.
        copies: of each box, besides its owner's. `allow_rollback`: also while somebody who has a newer copy may live,
            who is waited for else, for `patience_s`.
        faults: each must have been told of by its victim when the run ends.
        planning: the planner; None: that of `elaswave_fx.plan`.
        log_level: of the lines on the console, "info" or "debug".
        exit_words: tell the coordinator when a worker's process ends; else it goes by links and heartbeats alone, as it
            would if the launcher were on another machine, or gone.
        joiner: the command by which one more rank joins; empty: nobody is started while the job runs.
        power: by what clocks are set, those too that an earlier run has left as it had set them.
    """

    hosts: tuple[str, ...]
    run_dir: Path
    steps: int
    builder: Callable[[], BuildResult]
    worker: Callable[[WorkerContext], Mapping[str, Any] | None]
    host: str = "127.0.0.1"
    port: int = 0
    control_port: int = 0
    preload: tuple[str, ...] = ("torch",)
    grace_s: float = 5.0
    first_step: int = 0
    same_run: bool = False
    copies: int = 1
    allow_rollback: bool = False
    patience_s: float = 300.0
    faults: tuple[Fault, ...] = ()
    planning: Planning | None = None
    log_level: str = "info"
    exit_words: bool = True
    joiner: tuple[str, ...] = ()
    power: PowerConfig | None = None
    place: Location = dataclasses.field(default_factory=here)

    @property
    def ranks(self) -> int:
        return len(self.hosts)


def facts_for_joiners(spec: JobSpec, build: BuildResult, store: Path) -> dict[str, Any]:
    """What a process that joins is told of a job, as JSON: what the builder has made, and where the launcher is.
    `store`: the job's folder in memory, to which its run directory leads."""
    told = dataclasses.replace(build, plan="", lines=(), details=(), files={})
    return {
        "build": dataclasses.asdict(told),
        "host": spec.host,
        "place": dataclasses.asdict(spec.place),
        "run_dir": str(spec.run_dir.absolute()),
        "store": str(store),
        "folder": os.getcwd(),
    }
