"""A job without tensors under the real launcher: the toy ranks of the control plane's tests, real agents and all.

Also a command, for tests that need a launcher in a process of its own:

    python tests/launch/fake_job.py RUN_DIR [ranks=N] [steps=N] [pause_s=S] [port=P] [builder=slow] [mode@rank=MODE]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from elaswave_fx.config.faults import Fault
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.types import Certificate
from elaswave_fx.errors import ConfigError, DataError, Excluded, PeerLost, PlanError
from elaswave_fx.launch.channel import ChannelClosed
from elaswave_fx.launch.job import BuildResult, JobSpec, WorkerContext, WorkerInputs
from elaswave_fx.launch.local import launch
from elaswave_fx.launch.ports import claimed_ports
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.rank_events import CheckpointWritten, Edited, Resumed, Transferred
from tests.control import toy_job, toy_planner
from tests.waiting import await_true

UNITS, SAMPLES = toy_job.UNITS, toy_planner.BATCH
BAD_STEP = 3


INPUTS = WorkerInputs(artifact="", state="", update={"scale": 2.0}, fingerprint={})


class Trouble:
    """What goes wrong in a rank, by name: at its start, when it detaches, or in step `BAD_STEP`."""

    def __init__(self, modes: Mapping[int, str]) -> None:
        self.modes = modes

    def at_start(self, rank: int) -> None:
        mode = self.modes.get(rank)
        if mode == "dies at start":
            raise RuntimeError("no such device: npu:7")
        if mode == "killed at start":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "config error":
            raise ConfigError("device=npu: no device answers; nearest valid: cpu")

    def at_detach(self, rank: int, others_have: Callable[[], bool], detach: Callable[[], None]) -> None:
        """The launcher may be slow to read: it sees first that one rank has ended, then that others had detached."""
        mode, launcher = self.modes.get(rank), psutil.Process(os.getppid())
        if mode == "killed when the others run":
            await_true(others_have, "the others have detached")
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "detaches unread":
            launcher.suspend()
            try:
                await_true(lambda: any(c.status() == psutil.STATUS_ZOMBIE for c in launcher.children()), "one is dead")
                detach()
            finally:
                launcher.resume()
            return
        detach()
        if mode == "killed while nobody reads":
            await_true(lambda: launcher.status() == psutil.STATUS_STOPPED, "the launcher is stopped")
            os.kill(os.getpid(), signal.SIGKILL)

    def in_step(self, rank: int, step: int, logs: Path) -> None:
        """Those that are killed die together: none is left to find that too much is lost with the others."""
        mode = self.modes.get(rank) if step == BAD_STEP else None
        if mode == "raises":
            raise ValueError(f"bad value in rank {rank}")
        if mode == "killed":
            print("rank was here", flush=True)
            others = [logs / f"rank-{other}.log" for other, its in self.modes.items() if its == "killed"]
            await_true(lambda: all("rank was here" in log.read_text() for log in others), "all are at the step")
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "crashes":
            os.abort()
        if mode == "leaves":
            os._exit(0)
        if mode is not None and mode.startswith("loses"):
            raise PeerLost("link broke", rank=int(mode.removeprefix("loses ")))
        if mode == "raises later":
            time.sleep(0.5)
            raise ValueError("the cause")


class FakeRank(toy_job.ToyRank):
    """A toy rank that reports to the launcher, and gets into trouble."""

    def __init__(self, context: WorkerContext, info: MemberInfo, trouble: Trouble, steps: int, pause_s: float) -> None:
        super().__init__(info, context.first, context.control, context.job_folder, context.run_dir, steps, pause_s)
        self.context, self.trouble = context, trouble

    def wants_stop(self) -> bool:
        return self.context.stop_wanted

    def before_step(self) -> None:
        for fault in self.context.faults:
            if fault.step == self.loop.committed.version and self.trouble.modes.get(self.rank) != "fails to fail":
                os.write(*self.context.fault_words(fault, self.activation.epoch))
                os.kill(os.getpid(), fault.signal)
        self.trouble.in_step(self.rank, self.loop.committed.version, self.context.run_dir / "logs")

    def after_step(self, certificate: Certificate) -> None:
        step, epoch = certificate.stamp.version - 1, certificate.stamp.epoch
        report = StepReport(
            step=step,
            loss=self.context.build.data.update["scale"] / (step + 1),
            tokens=64,
            step_ms=4.0,
            lr=1e-3,
            grad_norm=float("nan") if step == 1 else 1.0,
            memory_peak_mb=10.0 * len(certificate.votes),
            epoch=epoch,
            consumed=tuple(span.edges for vote in certificate.votes for span in vote.consumed),
            world_size=len(certificate.votes),
        )
        self.context.report_step(report)
        mode = self.trouble.modes.get(self.rank, "")
        if mode.startswith("checkpoint") and step + 1 == BAD_STEP:
            fields = {"failed": "no space"} if mode == "checkpoint fails" else {"path": "nowhere"}
            self.context.report_event(CheckpointWritten(step=step + 1, **fields), epoch)
        if epoch > self.resumed and self.rank == min(self.loop.members):
            self.resumed = epoch
            self.context.report_event(Edited(ms=1.0), epoch)
            self.context.report_event(Transferred(ms=2.0, bytes=3, bytes_behind=0), epoch)
            self.context.report_event(Resumed(step=step), epoch)

    resumed = 0


def job(
    run_dir: Path, *, ranks: int = 2, steps: int = 5, pause_s: float = 0.0, modes: Mapping[int, str] | None = None,
    builder: Any = None, short: bool = False, port: int = 0, faults: tuple[Fault, ...] = (), least: int = 1,
) -> JobSpec:  # fmt: skip
    """A job of `ranks`; `short`: workers leave a step undone without saying why."""
    trouble = Trouble(modes or {})
    plan = toy_job.text_of(toy_planner.first_assignment(ranks, UNITS))

    def build() -> BuildResult:
        for kind in ("*.sock", "base-*", "whole-*", "finished-*"):
            for old in run_dir.glob(kind):
                old.unlink()
        return BuildResult(plan=plan, units=UNITS, samples=SAMPLES, data=INPUTS, lines=("built it",))

    def worker(context: WorkerContext) -> Mapping[str, Any]:
        trouble.at_start(context.rank)
        rank = FakeRank(context, context.info(context.port or 9000 + context.rank), trouble, steps - short, pause_s)
        infos = rank.await_members()

        def others_have() -> bool:
            return len(list(run_dir.glob("detached-*"))) == ranks - 1

        def detach() -> None:
            context.detach(rank.agent.job_time)
            (run_dir / f"detached-{context.rank}").touch()

        trouble.at_detach(context.rank, others_have, detach)
        result = rank.run()
        if result["end"] == "excluded":
            raise Excluded(result["reason"])
        if result["end"] == "over":
            raise PlanError(result["reason"])
        if context.launcher_gone:
            raise ChannelClosed("the launcher is gone")
        if context.rank == min(result["members"]):
            context.report_eval(steps, 0.25, 100)
        ports = [info.port for info in infos]
        hosts = [info.memory_domain for info in infos]
        return {"params_digest": "00ff", "ports": ports, "host_ids": hosts}

    return JobSpec(
        hosts=tuple(f"host-{rank // 2}" for rank in range(ranks)),
        run_dir=run_dir,
        steps=steps,
        builder=builder or build,
        worker=worker,
        port=port,
        preload=(),
        grace_s=1.0,
        faults=faults,
        planning=toy_job.ToyPlanning(least),
    )


def refusing_builder() -> BuildResult:
    raise DataError("data.paths=[]: no file; give at least one")


def broken_builder() -> BuildResult:
    raise KeyError("layer9")


def slow_builder() -> BuildResult:
    time.sleep(600)
    raise AssertionError("somebody should have stopped this")


def main(words: list[str]) -> int:
    """The command line above."""
    values = dict(word.split("=", 1) for word in words[1:])
    modes = {int(key.split("@")[1]): value for key, value in values.items() if "@" in key}
    builder = slow_builder if values.get("builder") == "slow" else None
    steps, pause_s = int(values.get("steps", "5")), float(values.get("pause_s", "0"))
    settings = {"port": int(values.get("port", "0")), "ranks": int(values.get("ranks", "3"))}
    return launch(job(Path(words[0]), steps=steps, pause_s=pause_s, modes=modes, builder=builder, **settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def three_free_ports() -> int:
    """The first of three in a row, and one before them, that nobody uses; processes that test at once begin to look at
    places of their own, for ports are free again until a job takes them."""
    ports = range(21000, 29000, 10)
    first = os.getpid() * 7919 % len(ports)
    for port in (*ports[first:], *ports[:first]):
        try:
            with claimed_ports("127.0.0.1", port - 1, 5):
                return port
        except ConfigError:
            continue
    raise AssertionError("no ports are free")
