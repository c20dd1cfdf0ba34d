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

import torch

from elaswave_fx import _native
from elaswave_fx.config import Config
from elaswave_fx.data import Prefetcher, Source, load_batch, open_source, step_loader
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.tiling import Tile
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.runtime.checkpoints import Checkpoints, restore
from elaswave_fx.runtime.devices import make_device
from elaswave_fx.runtime.engine import cast_inputs, input_names, load_artifact, make_engine
from elaswave_fx.runtime.learning_rate import Schedule, make_schedule
from elaswave_fx.runtime.optimizer import GROUPS, Optimizer, make_optimizer
from elaswave_fx.runtime.state import InitialState, gather_parameters, params_digest, tensor_digest, write_model

_CONNECT_S = 60.0
_FLOOR_S = 60.0
_DEADLINE_OVER_STEP = 30.0
_READ_S = 3600.0  # for the slowest rank to read its share of a checkpoint; a lost one is noticed at once
_COLLECT = 7 << 56  # the kind of tag for handing state back, apart from those of a step


@dataclass(frozen=True)
class Worker:
    """What a worker holds while it trains."""

    config: Config
    context: WorkerContext
    artifact: Artifact
    plan: Plan
    tile: Tile
    engine: Any
    endpoint: Any
    group: Any  # every rank, for what is outside of steps
    initial: InitialState
    optimizer: Optimizer
    schedule: Schedule
    source: Source | None

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
    feed = _InputFeed(worker)
    started = time.perf_counter()
    for step in range(done, config.steps):
        if context.should_stop(step):
            break
        inputs = feed.take(step)
        lr = config.optimizer.lr * worker.schedule(step)
        hyper = [worker.optimizer.hyper_values(step, lr, group) for group in GROUPS]
        result = worker.engine.step(step, inputs, hyper, config.clip_norm, deadline.seconds)
        now = time.perf_counter()
        deadline.measured(now - started)
        context.report_step(_report(worker, step, lr, 1e3 * (now - started), result, device.memory_peak_bytes()))
        if not result["updated"] and context.rank == 0:
            context.report_event("skipped_update", worker.plan.epoch, step=step, grad_norm=result["grad_norm"])
        if config.eval.every and (step + 1) % config.eval.every == 0:
            _evaluate(worker, feed, step, deadline)
        done = step + 1
        checkpoints.after_step(done)
        started = time.perf_counter()
    feed.close()
    checkpoints.finish(done)
    share = _hand_back(worker)
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
    engine = make_engine(artifact, constants, initial, plan, context.rank, endpoint, optimizer, config.seed)
    needed = input_names(artifact, plan, context.rank)
    source = open_source(config) if needed else None
    schedule = make_schedule(config.schedule, config.steps)
    tile = plan.tile(context.rank)  # type: ignore[arg-type]
    group = _native.Group(endpoint, 1, list(plan.ranks))
    return Worker(config, context, artifact, plan, tile, engine, endpoint, group, initial, optimizer, schedule, source)


