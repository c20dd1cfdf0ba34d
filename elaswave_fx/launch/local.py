"""Runs a job on this machine: the builder first, then one worker per rank, and the launcher beside them.

    launch(JobSpec(hosts=("host-0",) * 4, run_dir=…, steps=200, builder=…, worker=…))   ->  0

The launcher holds no tensors and has no threads. It waits on the workers' channels and processes, writes the files of
the run, shows the progress. Exit codes: 0 all steps committed; 1 a process failed, or SIGINT or SIGTERM stopped the
run. What the user can mend is raised as `ConfigError` (exit code 2 at the entry points).
"""

from __future__ import annotations

import importlib
import os
import secrets
import select
import sys
from collections.abc import Callable

from elaswave_fx.launch.channel import Channel, Message
from elaswave_fx.launch.failure import Failure, from_exit, from_message
from elaswave_fx.launch.job import BuildResult, JobSpec, WorkerContext
from elaswave_fx.launch.ports import check_ports
from elaswave_fx.launch.process import Child, end_children, fork_child, frozen_memory
from elaswave_fx.launch.stop import Stop
from elaswave_fx.launch.supervisor import TICK_S, Supervisor
from elaswave_fx.observe.progress import StepProgress
from elaswave_fx.observe.recorder import Recorder


def launch(spec: JobSpec, progress: StepProgress | None = None) -> int:
    """Run the job to its end and return the exit code; see above. Raises `ConfigError`.

    However it ends, no process of it is left, and the run directory has its summary.
    """
    check_ports(spec.port, spec.ranks)
    recorder = Recorder.create(spec.run_dir, spec.first_step, spec.same_run)
    with Stop() as stop, progress or StepProgress(spec.steps, done=spec.first_step) as shown:
        _preload(spec.preload)
        built = _build(spec, recorder, shown, stop)
        failure = built if isinstance(built, Failure) else None
        if isinstance(built, BuildResult):
            recorder.planned(built.plan, built.units, built.samples, spec.ranks)
            for line in built.lines:
                shown.message(line)
            children = _start_workers(spec, built, recorder)
            failure = Supervisor(spec, children, recorder, shown, stop).run()
    if failure is not None:
        return _failed(recorder, failure)
    return _ended(spec, recorder, stop)


def _preload(modules: tuple[str, ...]) -> None:
    """Import what every child needs, with libraries told to use one thread before they start any."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _build(spec: JobSpec, recorder: Recorder, progress: StepProgress, stop: Stop) -> BuildResult | Failure | None:
    """Run the builder in a child; None when the user stopped it."""

    def body(channel: Channel) -> None:
        built = spec.builder()
        channel.send("built", **{**vars(built), "data": dict(built.data)})

    progress.phase("building")
    child = fork_child("builder", body, recorder.directory.log("builder"), ())
    messages: list[Message] = []
    try:
        ended = False
        while not ended:
            ready, _, _ = select.select(
                [child.pidfd, *([] if child.channel.closed else [child.channel])], [], [], TICK_S
            )
            ended = child.pidfd in ready
            messages += child.channel.drain()
            if stop.requests:
                return None
        return _outcome_of_build(child, messages)
    finally:
        end_children([child])


def _outcome_of_build(child: Child, messages: list[Message]) -> BuildResult | Failure:
    status = child.reap()
    for message in messages:
        if message.kind == "built":
            return BuildResult(**{**message.fields, "lines": tuple(message.fields["lines"])})
        return from_message(child.name, message.fields)
    return from_exit(child.name, status, child.log)


def _start_workers(spec: JobSpec, built: BuildResult, recorder: Recorder) -> list[Child]:
    """Fork all workers, or none when the system refuses one; the token exists in their memory only."""
    token = secrets.token_hex(32)
    children: list[Child] = []
    try:
        with frozen_memory():
            for rank in range(spec.ranks):
                name = f"rank-{rank}"
                body = _worker_body(spec, built, token, rank)
                children.append(fork_child(name, body, recorder.directory.log(name), children))
    except OSError:
        end_children(children)
        raise
    return children


def _worker_body(spec: JobSpec, built: BuildResult, token: str, rank: int) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        context = WorkerContext(
            rank=rank,
            hosts=spec.hosts,
            run_dir=spec.run_dir,
            token=token,
            port=spec.port + rank if spec.port else 0,
            build=built,
            channel=channel,
        )
        summary = spec.worker(context)
        channel.send("done", summary=dict(summary))

    return body


def _failed(recorder: Recorder, failure: Failure) -> int:
    """The end of a failed run: what happened, then the reason, last."""
    recorder.finish("failed", failure.reason)
    expected = failure.expected()
    if expected is not None:
        raise expected
    print(failure.details.rstrip(), file=sys.stderr)
    print(f"error: {failure.reason}", file=sys.stderr, flush=True)
    return 1


def _ended(spec: JobSpec, recorder: Recorder, stop: Stop) -> int:
    """The end of a run whose processes all ended well, or that the user stopped."""
    committed = f"{recorder.steps} of {spec.steps} steps"
    if recorder.steps >= spec.steps:
        recorder.finish("completed", None)
        print(recorder.closing_line(), flush=True)
        return 0
    if stop.number is None:
        recorder.finish("failed", f"the workers ended after {committed}")
        print(f"error: the workers ended after {committed}", file=sys.stderr, flush=True)
        return 1
    recorder.finish("interrupted", f"{stop.number.name} after {committed}")
    print(f"stopped by {stop.number.name} after {committed}; the run directory is whole: {spec.run_dir}", flush=True)
    return 1
