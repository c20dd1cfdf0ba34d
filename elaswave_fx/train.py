"""`python -m elaswave_fx.train [recipe=NAME] [key=value …]`: train a model. `--help` lists the keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread per rank

from elaswave_fx.config.compose import Job, run_hydra
from elaswave_fx.entry import run_command

if TYPE_CHECKING:
    from elaswave_fx.config.keys import Config
    from elaswave_fx.launch.job import WorkerContext

_PRELOAD = (
    "torch",
    "safetensors.torch",
    "elaswave_fx._native",
    "elaswave_fx.worker.loop",
    "elaswave_fx.build.build_job",
)


_ORPHANS_S = 600.0
"""Time that ranks without a launcher have to save their state."""


def train(job: Job, work: Callable[[Config, WorkerContext], Mapping[str, Any] | None] | None = None) -> int:
    """Run one job to its end; return the exit code. `work` replaces `run_worker` as what each rank runs."""
    from elaswave_fx.checkpoint.start import checkpoint_folder, find_start
    from elaswave_fx.config.faults import check_faults
    from elaswave_fx.launch.job import BuildResult, JobSpec
    from elaswave_fx.launch.local import launch
    from elaswave_fx.launch.location import here
    from elaswave_fx.observe.run_directory import RunDirectory
    from elaswave_fx.plan.work.topology import emulated_host

    config = job.config
    _refuse_copies()
    RunDirectory.await_orphans(job.run_dir, partial(print, flush=True), _ORPHANS_S)
    start = find_start(config, job.run_dir)
    writes_or_reads = start.path is not None or checkpoint_folder(config, job.run_dir) is not None
    check_faults(config.faults, config.parallel.ranks, config.steps, first_step=start.step)
    parallel = config.parallel
    hosts = tuple(emulated_host(rank, parallel.ranks_per_host) for rank in range(parallel.ranks))

    def builder() -> BuildResult:
        from elaswave_fx.build.build_job import build_job

        return build_job(config, job.run_dir, start=start)

    def worker(context: WorkerContext) -> Mapping[str, Any] | None:
        from elaswave_fx.worker.loop import run_worker

        return (work or run_worker)(config, context)

    return launch(
        JobSpec(
            hosts=hosts,
            run_dir=job.run_dir,
            steps=config.steps,
            builder=builder,
            worker=worker,
            host=config.launch.host,
            port=config.launch.port,
            control_port=config.launch.control_port,
            exit_words=config.lab.exit_words,
            preload=(*_PRELOAD, "elaswave_fx.checkpoint.saver") if writes_or_reads else _PRELOAD,
            first_step=start.step,
            same_run=start.same_run,
            copies=config.copies.count,
            allow_rollback=config.recovery.allow_rollback,
            patience_s=config.recovery.patience_s,
            faults=config.faults,
            place=here(config.launch.failure_domain),
            joiner=(sys.executable, "-m", "elaswave_fx.worker", str(job.run_dir.absolute())),
            power=config.power,
            log_level=config.log.level,
        )
    )


def _refuse_copies() -> None:
    """Refuse to run as one of several copies: each would start all ranks."""
    from elaswave_fx.errors import ConfigError
    from elaswave_fx.launch.process_launchers import started_copies

    copies = started_copies(os.environ)
    if copies is not None:
        many = "several" if copies.count is None else str(copies.count)
        raise ConfigError(
            f"train starts its ranks itself, and {copies.launcher} has started it {many} times ({copies.told}): each "
            f"would train the whole job; nearest valid: one task of python -m elaswave_fx.train "
            f"parallel.dp={copies.count or 'RANKS'}"
        )


if __name__ == "__main__":
    sys.exit(run_command(lambda: run_hydra(train)))