def _restore(worker: Worker) -> Checkpoints:
    """Go to the state of the checkpoint that the run starts from, if any; what makes the coming ones."""
    context, artifact, plan = worker.context, worker.artifact, worker.plan
    path = context.build.data.get("resume_from")
    if path is not None:
        restore(Path(path), artifact, plan, context.rank, worker.optimizer, worker.engine, _READ_S)
    checkpoints = Checkpoints(
        worker.config, context, artifact, plan, worker.optimizer, worker.engine, worker.endpoint, worker.group
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


class _InputFeed:
    """The inputs of this rank's tile: those of training steps are loaded ahead; nothing for a rank that reads none."""

    def __init__(self, worker: Worker) -> None:
        self._names = input_names(worker.artifact, worker.plan, worker.context.rank)
        self._config = worker.config
        self._samples = worker.tile.samples
        self._source = worker.source
        self._ahead = None
        if self._source is not None:
            lo, hi = self._samples.lo, self._samples.hi
            loader = step_loader(self._source.dataset, self._source.train, self._config.global_batch, lo, hi)
            self._ahead = Prefetcher(loader, worker.first_step, self._config.steps)

    def take(self, step: int) -> dict[str, torch.Tensor]:
        """What training step `step` reads."""
        return self._select(self._ahead.take(step)) if self._ahead is not None else {}

    def held_out(self, number: int) -> dict[str, torch.Tensor]:
        """What the held-out batch `number` gives this rank."""
        if self._source is None:
            return {}
        first = number * self._config.global_batch + self._samples.lo
        return self._select(load_batch(self._source.dataset, self._source.held_out, first, len(self._samples)))

    def _select(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return cast_inputs({name: batch[name] for name in self._names}, self._config.precision)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()


def _report(worker: Worker, step: int, lr: float, step_ms: float, result: Any, memory: int) -> StepReport:
    count = result["count"]
    units = worker.tile.units
    return StepReport(
        step=step,
        loss=result["loss"] / count if count else float("nan"),
        tokens=int(count),
        step_ms=step_ms,
        lr=lr,
        grad_norm=result["grad_norm"],
        memory_peak_mb=memory / 2**20,
        epoch=worker.plan.epoch,
        consumed=tuple((units.lo, units.hi, span.lo, span.hi) for span in worker.tile.micro_batches),
    )


def _evaluate(worker: Worker, feed: _InputFeed, step: int, deadline: Deadline) -> None:
    """Mean loss over the held-out batches; every rank computes its tile of each."""
    loss = count = 0.0
    for number in range(worker.context.build.data["eval_batches"]):
        # Draws are keyed by the batch, not by the step: evaluations at different steps see the same draws.
        result = worker.engine.evaluate(number, feed.held_out(number), deadline.seconds)
        loss, count = loss + result["loss"], count + result["count"]
    if worker.context.rank == 0:
        worker.context.report_eval(step + 1, loss / count if count else float("nan"), int(count))


def _hand_back(worker: Worker) -> Mapping[str, Any]:
    """Rank 0 collects every master slice and writes the model; the others send theirs."""
    worker.engine.sync(_FLOOR_S)
    tensors = gather_parameters(
        worker.artifact,
        worker.initial,
        lambda index: _collect_bucket(worker, index),
        lambda name: _collect_buffer(worker, name),
    )
    if worker.context.rank != 0:
        worker.group.barrier(_FLOOR_S)  # nobody closes its links before everybody has what it waits for
        return {}
    write_model(worker.context.run_dir / "model.safetensors", tensors)
    digests = {info.name: tensor_digest(tensors[info.name]) for info in worker.artifact.params}
    worker.group.barrier(_FLOOR_S)
    return {"params_digest": params_digest(worker.artifact, digests)}


def _collect_bucket(worker: Worker, index: int) -> torch.Tensor | None:
    bucket = worker.artifact.buckets[index]
    rank, endpoint = worker.context.rank, worker.endpoint
    flat = torch.empty(bucket.numel) if rank == 0 else None
    pending = []
    for owner, span in worker.plan.layouts[bucket.name]:
        if owner == rank:
            master = worker.engine.bucket_master(bucket.name)
            if flat is not None:
                flat[span.lo : span.hi] = master
            else:
                pending.append(endpoint.send(0, _COLLECT + index, master))
        elif flat is not None:
            pending.append(endpoint.recv(owner, _COLLECT + index, flat[span.lo : span.hi]))
    endpoint.wait(pending, _FLOOR_S)
    return flat


def _collect_buffer(worker: Worker, name: str) -> torch.Tensor | None:
    """A mutable buffer from the first rank that holds its unit."""
    number, fold = next((i, f) for i, f in enumerate(worker.artifact.folds) if f.buffer == name)
    owner = min(tile.rank for tile in worker.plan.tiles if fold.unit in tile.units)
    rank, endpoint = worker.context.rank, worker.endpoint
    if owner == rank == 0:
        return worker.engine.table(name).clone()
    tag = _COLLECT + (1 << 32) + number
    if rank == owner:
        endpoint.wait([endpoint.send(0, tag, worker.engine.table(name).contiguous())], _FLOOR_S)
    if rank != 0:
        return None
    tensor = torch.empty_like(worker.initial.tensor(name))
    endpoint.wait([endpoint.recv(owner, tag, tensor)], _FLOOR_S)
    return tensor
