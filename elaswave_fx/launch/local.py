"""Runs a job on this machine: the builder first, then a coordinator and one worker per rank.

    launch(JobSpec(hosts=("host-0",) * 4, run_dir=…, steps=200, builder=…, worker=…))   ->  0

The launcher holds no tensors and has no threads. It waits on the workers' channels and processes, writes the files of
the run, shows the progress. The other workers replace lost ones; the run continues as long as one lives. Exit codes: 0
all steps are committed, each once in the ledger; 1 the run failed; 128 + its number if a signal stopped it, as in
shells. User errors raise `ConfigError` (exit code 2 at the entry points).
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable

from elaswave_fx._liveness import LivenessTable
from elaswave_fx.control.agent.join_folder import remove_left_behind
from elaswave_fx.control.coordinator.job_file import JobFile
from elaswave_fx.control.coordinator.plan_cache import Planner, Planning, skipped_by_plan
from elaswave_fx.control.coordinator.service import CoordinatorSpec
from elaswave_fx.control.protocol.member_info import Conditions
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Activation, Assignment, Stamp, Term, Version
from elaswave_fx.control.store.file_store import MEMORY, FileStore, refuse_foreign, settle_dead_jobs
from elaswave_fx.control.store.ledger import covers_once, head_of, restored_alike, standing
from elaswave_fx.control.tcp import port_of
from elaswave_fx.errors import PlanError
from elaswave_fx.files import json_lines
from elaswave_fx.launch.channel import Channel, Message
from elaswave_fx.launch.console import lasting_console
from elaswave_fx.launch.coordination import Coordination
from elaswave_fx.launch.failure import Failure, from_exit, from_message
from elaswave_fx.launch.job import BuildResult, JobSpec, WorkerContext
from elaswave_fx.launch.job_facts import JobFacts
from elaswave_fx.launch.ports import check_host, claimed_ports, control_listener
from elaswave_fx.launch.process import Child, end_children, fork_child, freeze_memory
from elaswave_fx.launch.restore_clocks import put_clocks_back
from elaswave_fx.launch.stop import SIGNALLED, Stop
from elaswave_fx.launch.supervisor import TICK_S, Supervisor
from elaswave_fx.launch.versions import versions
from elaswave_fx.observe.progress import StepProgress
from elaswave_fx.observe.recorder import Recorder
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.observe.run_log import RunLog
from elaswave_fx.plan.work.topology import Epoch
from elaswave_fx.scheduling import collection_paused


def launch(spec: JobSpec) -> int:
    """Run the job to its end and return the exit code; see above. Raises `ConfigError`.

    In every case no process is left, and the run directory has a summary. An earlier run's files are removed only after
    the build, so that no user error costs them.
    """
    check_host(spec.host)
    others = range(spec.port, spec.port + spec.ranks) if spec.port else range(0)
    with (
        lasting_console(),  # before any file is opened, which might get the descriptor of a closed console
        claimed_ports(spec.host, spec.port, spec.ranks),
        control_listener(spec.host, spec.control_port, others) as listener,
    ):
        remove_left_behind()
        for run_dir in settle_dead_jobs():
            _say_all(put_clocks_back(run_dir, spec.power))
        refuse_foreign(spec.run_dir)
        RunDirectory.prepare(spec.run_dir)
        with RunDirectory.claimed(spec.run_dir):
            _say_all(put_clocks_back(spec.run_dir, spec.power))
            return _launch(spec, listener)


def _say_all(lines: list[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _launch(spec: JobSpec, listener: socket.socket) -> int:
    was_frozen = gc.get_freeze_count() > 0
    # `stop` lasts until the summary: repeated signals must not end a run that is being saved.
    with Stop() as stop, RunLog(spec.log_level) as log:
        try:
            return _run(spec, listener, log, stop)
        finally:
            if not was_frozen:
                gc.unfreeze()  # a sweep runs several jobs in this process


def _run(spec: JobSpec, listener: socket.socket, log: RunLog, stop: Stop) -> int:
    began_s = time.monotonic()
    with StepProgress(spec.steps, log, done=spec.first_step) as progress:
        _preload(spec.preload)
        built = _build(spec, progress, stop)
        if not isinstance(built, BuildResult) and RunDirectory.holds_run(spec.run_dir):
            return _not_begun(spec, built, stop)
        recorder = Recorder.create(spec.run_dir, spec.first_step, spec.same_run, began_s)
        log.write_to(recorder.directory.log("console"))
        failure = built if isinstance(built, Failure) else None
        if isinstance(built, BuildResult):
            for line in built.lines:
                log.info(line)
            for line in built.details:
                log.debug(line)
            try:
                recorder.directory.run({"first_step": spec.first_step, **built.run})
                recorder.planned(built.plan, built.units, built.samples, spec.ranks)
                supervisor = _start(spec, built, listener, recorder, progress, log, stop)
            except OSError as error:
                failure = Failure("launcher", f"the job cannot be started ({error}){_cure(error)}")
            else:
                failure = supervisor.run()
    if failure is not None:
        return _failed(recorder, log, failure)
    return _ended(spec, recorder, log, stop)


def _cure(error: OSError) -> str:
    """The way out where the folder in memory is too small, as that of a container by default."""
    in_memory = error.errno == errno.ENOSPC and str(error.filename).startswith(f"{MEMORY}/")
    return f"; {MEMORY} needs a few MB, which a container gets by docker run --shm-size=1g" if in_memory else ""


def _preload(modules: tuple[str, ...]) -> None:
    """Import what every child needs, and make libraries use one thread before they start any."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    with collection_paused():
        for module in modules:
            importlib.import_module(module)
        if gc.get_freeze_count() == 0:
            gc.freeze()  # a collection of all that was imported takes 0.3 s
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _build(spec: JobSpec, progress: StepProgress, stop: Stop) -> BuildResult | Failure | None:
    """Run the builder in a child; None if the user stopped it."""

    def body(channel: Channel) -> None:
        channel.send("built", result=spec.builder().text())

    progress.phase("building")
    freeze_memory()
    child = fork_child("builder", body, RunDirectory(spec.run_dir).log("builder"), ())
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
            hanging = child.watchdog.overdue(time.monotonic())
            if hanging is not None:
                return Failure(child.name, hanging, classes=("DataError",))
        return _outcome_of_build(child, messages)
    finally:
        end_children([child])


