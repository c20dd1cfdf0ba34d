"""Our training steps for a benchmark: real workers, agents, coordinator and store, without the launcher's console.

In: a workload and a `Variant`. Out: seconds of each step and the bytes that the ranks sent in it.

    with Program(workload) as program:          # built once
        run = program.run(Variant(copies=1), steps=8, warm_up=3)   ->  Run(seconds=(…), bytes_per_step=…)

A step is what a worker does for one: take the batch, run it, keep the proof of the commit; with `guarded`, hand that
to the agent, which beats, while the coordinator writes the ledger to disk.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.bench.processes import TEST_TIMEOUT_S, Processes
from elaswave_fx.bench.workload import Workload
from elaswave_fx.build.builder import build_job
from elaswave_fx.config.types import Config
from elaswave_fx.control.coordinator.plan_cache import Planner
from elaswave_fx.control.coordinator.service import CoordinatorSpec, plan_path, run_coordinator
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import SEED, Activation, Stamp, Term, Version
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.wire import ControlAddress
from elaswave_fx.devices import make_device
from elaswave_fx.launch.channel import Channel
from elaswave_fx.launch.job import BuildResult, WorkerContext
from elaswave_fx.optim.optimizer import GROUPS
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.topology import Epoch
from elaswave_fx.worker.worker import Worker, certificate_of, set_up


@dataclass(frozen=True)
class Variant:
    """`copies` of each box in other ranks' memory; `guarded`: with agents, heartbeats, coordinator and ledger."""

    copies: int
    record: str = "fp32"
    mode: str = "log"
    guarded: bool = True


@dataclass(frozen=True)
class Resident:
    """The resident memory of a rank: right after its fork, and at its peak."""

    forked_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Run:
    """Of one job: seconds of its steps as the first rank saw them; bytes sent, bytes sent for copies and CPU seconds of
    all ranks in a step.

    CPU seconds count all threads of the ranks. They hardly depend on what else the machine does. `losses`: of all
    steps, those that do not count too. `resident`: by rank.
    """

    seconds: tuple[float, ...]
    bytes_per_step: float
    copied_per_step: float
    cpu_s_per_step: float
    losses: tuple[float, ...] = ()
    resident: tuple[Resident, ...] = ()


