"""One worker's life: open its links, declare its engine, take steps, report them, hand back what it holds.

launcher -> WorkerContext (rank, plan, artifact, token) -> run_worker -> steps over `context`, summary at the end
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx import _native
from elaswave_fx.config import Config
from elaswave_fx.data import open_source
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.plan.plan import Plan
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.runtime.checkpoints import Checkpoints, restore
from elaswave_fx.runtime.devices import make_device
from elaswave_fx.runtime.engine import RankEngine, load_artifact
from elaswave_fx.runtime.feed import InputFeed
from elaswave_fx.runtime.hand_back import hand_back
from elaswave_fx.runtime.learning_rate import Schedule, make_schedule
from elaswave_fx.runtime.optimizer import GROUPS, Optimizer, make_optimizer
from elaswave_fx.runtime.state import InitialState

_CONNECT_S = 60.0
_FLOOR_S = 60.0
_DEADLINE_OVER_STEP = 30.0
_READ_S = 3600.0  # for the slowest rank to read its share of a checkpoint; a lost one is noticed at once


@dataclass(frozen=True)
class Worker:
    """What a worker holds while it trains."""

    config: Config
    context: WorkerContext
    artifact: Artifact
    plan: Plan
    engine: RankEngine
    endpoint: Any
    group: Any  # every rank, for what is outside of steps
    initial: InitialState
    optimizer: Optimizer
    schedule: Schedule
    feed: InputFeed

    @property
    def first_step(self) -> int:
        """The first step to take; above 0 when a checkpoint is gone on from."""
        return self.context.build.data.get("first_step", 0)


def run_worker(config: Config, context: WorkerContext) -> Mapping[str, Any]:
    """Train to the end or until told to stop; returns this rank's share of the summary.

    Raises PeerLost or DeadlineExceeded when the job cannot go on, ExecError when the runtime refuses the program.
    """
    device = make_device(config.device)
    device.set_up(threads=1)
    worker = set_up(config, context)
    worker.group.barrier(_CONNECT_S)
    if context.rank == 0:
        shutil.rmtree(Path(context.build.data["state"]).parent)  # everybody has it mapped by now
    checkpoints = _restore(worker)
    deadline = Deadline()
    done = worker.first_step
    started = time.perf_counter()
    for step in range(done, config.steps):
        if context.should_stop(step):
            break
        fed = worker.feed.take(step)
        lr = config.optimizer.lr * worker.schedule(step)
        hyper = [worker.optimizer.hyper_values(step, lr, group) for group in GROUPS]
        result = worker.engine.native.step(
            step, fed.inputs, hyper, config.clip_norm, deadline.seconds, content=fed.content
        )
        now = time.perf_counter()
        deadline.measured(now - started)
        context.report_step(_report(worker, step, lr, 1e3 * (now - started), result, device.memory_peak_bytes()))
        if not result["updated"] and context.rank == 0:
            context.report_event("skipped_update", worker.plan.epoch, step=step, grad_norm=result["grad_norm"])
        if config.eval.every and (step + 1) % config.eval.every == 0:
            _evaluate(worker, step, deadline)
        done = step + 1
        checkpoints.after_step(done)
        started = time.perf_counter()
    worker.feed.close()
    checkpoints.finish(done)
    share = hand_back(
        worker.artifact, worker.initial, worker.plan, context.rank, worker.engine.native, worker.endpoint,
        context.run_dir, _FLOOR_S,
    )  # fmt: skip
    worker.group.barrier(_FLOOR_S)  # nobody closes its links before everybody has what it waits for
    worker.endpoint.close()  # an orderly goodbye; a worker that fails leaves without one, and its peers notice
    return share


def set_up(config: Config, context: WorkerContext) -> Worker:
    """Links to every rank and a declared engine."""
    endpoint = _native.Endpoint(
        rank=context.rank,
        token=context.token,
        listen_host=context.host,
        port=context.port,
        host_id=context.host_id,
    )
    peers = context.peers(endpoint.port)
    endpoint.connect({r: (p.host, p.port, p.host_id) for r, p in peers.items() if r != context.rank}, _CONNECT_S)
    plan = Plan.from_json(context.build.plan)
    artifact, constants = load_artifact(Path(context.build.data["artifact"]))
    initial = InitialState(Path(context.build.data["state"]))
    optimizer = make_optimizer(config.optimizer)
    batch = plan.workload.global_batch
    engine = RankEngine(artifact, constants, initial, context.rank, endpoint, optimizer, config.seed, batch)
    engine.install(plan)
    schedule = make_schedule(config.schedule, config.steps)
    first_step = context.build.data.get("first_step", 0)
    feed = InputFeed(config, artifact, plan, context.rank, open_source(config), first_step)
    group = _native.Group(endpoint, 1, list(plan.ranks))
    return Worker(config, context, artifact, plan, engine, endpoint, group, initial, optimizer, schedule, feed)


def _restore(worker: Worker) -> Checkpoints:
    """Go to the state of the checkpoint that the run starts from, if any; what makes the coming ones."""
    context, artifact, plan = worker.context, worker.artifact, worker.plan
    path, native = context.build.data.get("resume_from"), worker.engine.native
    if path is not None:
        restore(Path(path), artifact, plan, context.rank, worker.optimizer, native)
        native.refresh_work([list(plan.groups[bucket.name]) for bucket in artifact.buckets], _READ_S)
    checkpoints = Checkpoints(
        worker.config, context, artifact, plan, worker.optimizer, native, worker.endpoint, worker.group
    )
    worker.group.barrier(_READ_S)
    return checkpoints


class Deadline:
    """How long a step may take before its peers are given up: many times what steps took lately, with a floor."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=20)

    def measured(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def seconds(self) -> float:
        typical = statistics.median(self._recent) if self._recent else 0.0
        return max(_FLOOR_S, _DEADLINE_OVER_STEP * typical)


def _report(worker: Worker, step: int, lr: float, step_ms: float, result: Any, memory: int) -> StepReport:
    count = result["count"]
    tile = worker.plan.tile(worker.context.rank)  # type: ignore[arg-type]
    return StepReport(
        step=step,
        loss=result["loss"] / count if count else float("nan"),
        tokens=int(count),
        step_ms=step_ms,
        lr=lr,
        grad_norm=result["grad_norm"],
        memory_peak_mb=memory / 2**20,
        epoch=worker.plan.epoch,
        consumed=tuple((tile.units.lo, tile.units.hi, span.lo, span.hi) for span in tile.micro_batches),
    )


def _evaluate(worker: Worker, step: int, deadline: Deadline) -> None:
    """Mean loss over the held-out batches; every rank computes its tile of each."""
    loss = count = 0.0
    for number in range(worker.context.build.data["eval_batches"]):
        # Draws are keyed by the batch, not by the step: evaluations at different steps see the same draws.
        result = worker.engine.native.evaluate(number, worker.feed.held_out(number), deadline.seconds)
        loss, count = loss + result["loss"], count + result["count"]
    if worker.context.rank == 0:
        worker.context.report_eval(step + 1, loss / count if count else float("nan"), int(count))
