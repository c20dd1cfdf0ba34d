"""`python -m elaswave_fx.train [recipe=NAME] [key=value …]`: train a model. `--help` lists the keys."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread per rank

from elaswave_fx.config.compose import Job, run_hydra

_PRELOAD = (
    "torch",
    "safetensors.torch",
    "elaswave_fx._native",
    "elaswave_fx.worker.loop",
    "elaswave_fx.build.builder",
)


def train(job: Job) -> int:
    """Run one job to its end; returns the exit code."""
    from elaswave_fx.checkpoint.start import checkpoint_folder, find_start
    from elaswave_fx.config.faults import check_faults
    from elaswave_fx.launch.job import BuildResult, JobSpec
    from elaswave_fx.launch.local import launch

    config = job.config
    start = find_start(config, job.run_dir)
    writes_or_reads = start.path is not None or checkpoint_folder(config, job.run_dir) is not None
    check_faults(config.faults, config.parallel.ranks, config.steps, first_step=start.step)
    hosts = tuple(f"host-{rank // config.parallel.ranks_per_host}" for rank in range(config.parallel.ranks))

    def builder() -> BuildResult:
        from elaswave_fx.build.builder import build_job

        return build_job(config, job.run_dir, start=start)

    def worker(context):  # type: ignore[no-untyped-def]
        from elaswave_fx.worker.loop import run_worker

        return run_worker(config, context)

    return launch(
        JobSpec(
            hosts=hosts,
            run_dir=job.run_dir,
            steps=config.steps,
            builder=builder,
            worker=worker,
            port=config.launch.port,
            preload=(*_PRELOAD, "elaswave_fx.checkpoint.saver") if writes_or_reads else _PRELOAD,
            first_step=start.step,
            same_run=start.same_run,
            copies=config.copies.count,
            allow_rollback=config.recovery.allow_rollback,
            faults=config.faults,
        )
    )


if __name__ == "__main__":
    sys.exit(run_hydra(train))
