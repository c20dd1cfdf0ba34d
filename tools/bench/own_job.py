"""Our jobs for a benchmark: what `train` runs, in a child, with ranks that tell of every step that they commit.

In: a `GptJob` and a `Variant`. Out: `Run`, seconds and bytes of its steps; or the job itself, while it runs.

    run_steps(gpt, Variant(), steps=8, warm_up=3)   ->  Run(seconds=(…), bytes_per_step=…, …)
    with OwnJob(gpt.config()) as job:
        job.hear("step")                               ->  {"rank": 0, "step": 0, "at_s": …, …}

Launcher, builder, coordinator, agents and the training loop are those of users; `Training` calls a function of ours
after each step, and that is all that is added.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import elaswave_fx.build.build_job  # noqa: F401 - once, and not in every child
from elaswave_fx.config.compose import Job
from elaswave_fx.config.keys import Config
from elaswave_fx.devices import make_device
from elaswave_fx.launch.channel import Channel
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.rank_events import RankEvent
from elaswave_fx.plan.plan import Plan
from elaswave_fx.train import train
from elaswave_fx.worker.loop import Training, refuse_other_bits
from elaswave_fx.worker.worker import Worker, set_up
from tools.bench.gpt_job import GptJob
from tools.bench.processes import TEST_TIMEOUT_S, BenchFailed, Processes, Reports
from tools.bench.results import Steps


class ClockRead(RankEvent, frozen=True, tag="monotonic"):
    """What the clock of the rank's machine says now."""

    monotonic_s: float


RUN_TIMEOUT_S = 900.0
"""A run of many ranks takes minutes."""


@dataclass(frozen=True)
class Variant:
    """A kind of job, by its overrides. If it is not `guarded`, the agents say goodbye before the first step, so that
    there are no heartbeats, proofs of commits or ledger. A rank has `resident_bytes` in memory besides."""

    words: tuple[str, ...] = ()
    guarded: bool = True
    resident_bytes: int = 0


@dataclass(frozen=True)
class Resident:
    """The resident memory of a rank, right after its fork and at its peak."""

    forked_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Run(Steps):
    """One job of ours, with its plan, the bytes that all ranks send in a step, those of copies among them, and the
    memory of each rank."""

    plan: Plan
    bytes_per_step: float
    copied_per_step: float
    resident: tuple[Resident, ...]


_LOOK_EVERY_S = 0.01

Work = Callable[[Reports, Config, WorkerContext], Mapping[str, Any] | None]
"""Does a rank's work: it reports, and returns the rank's share of the summary; None if the rank has left."""

Pause = Callable[[int], object]
"""Called by a rank, with its number, before each of its steps."""


def work_of(variant: Variant = Variant(), pause: Pause = lambda rank: None) -> Work:
    """Train as users do, and tell of every step."""
    return partial(_work, variant, pause)