class Program:
    """A workload captured and lowered once; its jobs run one after the other. Raises BenchFailed."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._built: dict[int, BuildResult] = {}
        self._keep = Processes()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._keep.__exit__(*error)

    def elements(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self._workload.model().parameters())

    def plan(self, variant: Variant) -> Plan:
        """Of the jobs of that variant."""
        config = self._workload.config(f"copies.count={variant.copies}")
        return Plan.from_json(self._build(config, variant.copies).plan)

    def run(self, variant: Variant, steps: int, warm_up: int) -> Run:
        """One job: `warm_up` steps that do not count, then `steps` that do."""
        config = self._workload.config(
            f"steps={warm_up + steps + 2}", f"copies.count={variant.copies}", f"copies.record={variant.record}",
            f"copies.mode={variant.mode}",
        )  # fmt: skip
        built = self._build(config, variant.copies)
        names = [f"rank-{rank}" for rank in range(self._workload.ranks)]
        with Processes() as processes:
            address = ControlAddress(
                f"ipc://@elaswave-bench-{secrets.token_hex(8)}", secrets.token_hex(16), processes.folder, os.getpid()
            )
            first = _first_epoch(processes.folder, built, variant)
            if variant.guarded:
                processes.fork("coordinator", _coordinator_body(address, variant))
            for rank, name in enumerate(names):
                hosts = tuple(self._workload.host_of(r) for r in range(len(names)))
                body = _rank_body(config, variant, rank, hosts, processes.folder, built, address, first, warm_up)
                processes.fork(name, body)
            ports = {name: fields["port"] for name, fields in processes.hear(names, "hello").items()}
            places = {rank: ["127.0.0.1", ports[name], self._workload.host_of(rank)] for rank, name in enumerate(names)}
            processes.tell(names, "peers", places=places)
            done = processes.hear(names, "measured")
            sums = {what: sum(rank[what] for rank in done.values()) / steps for what in ("bytes", "copied", "cpu_s")}
            said = done[names[0]]
            resident = tuple(Resident(rank["forked"], rank["peak"]) for rank in done.values())
            return Run(
                tuple(said["seconds"]), sums["bytes"], sums["copied"], sums["cpu_s"], tuple(said["losses"]), resident
            )

    def _build(self, config: Config, copies: int) -> BuildResult:
        """Once per number of copies, in a child: tracing leaves threads behind."""
        if copies not in self._built:
            folder = self._keep.folder / f"copies-{copies}"

            def body(channel: Channel) -> None:
                built = build_job(config, folder)
                channel.send("built", **{**vars(built), "data": dict(built.data)})

            self._keep.fork(f"builder-{copies}", body)
            (fields,) = self._keep.hear([f"builder-{copies}"], "built").values()
            self._built[copies] = BuildResult(**{**fields, "lines": tuple(fields["lines"])})
        return self._built[copies]


def _first_epoch(folder: Path, built: BuildResult, variant: Variant) -> Activation:
    assignment = Planner(variant.copies).read(built.plan).assignment
    first = Activation(Epoch(0), assignment, SEED, SEED, None, rollback=True)
    FileStore.create(folder, Register(Term(0), first, SEED, SEED, None, SEED))
    plan_path(folder, 0).write_text(built.plan)
    return first


def _coordinator_body(address: ControlAddress, variant: Variant) -> Callable[[Channel], None]:
    def body(channel: Channel) -> None:
        spec = CoordinatorSpec(address=address, run_dir=address.store, planning=Planner(variant.copies))
        run_coordinator(spec, channel)

    return body


class _Context(WorkerContext):
    """Of a worker that dies with the benchmark."""

    def detach(self) -> None:
        return


def _rank_body(
    config: Config, variant: Variant, rank: int, hosts: tuple[str, ...], folder: Path, built: BuildResult,
    address: ControlAddress, first: Activation, warm_up: int,
) -> Callable[[Channel], None]:  # fmt: skip
    def body(channel: Channel) -> None:
        device = make_device(config.device)
        device.set_up(threads=1)
        forked = device.memory_peak_bytes()
        worker = set_up(
            config,
            _Context(
                rank=rank, hosts=hosts, run_dir=folder, token=address.token, port=0, build=built, channel=channel,
                control=address, first=first,
            ),
        )  # fmt: skip
        if not variant.guarded:
            worker.agent.close(finished=False)
        worker.group.barrier(TEST_TIMEOUT_S)
        found = _measure(worker, variant, config.steps - 2, warm_up)
        channel.send("measured", **found, forked=forked, peak=device.memory_peak_bytes())
        worker.group.barrier(TEST_TIMEOUT_S)
        channel.receive(TEST_TIMEOUT_S)

    return body


def _measure(worker: Worker, variant: Variant, steps: int, warm_up: int) -> dict[str, Any]:
    seconds, losses, before = [], [], _counts(worker)
    lap = time.perf_counter()
    for step in range(steps):
        if step == warm_up:
            worker.engine.native.sync(TEST_TIMEOUT_S)
            before = _counts(worker)
        losses.append(_step(worker, variant, step))
        now = time.perf_counter()
        seconds.append(now - lap)
        lap = now
    worker.engine.native.sync(TEST_TIMEOUT_S)
    counted = {what: count - before[what] for what, count in _counts(worker).items()}
    return {"seconds": seconds[warm_up:], "losses": losses, **counted}


def _counts(worker: Worker) -> dict[str, float]:
    return {
        "bytes": worker.endpoint.bytes_sent,
        "copied": worker.engine.native.copied_bytes,
        "cpu_s": time.process_time(),
    }


def _step(worker: Worker, variant: Variant, step: int) -> float:
    """What a worker does for one step that goes well; the mean loss."""
    assert worker.feed is not None
    fed = worker.feed.next_batch(step)
    lr = worker.config.optimizer.lr * worker.schedule(step)
    hyper = [worker.optimizer.hyper_values(step, lr, group) for group in GROUPS]
    result: dict[str, Any] = worker.engine.native.step(
        step, fed.inputs, hyper, worker.config.clip_norm, TEST_TIMEOUT_S, content=fed.content
    )
    worker.committed = Stamp(Version(result["version"]), worker.plan.epoch)
    if variant.guarded:
        worker.agent.committed(certificate_of(worker.committed, result["votes"]))
    return result["loss"] / result["count"]
