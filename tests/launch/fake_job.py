"""A job without tensors: ranks that meet at a barrier once per step, as the vote makes real ones do.

Also a command, for tests that need a launcher in a process of its own:

    python tests/launch/fake_job.py RUN_DIR [steps=N] [pause_s=S] [mode@rank=MODE]
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError, DataError, PeerLost
from elaswave_fx.launch.job import BuildResult, JobSpec, WorkerContext
from elaswave_fx.launch.local import launch
from elaswave_fx.observe.metrics import StepReport

UNITS, SAMPLES = 4, 8
BAD_STEP = 3


class Trouble:
    """What goes wrong in a rank, by name: `before_start`, `start`, or in step `BAD_STEP`."""

    def __init__(self, modes: Mapping[int, str]) -> None:
        self.modes = modes

    def at_start(self, rank: int) -> None:
        mode = self.modes.get(rank)
        if mode == "dies at start":
            raise RuntimeError("no such device: npu:7")
        if mode == "config error":
            raise ConfigError("device=npu: no device answers; nearest valid: cpu")

    def in_step(self, rank: int, step: int) -> None:
        mode = self.modes.get(rank) if step == BAD_STEP else None
        if mode == "raises":
            raise ValueError(f"bad value in rank {rank}")
        if mode == "killed":
            print("rank was here", flush=True)
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

    def after_vote(self, rank: int, step: int) -> None:
        """A rank that is slow to report makes the launcher learn of another's death first."""
        if self.modes.get(rank) == "reports late" and step == BAD_STEP - 1:
            time.sleep(0.5)


def job(
    run_dir: Path, *, ranks: int = 2, steps: int = 5, pause_s: float = 0.0, modes: Mapping[int, str] | None = None,
    builder: Any = None, short: bool = False, port: int = 0,
) -> JobSpec:  # fmt: skip
    """A job of `ranks`; `short`: workers leave a step undone without saying why."""
    vote = multiprocessing.get_context("fork").Barrier(ranks)
    trouble = Trouble(modes or {})

    def build() -> BuildResult:
        return BuildResult(plan='{"epoch": 0}', units=UNITS, samples=SAMPLES, data={"scale": 2.0}, lines=("built it",))

    def worker(context: WorkerContext) -> Mapping[str, Any]:
        trouble.at_start(context.rank)
        places = context.peers(context.port or 9000 + context.rank)
        share = SAMPLES // context.world
        tile = (0, UNITS, context.rank * share, (context.rank + 1) * share)
        for step in range(steps - short):
            if context.should_stop(step):
                break
            trouble.in_step(context.rank, step)
            time.sleep(pause_s)
            vote.wait()
            trouble.after_vote(context.rank, step)
            context.report_step(
                StepReport(
                    step=step,
                    loss=context.build.data["scale"] / (step + 1),
                    tokens=64,
                    step_ms=1.0 + context.rank,
                    lr=1e-3,
                    grad_norm=float("nan") if step == 1 else 1.0,
                    memory_peak_mb=10.0 * (context.rank + 1),
                    consumed=(tile,),
                )
            )
        if context.rank == 0:
            context.report_eval(steps, 0.25, 100)
        ports = [places[rank].port for rank in sorted(places)]
        hosts = [places[rank].host_id for rank in sorted(places)]
        return {"params_digest": "00ff", "ports": ports, "host_ids": hosts} if context.rank == 0 else {}

    return JobSpec(
        hosts=tuple(f"host-{rank // 2}" for rank in range(ranks)),
        run_dir=run_dir,
        steps=steps,
        builder=builder or build,
        worker=worker,
        port=port,
        preload=(),
        grace_s=1.0,
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
    return launch(job(Path(words[0]), ranks=3, steps=steps, pause_s=pause_s, modes=modes, builder=builder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
