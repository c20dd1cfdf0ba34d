"""Real steps of a small GPT by any plan, in exact mode, all ranks as threads of one process.

job = TinyJob(folder)                    built once; job.workload is what plans are made of
job.run(plan).digests == job.alone.digests
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch

from elaswave_fx import _native
from elaswave_fx.build.builder import build
from elaswave_fx.build.initial_plan import options_of
from elaswave_fx.build.optimizer_program import update_program
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.devices import make_device
from elaswave_fx.optim.optimizer import make_optimizer, step_hypers
from elaswave_fx.passes.assign_stages import make_workload
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.topology import Rank, local_topology
from elaswave_fx.worker.engine import RankEngine, engine_job, load_artifact
from elaswave_fx.worker.feed import InputFeed, StepInputs
from tests.runs import small_config

T = TypeVar("T")
STEPS = 2
TIMEOUT_S = 60.0
"""Far more than anything takes."""

WORDS = ("model.layers=4", "model.width=16", "model.dropout=0.1", "seq_len=8", "global_batch=12", "exact=true")


@dataclass(frozen=True)
class Bits:
    """What is compared: by step loss and norm, and the digest of each bucket's state after the last one."""

    sums: tuple[tuple[str, str], ...]
    digests: tuple[int, ...]


class TinyJob:
    """A model of some units, with dropout, that was captured and lowered; steps of it from the beginning."""

    def __init__(self, folder: Path) -> None:
        self.config = small_config("gpt_stdlib", *WORDS, f"steps={STEPS}", f"cache.dir={folder / 'cache'}")
        with as_exact_runs():
            built = build(self.config, folder)
        assert built.state is not None
        self.source, self._initial = built.source, InitialState(built.state)
        self.artifact, self._constants = load_artifact(built.folder)
        self._update = update_program(self.config)
        assert self.artifact.is_split, "backward passes may be in halves"
        self.workload: Workload = make_workload(self.artifact, replace(options_of(self.config), exact=True), 2)

    @cached_property
    def alone(self) -> Bits:
        """Of one rank with all units and samples."""
        return self.run(plan_lanes(self.workload, local_topology(1), [(1,)], replicas=0))

    def run(self, plan: Plan) -> Bits:
        """The first steps by a plan, whose ranks begin with all that it says they keep; all of them see the same."""
        with as_exact_runs():
            found = by_rank(plan, partial(self._steps, plan))
        first, _ = found[plan.ranks[0]]
        assert all(sums == first for sums, _ in found.values()), "ranks saw other sums"
        digests: dict[int, int] = defaultdict(int)
        for _, states in found.values():
            for bucket, digest in states:
                digests[bucket] = (digests[bucket] + digest) % (1 << 128)
        return Bits(tuple(first), tuple(digests[bucket] for bucket in sorted(digests)))

    def _steps(
        self, plan: Plan, rank: Rank, endpoint: _native.Endpoint | None
    ) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
        """(loss, norm) of each step, and (bucket, digest of the state) of each box that the rank owns."""
        engine = self.engine(plan, rank, endpoint)
        feed = InputFeed(self.config, self.artifact, plan, rank, self.source, 0)
        found = []
        try:
            for step in range(STEPS):
                result = self.step(engine, step, feed.next_batch(step))
                found.append((float(result.loss).hex(), float(result.grad_norm).hex()))
            engine.native.sync(TIMEOUT_S)
        finally:
            feed.close()
        return found, [(box.bucket, self._digest(engine, n)) for n, box in numbered(plan.boxes) if box.owner == rank]

    def engine(self, plan: Plan, rank: Rank, endpoint: _native.Endpoint | None) -> RankEngine:
        """That of a rank, before the first step."""
        optimizer = make_optimizer(self.config.optimizer)
        return RankEngine(
            engine_job(self.config, self.artifact),
            self._constants, self._initial, rank, endpoint, optimizer, self._update, plan, 0,
        )  # fmt: skip

    def step(self, engine: RankEngine, step: int, fed: StepInputs) -> _native.StepResult:
        options = _native.StepOptions(
            TIMEOUT_S, self.config.clip_norm, content=fed.content, cross_check=fed.cross_check
        )
        hypers = step_hypers(make_optimizer(self.config.optimizer), step, self.config.optimizer.lr)
        return engine.native.step(step, fed.inputs, hypers, options)

    def _digest(self, engine: RankEngine, number: int) -> int:
        state = engine.native.read(number)
        assert state is not None, "an owner has the state"
        low, high = state.digest
        return low | high << 64


@contextmanager
def as_exact_runs() -> Iterator[None]:
    """The process computes as a rank of an exact run does; afterwards torch refuses again what it refused before."""
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    make_device("cpu").set_up(threads=1, deterministic=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def by_rank(plan: Plan, steps: Callable[[Rank, _native.Endpoint | None], T]) -> dict[Rank, T]:
    """What `steps` gives for each rank of a plan, all of them at once, connected; a rank alone has no endpoint."""
    endpoints = {rank: _native.Endpoint(rank, "token", host_id="host") for rank in plan.ranks}
    ports = {int(rank): ("127.0.0.1", each.port, "host") for rank, each in endpoints.items()}
    found: dict[Rank, T] = {}

    def run(rank: Rank) -> None:
        endpoints[rank].connect(ports, TIMEOUT_S)
        found[rank] = steps(rank, endpoints[rank] if len(endpoints) > 1 else None)

    in_threads([partial(run, rank) for rank in plan.ranks])
    return found


def in_threads(bodies: list[Callable[[], None]]) -> None:
    """Run them all at once; the first error of any of them."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
