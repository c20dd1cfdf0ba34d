"""A job as the launcher sees it, and what a worker receives.

    spec = JobSpec(ranks=4, hosts=("host-0", "host-0", "host-1", "host-1"), run_dir=…, steps=200, builder=…, worker=…)
    launch(spec)   ->  exit code

The builder runs once, in its own child; then the worker runs in one child per rank. Both are called after a fork, so
they may be closures and see the launcher's objects, `BuildResult` included.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from elaswave_fx.config.faults import Fault
from elaswave_fx.config.keys import PowerConfig
from elaswave_fx.control.coordinator.file_server import SharedFile
from elaswave_fx.control.coordinator.plan_cache import Planning
from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.protocol.member_info import Conditions, MemberInfo
from elaswave_fx.control.protocol.types import Activation
from elaswave_fx.control.token import job_token
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.errors import CommError
from elaswave_fx.launch.channel import Channel, ChannelClosed, Message
from elaswave_fx.launch.location import Location, here
from elaswave_fx.launch.process import outlive_parent
from elaswave_fx.launch.stop import WARNINGS
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.rank_events import FaultStrikes, RankEvent, clipped
from elaswave_fx.observe.recorder import Recorder
from elaswave_fx.observe.run_event import fields_of, received
from elaswave_fx.plan.work.topology import Rank

_KEPT = 4096
"""Number of a rank's last reports that it keeps, in case the launcher has not read them."""


