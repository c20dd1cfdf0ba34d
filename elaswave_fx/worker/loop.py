"""A worker's training: take steps, report them, recover from failures, export the model.

launcher -> WorkerContext (rank, plan, artifact, token) -> run_worker -> steps over `context`, summary at the end
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - the native module finds its libraries loaded

from elaswave_fx import _native, errors
from elaswave_fx.checkpoint.disk_work import DISK_S
from elaswave_fx.config.faults import Fault
from elaswave_fx.config.keys import Config
from elaswave_fx.control.protocol import do, rank_state
from elaswave_fx.control.protocol.rank_state import Decision, Excluded, Go
from elaswave_fx.control.protocol.training_loop import StepFailed, perform, training
from elaswave_fx.control.protocol.types import Certificate
from elaswave_fx.control.store.ledger import Payload
from elaswave_fx.devices import Device, make_device
from elaswave_fx.devices.fingerprint import difference
from elaswave_fx.errors import CommError, ConfigError, ExecError, InputsDiffer, JobOver, ReplicaDiffers, UpdateFailed
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.rank_events import (
    Drained,
    FaultStrikes,
    GaveUp,
    ModelElsewhere,
    ReplicaDiffered,
    ReplicasInSync,
    Resumed,
    UpdateSkipped,
)
from elaswave_fx.observe.run_event import fields_of
from elaswave_fx.optim.optimizer import step_hypers
from elaswave_fx.plan.predict.memory import memory_of
from elaswave_fx.plan.work.box import BoxId
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.checkpoints import restore
from elaswave_fx.worker.cross_check import find_difference, message
from elaswave_fx.worker.export_model import export_model
from elaswave_fx.worker.predictions import Predictions
from elaswave_fx.worker.recovery import Recovery, suspect_of
from elaswave_fx.worker.worker import BARRIER_S, Worker, set_up

_FLOOR_S = 60.0
_DEADLINE_OVER_STEP = 30.0
_STORE_S = 1.0
_LOOK_S = 0.1  # how soon a rank that waits for data notices that its epoch is over
_FAILURES_MAX = 64
"""Maximum number of failures without a commit; more are no loss of ranks but a persistent error."""

_FOREVER_S = 1e9
"""Duration of a cut without an end."""

_PHASES = ("FORWARD", "BACKWARD", "REDUCE", "UPDATE", "GATHER", "SNAPSHOT")
"""Instructions of the engine at which a fault may strike: the names of phases in capitals."""


def run_worker(config: Config, context: WorkerContext) -> Mapping[str, Any] | None:
    """Train to the end or to a stop; return this rank's part of the summary, None if it was drained.

    Raises Excluded if this rank was evicted, UpdateFailed if only the others can continue, JobOver if no rank
    continues, ExecError if the runtime refuses the program.
    """
    device = make_device(config.device)
    device.set_up(threads=1, deterministic=config.exact)
    if config.exact:
        refuse_other_bits(device, context)
    worker = set_up(config, context)
    try:
        return Training(worker, device).run()
    finally:
        if worker.clock is not None:
            worker.clock.restore()


def refuse_other_bits(device: Device, context: WorkerContext) -> None:
    """Refuse to compute on a machine where the same program has other bits."""
    other = difference(device.fingerprint(), context.build.data.fingerprint)
    if other is not None:
        raise ConfigError(f"exact=true: rank {context.rank} would compute other bits than the builder: {other}")


class Training:
    """One rank's execution of `training_loop`, including recovery from failures of other ranks, see recovery.py."""

    def __init__(self, worker: Worker, device: Device, on_step: Callable[[StepReport], None] | None = None) -> None:
        """`device`: set up. `on_step`, for measurements, is called for each committed step after its report."""
        self._worker, self._device, self._on_step = worker, device, on_step
        self._deadline = Deadline(worker.config.data.deadline_s)
        faults = worker.context.faults
        self._fault = next((fault for fault in faults if fault.strikes_in_a_phase), None)  # at most one per rank
        self._slow = [fault for fault in faults if fault.kind == "slow"]
        self._told_slow: set[Fault] = set()
        self._stopped = False  # all ranks have agreed to stop
        self._evaluated = -1  # version after which all ranks of this epoch have checked what is due
        self._saved: int = worker.at.committed.version
        self._failures = 0  # since the last commit
        self._skipped = 0  # updates in a row
        self._predictions = Predictions()
        self._share: Mapping[str, Any] | None = None  # of the summary; set once the model is exported
        self._resumes = False  # the next commit is the first one of an epoch
        self._lap = time.perf_counter()
        recovery = self._recovery = Recovery(worker)
        self._does: Mapping[type, Callable[[Any], Any]] = {
            do.Begin: self._begin,
            do.Barrier: self._barrier,
            do.MustLeave: lambda _: worker.agent.stop_requested,
            do.FlushSends: lambda _: worker.engine.native.sync(_FLOOR_S),
            do.MayStep: lambda _: worker.agent.may_step or worker.agent.await_store(_STORE_S),
            do.BetweenSteps: self._between_steps,
            do.TakeStep: self._take_step,
            do.ReportCommit: self._report_commit,
            do.ReadSyncState: self._read_sync_state,
            do.ReportSyncState: self._report_sync_state,
            do.Finish: self._finish,
            do.ReportMismatch: self._report_mismatch,
            do.AbortStep: recovery.abort_step,
            do.Report: self._report_and_wait,
            do.OpenLinks: recovery.open_links,
            do.VerifyReplicas: recovery.verify_replicas,
            do.FinishStep: self._finish_step,
            do.DropStep: lambda _: worker.engine.native.drop(),
            do.AdvanceLinks: recovery.advance_links,
            do.InstallPlan: recovery.install_plan,
            do.Restore: recovery.restore,
            do.GatherParameters: recovery.gather_parameters,
            do.SyncReplicas: recovery.sync_replicas,
            do.EpochBegun: self._epoch_begun,
        }

    def run(self, entering: Go | None = None) -> Mapping[str, Any] | None:
        """Train to the end of the run; return None if this rank is drained before.

        `entering`: the first epoch of a joiner.
        """
        try:
            ended = perform(training(self._worker.at, entering), self.do)
        except InputsDiffer as error:
            raise self._data_differs() from error
        except ExecError as error:
            if self._has_lost_state():
                raise UpdateFailed(str(error)) from error
            raise
        if isinstance(ended, rank_state.Left):
            return self._has_left(ended.reason)
        if isinstance(ended, Excluded):
            raise errors.Excluded(ended.reason)
        if ended is not None and self._share is None:
            raise JobOver(ended.reason)
        # After the end or the last barrier all ranks have exported their state, this one too.
        return self._close()

    def do(self, said: Any) -> Any:
        """Carry out a request of the training loop and return its result. Raises StepFailed."""
        try:
            return self._does[type(said)](said)
        except (CommError, ReplicaDiffers) as error:
            self._failures += 1
            if self._failures > _FAILURES_MAX:
                raise
            raise StepFailed(suspect_of(error), str(error), isinstance(error, ReplicaDiffers)) from error

    def _data_differs(self) -> JobOver:
        """The end of the job because ranks read different samples. All ranks conclude it from the same votes."""
        worker = self._worker
        step = worker.at.committed.version
        votes = worker.engine.native.holdings().votes
        payloads = {Rank(rank): Payload.unpack(vote) for rank, vote in votes.items()}
        found = find_difference(payloads, step * worker.config.global_batch)
        assert found is not None, "the engine has found it in the same votes"
        reason = message(worker.config, worker.source, step, found, worker.links.host)
        if worker.is_first:
            worker.context.report_event(GaveUp(step=step, reason=reason), worker.plan.epoch)
        with contextlib.suppress(CommError):  # No rank that still waits for votes takes this one for lost.
            worker.group.barrier(BARRIER_S)
        worker.agent.close()  # The coordinator starts no epoch: this rank is done, not lost.
        return JobOver(reason)

    def _has_lost_state(self) -> bool:
        """Whether the engine has dropped the state of a box that it had, as it does when an update fails."""
        return not self._worker.at.sync.syncing.issuperset(self._worker.engine.native.holdings().syncing)

    # --- The beginning, and other epochs

    def _begin(self, _: do.Begin) -> None:
        worker, context = self._worker, self._worker.context
        worker.group.barrier(BARRIER_S)
        path = context.build.data.resume_from
        with worker.disk_work("reads the checkpoint to begin with"):
            if path is not None:
                native, plan = worker.engine.native, worker.plan
                restore(Path(path), worker.artifact, plan, worker.rank, worker.optimizer, native)
                native.refresh([list(plan.groups[bucket.name]) for bucket in worker.artifact.buckets], DISK_S)
            self._keep_memory()

    def _barrier(self, _: do.Barrier) -> None:
        with self._worker.disk_work("waits for ranks that read the checkpoint to begin with"):
            self._worker.group.barrier(DISK_S)  # for the slowest rank

    def _report_mismatch(self, what: do.ReportMismatch) -> None:
        self._worker.context.report_event(ReplicaDiffered(cause=what.why), self._worker.plan.epoch)

    def _report_and_wait(self, what: do.Report) -> Decision:
        decision = self._recovery.report(what)
        if isinstance(decision, Go):
            self._share = None
            self._worker.agent.export(begins=False)
        return decision

    def _finish_step(self, what: do.FinishStep) -> None:
        certificate = what.certificate
        result = self._worker.engine.native.finish({vote.rank: vote.payload for vote in certificate.votes})
        self._report(result, certificate)

    def _epoch_begun(self, what: do.EpochBegun) -> None:
        if what.went_back:
            self._skipped = 0
        # All ranks check again whether an evaluation or a checkpoint is due: some may have begun it, others are new. A
        # checkpoint that they rolled back to exists.
        self._evaluated = -1
        self._saved = what.activation.resume.version if what.activation.rollback else -1
        self._resumes = True
        self._lap = time.perf_counter()

    # --- Between steps

    def _between_steps(self, what: do.BetweenSteps) -> bool:
        worker, config, done = self._worker, self._worker.config, what.done
        worker.engine.prepare()
        if config.eval.every and done and done % config.eval.every == 0 and self._evaluated != done:
            self._evaluate(done)
            self._evaluated = done
        if done and done != self._saved:
            self._saved = done
            assert worker.checkpoints is not None
            with worker.disk_work("waits for the checkpoint before"):
                worker.checkpoints.after_step(done)
        return done < config.steps and not self._stopped

    def _evaluate(self, done: int) -> None:
        """Mean loss over the held-out batches; every rank computes its tile of each."""
        worker = self._worker
        assert worker.feed is not None
        loss = count = 0.0
        for number in range(worker.context.build.data.eval_batches):
            # Draws are keyed by the batch, not by the step: all evaluations see the same draws.
            result = worker.engine.native.evaluate(number, worker.feed.held_out(number), self._deadline.seconds)
            loss, count = loss + result.loss, count + result.count
        if worker.is_first:
            worker.context.report_eval(done, loss / count if count else float("nan"), int(count))

    # --- A step

    def _take_step(self, what: do.TakeStep) -> Certificate:
        worker, config, step = self._worker, self._worker.config, what.step
        assert worker.feed is not None
        while not worker.feed.await_batch(step, _LOOK_S):
            if worker.agent.stop_requested:
                worker.engine.native.sync(_FLOOR_S)  # as the loop does when the epoch ends
                worker.leave_if_over()
        fed = worker.feed.next_batch(step)
        options = _native.StepOptions(
            self._deadline.seconds,
            config.clip_norm,
            stop_wanted=self._wants_to_stop(),
            content=fed.content,
            cross_check=fed.cross_check,
            fault=self._native_fault(step),
            slowdown=self._slowdown(step),
        )
        self._recovery.result = worker.engine.native.step(step, fed.inputs, self._hyper(step), options)
        if self._fault is not None and self._fault.step <= step:
            self._fault = None  # The step has no such phase here; the launcher reports the fault as missing.
        return self._recovery.certificate()

    def _read_sync_state(self, _: do.ReadSyncState) -> tuple[frozenset[BoxId], frozenset[BoxId]]:
        held = self._worker.engine.native.holdings()
        return frozenset(held.syncing), frozenset(held.lagging)

    def _report_sync_state(self, what: do.ReportSyncState) -> None:
        worker = self._worker
        worker.agent.report_sync(what.sync)
        if not what.sync.syncing:
            held = worker.engine.native.holdings()
            worker.context.report_event(ReplicasInSync(bytes=held.sync_peak), worker.plan.epoch)

    def _wants_to_stop(self) -> bool:
        worker = self._worker
        gives_up = self._skipped >= worker.config.optimizer.max_skipped or worker.agent.must_stay is not None
        return gives_up or worker.context.stop_wanted

    def _hyper(self, step: int) -> list[list[float]]:
        worker = self._worker
        lr = worker.config.optimizer.lr * worker.schedule(step)
        return step_hypers(worker.optimizer, step, lr)

    def _native_fault(self, step: int) -> _native.Fault | None:
        """Return the fault for the engine to raise, and the words that it sends just before.

        It also strikes after its own step, which a recovery may have finished without this rank.
        """
        fault = self._fault
        if fault is None or fault.step > step:
            return None
        pipe, words = self._worker.context.fault_words(replace(fault, step=step), self._worker.plan.epoch)
        at = _phase_of(fault)
        if fault.kind == "cut":
            return _native.Fault(
                at, cut_s=_FOREVER_S if fault.seconds is None else fault.seconds, pipe=pipe, words=words
            )
        return _native.Fault(at, fault.signal, pipe=pipe, words=words)

    def _slowdown(self, step: int) -> float:
        """The factor on the times of this rank's units, from `faults`; its start is reported."""
        slow = [fault for fault in self._slow if fault.slows(step)]
        for fault in set(slow) - self._told_slow:
            self._told_slow.add(fault)
            strikes = FaultStrikes(step=step, fault=fault.kind, phase=fault.phase, speed=fault.speed)
            self._worker.context.report_event(strikes, self._worker.plan.epoch)
        return max((1 / fault.speed for fault in slow), default=1.0)

    def _report_commit(self, what: do.ReportCommit) -> None:
        self._worker.agent.committed(what.certificate)
        self._report(self._recovery.result, what.certificate)

    def _report(self, result: _native.StepResult, certificate: Certificate) -> None:
        """Report a committed step to the launcher."""
        worker, context = self._worker, self._worker.context
        self._stopped = self._stopped or result.stop
        self._failures = 0
        self._skipped = 0 if result.updated else self._skipped + 1
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        self._deadline.measured(seconds)
        self._predictions.step(worker.plan, result, seconds)
        step, count = result.step, result.count
        votes = certificate.votes
        report = StepReport(
            step=step,
            loss=result.loss / count if count else float("nan"),
            tokens=int(count),
            step_ms=1e3 * seconds,
            lr=worker.config.optimizer.lr * worker.schedule(step),
            grad_norm=result.grad_norm,
            memory_peak_mb=result.memory_bytes / 2**20,
            epoch=worker.plan.epoch,
            consumed=tuple(span.edges for vote in votes for span in vote.consumed),
            world_size=len(votes),
            alive_at_s=time.monotonic() - seconds,
            energy_j=worker.plan.energy_j(seconds),
            unchanged=_why_unchanged(worker.config, result),
        )
        context.report_step(report)
        if self._on_step is not None:
            self._on_step(report)
        if self._resumes:
            if worker.is_first:
                context.report_event(Resumed(step=step), worker.plan.epoch)
            self._resumes = False
            self._keep_memory()
        if not worker.is_first:
            return
        if not result.updated:
            context.report_event(UpdateSkipped(step=step, grad_norm=result.grad_norm), worker.plan.epoch)
        if self._skipped == worker.config.optimizer.max_skipped:
            reason = _why_nothing_is_learned(worker.config, result)
            context.report_event(GaveUp(step=step, reason=reason), worker.plan.epoch)

    def _keep_memory(self) -> None:
        """Keep the memory that the tile needs and free the rest, such as a larger tile's or that of a recovery. Freeing
        takes time, so it follows the first step of an epoch."""
        self._device.keep(memory_of(self._worker.plan, self._worker.rank).total)

    # --- The end

    def _finish(self, _: do.Finish) -> None:
        worker = self._worker
        assert worker.checkpoints is not None and worker.feed is not None
        worker.agent.export()
        done = worker.at.committed.version
        if worker.agent.must_stay is not None and done < worker.config.steps:
            why = f"rank {worker.rank} was asked to leave, and cannot: {worker.agent.must_stay}"
            worker.context.report_event(GaveUp(step=done - 1, reason=why), worker.plan.epoch)
        with worker.disk_work("writes the last checkpoint"):
            failed = worker.checkpoints.finish(done)
        if failed is not None:
            worker.context.report_event(GaveUp(step=done, reason=failed), worker.plan.epoch)
        with worker.disk_work("writes the model"):
            self._share = self._export()
            worker.group.barrier(DISK_S)  # no rank closes its links before all have received their data

    def _export(self) -> Mapping[str, Any]:
        """Export the model together with the other ranks; return and report this rank's part of the summary."""
        worker = self._worker
        share = export_model(
            worker.artifact, worker.initial, worker.plan, worker.rank, worker.engine.native, worker.endpoint,
            worker.context.run_dir, worker.context.has_run_dir, worker.config.lab.copy_mode, DISK_S,
        )  # fmt: skip
        if worker.is_first and Path(share["model"]).parent != worker.context.run_dir:
            run_dir, host = str(worker.context.run_dir), worker.context.host
            worker.context.report_event(ModelElsewhere(path=share["model"], run_dir=run_dir, host=host))
        predicted = self._predictions.report(worker.plan, worker.rank, worker.group)
        if predicted is not None and worker.is_first:
            worker.context.report_event(predicted, worker.plan.epoch)
            told = {name: value for name, value in fields_of(predicted).items() if name != "event"}
            share = {**share, "predicted": {"epoch": int(worker.plan.epoch), **told}}
        worker.context.report_share(share)
        return share

    def _has_left(self, cause: str) -> None:
        """End after a drain: the others continue without this rank."""
        worker = self._worker
        last = worker.at.committed.version - 1
        worker.context.report_event(Drained(step=last, cause=cause, asked=True), worker.plan.epoch)
        if worker.feed is not None:
            worker.feed.close()
        worker.agent.close(finished=False)
        worker.next_epoch.close()  # after the agent, which may still receive plans
        worker.endpoint.close()

    def _close(self) -> Mapping[str, Any]:
        worker = self._worker
        assert worker.feed is not None and self._share is not None
        worker.feed.close()
        worker.agent.close()
        worker.next_epoch.close()
        worker.endpoint.close()  # an orderly close; a failed worker omits it, which peers detect
        return self._share