def _outcome_of_build(child: Child, messages: list[Message]) -> BuildResult | Failure:
    status = child.reap()
    for message in messages:
        if message.kind == "built":
            return BuildResult.read(message.fields["result"])
        return from_message(child.name, message.fields, child.log)
    return from_exit(child.name, status, child.log)


def _start(
    spec: JobSpec,
    built: BuildResult,
    listener: socket.socket,
    recorder: Recorder,
    progress: StepProgress,
    log: RunLog,
    stop: Stop,
) -> Supervisor:
    """Fork the coordinator and all workers, or none if the system refuses one."""
    planning = _planning(spec)
    first = _first_epoch(spec, planning.read(built.plan).assignment)
    start = first.resume
    register = Register(Term(0), first, start, start, None, start, numbers=spec.ranks)
    conditions = Conditions(versions(), built.data_digest, dict(built.code))
    store = FileStore.create(spec.run_dir, register, built.plan, built.fingerprint)
    job = JobFile(
        folder=str(store.folder),
        host=spec.host,
        port=port_of(listener),
        token=spec.token,
        run_dir=str(spec.run_dir.absolute()),
        copies=spec.copies,
        allow_rollback=spec.allow_rollback,
        patience_s=spec.patience_s,
        conditions=conditions,
        launcher=os.getpid(),
        facts=JobFacts.of(spec, built, store.folder).text(),
        files=built.files,
    )
    job.write()
    service = CoordinatorSpec(
        address=job.address(),
        job_folder=job.job_folder(),
        planning=planning,
        conditions=conditions,
        allow_rollback=spec.allow_rollback,
        patience_s=spec.patience_s,
        facts=job.facts,
        files=job.files,
    )
    coordination = Coordination(service, listener, store, recorder.directory.log("coordinator"))
    liveness = LivenessTable(spec.ranks)
    workers: list[Child] = []
    try:
        freeze_memory()
        coordination.start(())
        for rank in range(spec.ranks):
            name = f"rank-{rank}"
            body = _worker_body(spec, built, job, first, rank, liveness, listener, recorder.began_s)
            others = (*workers, *coordination.children())
            workers.append(fork_child(name, body, recorder.directory.log(name), others))
    except OSError:
        end_children(workers)
        coordination.end()
        raise
    return Supervisor(spec, workers, coordination, liveness, recorder, progress, log, stop)


def _first_epoch(spec: JobSpec, assignment: Assignment) -> Activation:
    """Return the first epoch, in which every rank loads the seed or the checkpoint."""
    start = Stamp(Version(spec.first_step), Epoch(0))
    return Activation(Epoch(0), assignment, start, start, None, rollback=True)