class OwnJob:
    """A job that runs in a child until it is over or the block is left. `folder`: its run directory. `work`: what its
    ranks do; if not given, they train and tell of every step. `begin`: what the launcher's process does first.
    """

    def __init__(self, config: Config, work: Work | None = None, begin: Callable[[], None] = lambda: None) -> None:
        work = work or work_of()
        self._processes, self._reports = Processes(), Reports()
        self.folder = self._processes.folder / "run"
        self.folder.mkdir()

        def body(channel: Channel) -> None:
            self._reports.close_reader()
            begin()
            if train(Job(config, self.folder, {}, ()), partial(_with_clock, partial(work, self._reports))) != 0:
                raise BenchFailed("bench: the run failed")

        self._child = self._processes.fork("train", body)
        self._reports.close_writer()

    def __enter__(self) -> OwnJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.end("train")
        self._processes.__exit__()
        self._reports.close_reader()

    def join(self) -> None:
        """Wait for the end of the run. Raises BenchFailed where it has failed."""
        self._processes.join("train", RUN_TIMEOUT_S)

    def hear(self, kind: str, timeout_s: float = TEST_TIMEOUT_S) -> Mapping[str, Any]:
        """Return the next report of a rank of that kind; raises BenchFailed with the end of the log when none comes."""
        return self._reports.hear(kind, self._child.log, timeout_s)

    def read(self, name: str) -> str:
        """Return a file of the run directory; some appear a moment after what they tell of. Raises BenchFailed."""
        end, path = time.monotonic() + TEST_TIMEOUT_S, self.folder / name
        while not path.exists():
            if time.monotonic() > end:
                raise BenchFailed(f"bench: the run has no {name} after {TEST_TIMEOUT_S:g} s")
            time.sleep(_LOOK_EVERY_S)
        return path.read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the JSON lines of a file of the run directory that are complete."""
        return [json.loads(line) for line in (self.folder / name).read_text().split("\n")[:-1]]

    def events(self, until: str) -> list[dict[str, Any]]:
        """Return the run's events once one of kind `until` is written; `at_s` is the moment of each by the monotonic
        clock, which all processes of a machine share. Raises BenchFailed when there is none in time."""
        end = time.monotonic() + TEST_TIMEOUT_S
        while time.monotonic() < end:
            events = self.lines("events.jsonl")
            if any(event["kind"] == until for event in events):
                clock = next(event for event in events if event["kind"] == "monotonic")
                began_s = clock["monotonic_s"] - clock["t_ms"] / 1e3
                return [{**event, "at_s": began_s + event["t_ms"] / 1e3} for event in events]
            time.sleep(_LOOK_EVERY_S)
        raise BenchFailed(f"bench: the run has no event {until} after {TEST_TIMEOUT_S:g} s")


def run_steps(gpt: GptJob, variant: Variant, steps: int, warm_up: int) -> Run:
    """Run one job: `warm_up` steps that do not count, then `steps` that do. Raises BenchFailed."""
    last, ranks = warm_up + steps - 1, range(gpt.ranks)
    with OwnJob(gpt.config(*variant.words, f"steps={warm_up + steps}"), work_of(variant)) as job:
        found: dict[tuple[int, int], Mapping[str, Any]] = {}
        while len(found) < gpt.ranks * (last + 1):
            report = job.hear("step")
            found[report["rank"], report["step"]] = report
        over = {report["rank"]: report for report in (job.hear("over") for _ in ranks)}
        plan = Plan.from_json((job.folder / "plan-0.json").read_text())

    def per_step(what: str) -> float:
        return sum(found[rank, last][what] - found[rank, warm_up - 1][what] for rank in ranks) / steps

    moments = [found[0, step]["at_s"] for step in range(warm_up - 1, last + 1)]
    return Run(
        tuple(later - sooner for sooner, later in pairwise(moments)),
        per_step("cpu_s"),
        tuple(found[0, step]["loss"] for step in range(last + 1)),
        plan,
        per_step("sent_bytes"),
        per_step("copied_bytes"),
        tuple(Resident(over[rank]["forked_bytes"], over[rank]["peak_bytes"]) for rank in ranks),
    )


# --- In a rank


def _with_clock(
    work: Callable[[Config, WorkerContext], Mapping[str, Any] | None], config: Config, context: WorkerContext
) -> Mapping[str, Any] | None:
    """Have the first rank report an event that carries its own moment, before its work. It sets the clock of all
    others, which are written with the time since the launcher began."""
    if context.rank == 0:
        context.report_event(ClockRead(monotonic_s=time.monotonic()))
    return work(config, context)


def _peak_bytes() -> int:
    """The largest resident set of this process since its device was set up, which resets it."""
    told = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(next(told).split()[1]) * 1024


def _work(
    variant: Variant, pause: Pause, reports: Reports, config: Config, context: WorkerContext
) -> Mapping[str, Any] | None:
    """Do what `run_worker` does, and tell of every step."""
    device = make_device(config.device)
    device.set_up(threads=1, deterministic=config.exact)
    if config.exact:
        refuse_other_bits(device, context)
    ballast = torch.ones(variant.resident_bytes, dtype=torch.uint8)
    forked = _peak_bytes()
    worker = set_up(config, context)
    if not variant.guarded:
        worker.agent.close(finished=True)  # the coordinator waits for none of its words, and makes no epoch

    def on_step(report: StepReport) -> None:
        _tell(worker, reports, report)
        pause(context.rank)

    reports.say("ready", rank=context.rank)
    pause(context.rank)
    share = Training(worker, device, on_step).run()
    reports.say("over", rank=context.rank, forked_bytes=forked, peak_bytes=_peak_bytes())
    del ballast
    return share


def _tell(worker: Worker, reports: Reports, report: StepReport) -> None:
    """Report a step right after its commit: what the harness needs of it, and what has been counted so far."""
    reports.say(
        "step",
        rank=worker.rank,
        pid=os.getpid(),
        step=report.step,
        at_s=time.monotonic(),
        epoch=report.epoch,
        ranks=report.world_size,
        loss=report.loss,
        sent_bytes=worker.endpoint.bytes_sent,
        copied_bytes=worker.engine.native.holdings().copied_bytes,
        cpu_s=time.process_time(),
    )