@dataclass(frozen=True, kw_only=True)
class WorkerInputs:
    """The builder's results that workers need.

    `artifact`: the program's folder; `state`: the file of initial tensors; `update`: the program of the optimizer's
    update; `fingerprint`: what else decides the bits of a step; `eval_batches`: global batches of an evaluation.
    `samples`: digest of some samples, for data that may differ between processes. Only for a run with checkpoints:
    `mark` of the folder that all ranks write to; `first_step`, `resume_from`: its start; `contents` of its checkpoints.
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
    """The builder's result: the plan's text (`plan-0.json`), `data` for workers, lines for the user and `details` for
    log.level=debug.

    The program has `units` units, a step `samples` samples: height and width of the work plane. `run` is the content of
    `run.json`, for verification. Ledger lines name what decides bits by `fingerprint`, a hash. `data_digest`: of the
    samples that every rank must read, "" if not computed; `code`: digests of the files that it must have.
    `memory_bytes`: a rank's memory for plans. `files`, by name: program and initial tensors, which a joiner fetches.
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

    def text(self) -> str:
        """Return the result as JSON: a user's options may have numbers for which MessagePack has no form."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(text: str) -> BuildResult:
        """Return the result of which this is the `text`."""
        return msgspec.convert(json.loads(text), BuildResult)


class Relay:
    """A joiner's channel to the launcher: `tell` sends through its agent and the coordinator. Messages are lost while
    either is missing. Nothing returns: a stop request travels with votes."""

    closed = False

    def __init__(self) -> None:
        self.tell: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None

    def drain(self) -> list[Message]:
        """Return nothing: no message comes back."""
        return []

    def send_packed(self, message: bytes) -> None:
        """Send the bytes that `Channel.packed` returned."""
        said = Channel.unpacked(message)
        self.tell(said.kind, dict(said.fields))


class WorkerContext:
    """A worker's side of the job. Only the worker's main thread uses it.

    The rank's `Agent` takes `control`, `job_folder` and `first`; the latter two are None for a joiner. In the first
    epoch every rank loads the seed or the checkpoint. The rank listens on `port` (0: any free one) of `host`; `host_id`
    names its host, maybe an emulated one, on `machine`. `faults`: this rank's. The worker ends once the launcher has
    died, see `stop_wanted`; the rank with a share of the summary then completes the run's files.
    """

    def __init__(
        self, *, rank: int, host: str, host_id: str, machine: str, run_dir: Path, token: str, port: int,
        build: BuildResult, channel: Channel | Relay, control: ControlAddress, job_folder: JobFolder | None,
        first: Activation | None, conditions: Conditions,
        faults: tuple[Fault, ...] = (), began_s: float = 0.0, has_run_dir: bool = True,
    ) -> None:  # fmt: skip
        """`began_s`: the launcher's start, monotonic. `has_run_dir`: whether `run_dir` here is the job's."""
        self.rank = rank
        self.host, self.host_id, self.machine = host, host_id, machine
        self.port = port
        self.run_dir, self.token, self.build = run_dir, token, build
        self.has_run_dir = has_run_dir
        self.channel = channel
        self.control, self.job_folder, self.first, self.faults = control, job_folder, first, faults
        self._conditions = conditions
        self._job_time: Callable[[float], float] = lambda at_s: at_s  # until a coordinator's clock is known
        self._halted = False
        self._warning: int | None = None  # a received signal that the launcher does not know of yet
        self._began_s = began_s
        self._said: deque[bytes] = deque(maxlen=_KEPT)  # The launcher may die before it reads these.

    def info(self, port: int) -> MemberInfo:
        """This rank's info, listening on `port`."""
        conditions = self._conditions
        return MemberInfo(
            Rank(self.rank), self.machine, self.host_id, self.host, port, self.build.memory_bytes, conditions.versions,
            conditions.data_digest, conditions.code,
        )  # fmt: skip

    def detach(self, job_time: Callable[[float], float]) -> None:
        """Survive the launcher. Call this once the rank's agent runs, which then ends the process if nothing else does.

        `job_time` converts this machine's monotonic times to the job's, for all reports.
        """
        self._job_time = job_time
        outlive_parent()
        # The launcher also stops the run if only this process was warned: a limit of processor time is per process, and
        # ranks reach it first.
        for number in WARNINGS:
            signal.signal(number, self._on_warning)
        self._send("detached")

    def _on_warning(self, number: int, frame: FrameType | None) -> None:
        self._warning = number

    @property
    def stop_wanted(self) -> bool:
        """Whether the run should end early, after a signal to the launcher or its death. Costs a system call.

        Ranks learn of it at different times: the request travels with their votes, and all stop after the same step.
        """
        for message in self.channel.drain():
            if message.kind != "halt":
                raise CommError(f"channel: a worker does not know the message {message.kind}")
            self._halted = True
        if self._warning is not None:
            number, self._warning = self._warning, None
            self._send("warned", signal=number)
        return self._halted or self.channel.closed

    @property
    def launcher_gone(self) -> bool:
        """Whether the launcher has died; the exit code is 1 then."""
        return self.channel.closed

    def report_step(self, report: StepReport) -> None:
        """Report a committed step. Every rank reports every step, in order; the first report counts."""
        if report.alive_at_s is not None:
            report = dataclasses.replace(report, alive_at_s=self._job_time(report.alive_at_s))
        self._said.append(Channel.packed("step", **dataclasses.asdict(report)))
        self._send_packed(self._said[-1])

    def report_eval(self, step: int, loss: float, count: int) -> None:
        """Report the mean held-out loss over `count` targets after `step` steps; one rank calls this."""
        self._said.append(Channel.packed("eval", step=step, loss=loss, count=count))
        self._send_packed(self._said[-1])

    def report_share(self, share: Mapping[str, Any]) -> None:
        """Report this rank's part of `summary.json` before its end; it may be lost until then."""
        self._send("share", summary=dict(share))

    def report_event(self, event: RankEvent, epoch: int = 0) -> None:
        """Report an event of now, a line of `events.jsonl`."""
        packed = Channel.packed(
            "event", epoch=epoch, at_s=self._job_time(time.monotonic()), **clipped(fields_of(event))
        )
        if not self._send_packed(packed):
            self._said.append(packed)

    def report_end(self, share: Mapping[str, Any], steps: int) -> None:
        """Report that this rank has finished a run of `steps` steps. If the launcher has died, the rank with a share of
        the summary completes the run's files, and this raises `ChannelClosed`."""
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
                recorder.event(*received(RankEvent, {**fields, "rank": self.rank}))
        recorder.ended(self.rank, share)
        if recorder.gave_up is not None:
            recorder.finish("failed", recorder.gave_up)
        elif recorder.steps >= steps:
            recorder.finish("completed", None)
        else:
            recorder.finish("interrupted", f"the launcher ended after {recorder.steps} of {steps} steps")

    def fault_words(self, fault: Fault, epoch: int) -> tuple[int, bytes]:
        """Return a descriptor, and the bytes that the engine writes to it just before a fault strikes."""
        assert isinstance(self.channel, Channel), "faults strike ranks that the launcher has started"
        strikes = FaultStrikes(step=fault.step, fault=fault.kind, phase=fault.phase, seconds=fault.seconds)
        return self.channel.fileno(), Channel.packed("event", epoch=epoch, at_s=None, **fields_of(strikes))

    def _send(self, kind: str, **fields: Any) -> bool:
        return self._send_packed(Channel.packed(kind, **fields))

    def _send_packed(self, message: bytes) -> bool:
        """Send; return whether the channel is still open."""
        try:
            self.channel.send_packed(message)
        except ChannelClosed:
            self.channel.closed = True
        return not self.channel.closed


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run. Raises nothing itself; `launch` checks it.

    Args:
        hosts: the host id of each rank, all in `place`; their number is the number of ranks.
        builder: raises `ConfigError` or a subclass for user errors.
        worker: returns its share of `summary.json`, such as `params_digest`; rank 0's wins where keys are equal.
            None: the rank was drained and has reported it.
        steps: number of steps of the run, for the progress.
        first_step: number of steps that an earlier run, which this one resumes, has committed.
        same_run: that run had this run directory, so its lines are kept.
        host: address or name of this machine for other hosts.
        token: the secret that its processes and joiners prove to know, see `control.token`.
        port: rank r listens on port + r; 0: any.
        control_port: where the coordinator listens; 0: any.
        preload: modules imported before the forks, so that every child finds them in memory.
        grace_s: seconds that evicted ranks have to end by themselves.
        copies: replicas of each box besides its owner's. `allow_rollback`: roll back even if a holder of a newer
            replica may live; otherwise wait for it, for `patience_s`.
        faults: each must have been reported by its victim when the run ends.
        planning: the planner; None: that of `elaswave_fx.plan`.
        log_level: of the lines on the console, "info" or "debug".
        exit_words: report ends of workers' processes to the coordinator; else it has links and heartbeats alone, as
            with a launcher on another machine or a dead one.
        joiner: the command that starts a joiner; empty: no process is started while the job runs.
        power: how clocks are set, and restored if an earlier run left them changed.
    """

    hosts: tuple[str, ...]
    run_dir: Path
    steps: int
    builder: Callable[[], BuildResult]
    worker: Callable[[WorkerContext], Mapping[str, Any] | None]
    host: str = "127.0.0.1"
    token: str = dataclasses.field(default_factory=job_token)
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