def _why_unchanged(config: Config, result: _native.StepResult) -> str | None:
    """Why a step changed no parameter, or only by weight decay; None otherwise. Emulated ranks have no gradients."""
    if not result.updated:
        return "the gradient is not finite" if result.count else "no target counts: the model returned a count of 0"
    if result.grad_norm == 0.0 and config.device != "emulated":
        return "the gradient is zero: the loss does not depend on any parameter"
    return None


def _why_nothing_is_learned(config: Config, result: _native.StepResult) -> str:
    most, why = config.optimizer.max_skipped, _why_unchanged(config, result)
    return f"step {result.step}: {most} updates in a row were skipped (optimizer.max_skipped={most}), because {why}"


def _phase_of(fault: Fault) -> str:
    """The instruction at which a fault strikes; for phase `any`, the step's number selects it."""
    if fault.phase == "any":
        return _PHASES[(fault.step + fault.rank) % len(_PHASES)]
    return fault.phase.upper()


class Deadline:
    """A step's timeout for peers: a multiple of recent step times, with a floor, plus time to read a sample."""

    def __init__(self, reading_s: float) -> None:
        self._reading_s = reading_s
        self._recent: deque[float] = deque(maxlen=20)

    def measured(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def seconds(self) -> float:
        typical = statistics.median(self._recent) if self._recent else 0.0
        return self._reading_s + max(_FLOOR_S, _DEADLINE_OVER_STEP * typical)