def _worker_body(
    spec: JobSpec,
    built: BuildResult,
    job: JobFile,
    first: Activation,
    rank: int,
    liveness: LivenessTable,
    listener: socket.socket,
    began_s: float,
) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        liveness.hold(rank)
        listener.close()  # a coordinator after the launcher's end opens its own
        context = WorkerContext(
            rank=rank,
            host=spec.host,
            host_id=spec.hosts[rank],
            machine=spec.place.machine,
            run_dir=spec.run_dir,
            token=job.token,
            port=spec.port + rank if spec.port else 0,
            build=built,
            channel=channel,
            control=job.address(),
            job_folder=job.job_folder(),
            conditions=job.conditions,
            first=first,
            faults=tuple(fault for fault in spec.faults if fault.rank == rank),
            began_s=began_s,
        )
        share = spec.worker(context)
        if share is not None:
            context.report_end(share, spec.steps)

    return body


def _not_begun(spec: JobSpec, failure: Failure | None, stop: Stop) -> int:
    """The end of a run that was not built; the earlier run in its directory stays unchanged."""
    if failure is not None:
        return _say(failure)
    assert stop.number is not None
    print(f"stopped by {stop.number.name} before it began; {spec.run_dir} has the earlier run as it was", flush=True)
    return SIGNALLED + stop.number


def _failed(recorder: Recorder, log: RunLog, failure: Failure) -> int:
    log.keep(f"error: {failure.line}")
    _finish(recorder, log, "failed", failure.reason)
    return _say(failure)


def _finish(recorder: Recorder, log: RunLog, outcome: str, reason: str | None, closing: str = "") -> bool:
    """Write the summary and print `closing`; return whether the summary could be written."""
    trouble = ""
    try:
        recorder.finish(outcome, reason, head_of(recorder.directory.path / "ledger.jsonl"))
    except OSError as error:
        trouble = f"error: {recorder.directory.path}: the summary cannot be written ({error.strerror})"
    if closing:
        log.info(closing)
    if trouble and recorder.directory.path.is_dir():
        print(trouble, file=sys.stderr, flush=True)
    return not trouble


def _say(failure: Failure) -> int:
    """The end of a failed run: print the reason in one line, or raise a user error."""
    expected = failure.expected()
    if expected is not None:
        raise expected
    print(f"error: {failure.line}", file=sys.stderr, flush=True)
    return 1


def _planning(spec: JobSpec) -> Planning:
    return spec.planning or Planner(spec.copies)


def _ended(spec: JobSpec, recorder: Recorder, log: RunLog, stop: Stop) -> int:
    """The end of a run whose processes all ended well, or which the user stopped."""
    committed = f"{recorder.steps} of {spec.steps} steps"
    gave_up = recorder.gave_up
    wrong = _what_is_wrong(spec, recorder, early=stop.number is not None or gave_up is not None) or gave_up
    if wrong is not None:
        log.keep(f"error: {wrong}")
        _finish(recorder, log, "failed", wrong)
        print(f"error: {wrong}", file=sys.stderr, flush=True)
        return 1
    if recorder.steps >= spec.steps:
        return 0 if _finish(recorder, log, "completed", None, recorder.closing_line()) else 1
    assert stop.number is not None
    closing = f"stopped by {stop.number.name} after {committed}; the run directory is whole: {spec.run_dir}"
    _finish(recorder, log, "interrupted", f"{stop.number.name} after {committed}", closing)
    return SIGNALLED + stop.number


def _what_is_wrong(spec: JobSpec, recorder: Recorder, early: bool) -> str | None:
    """Return what the run lacks: steps, an update, each sample once in the ledger, or a requested fault.

    `early`: the user ended it, maybe before any worker reported.
    """
    if not spec.run_dir.is_dir():
        return f"{spec.run_dir}: was removed while the run went on"
    if recorder.steps < spec.steps and not early:
        return f"the workers ended after {recorder.steps} of {spec.steps} steps"
    for fault in spec.faults:
        if (fault.rank, fault.kind) not in recorder.faults and not early:
            return f"faults: the {fault} never fired"
    if recorder.learned_nothing is not None and not early:
        return recorder.learned_nothing
    if recorder.plane is None:
        return None
    lines = json_lines(spec.run_dir / "ledger.jsonl")
    newest = max((line["step"] for line in standing(lines)), default=-1)
    steps = newest + 1 if early else recorder.steps
    texts = (path.read_text(encoding="utf-8") for path in spec.run_dir.glob("plan-*.json"))
    try:
        skipped = skipped_by_plan(_planning(spec), texts)
    except PlanError as error:
        return f"{spec.run_dir}: {error}"
    return covers_once(lines, *recorder.plane, spec.first_step, steps, skipped) or restored_alike(lines)
