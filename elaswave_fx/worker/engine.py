"""One rank's engine: passes artifact, plans and initial state to the native runtime.

    rank_engine = RankEngine(job, constants, initial, rank, endpoint, optimizer, plan, version)
    rank_engine.precompute(next_plan)      # while steps run, on any thread
    rank_engine.prepare()               # between two steps: most of the work of `install`
    rank_engine.install(next_plan)      # changes only what differs
    rank_engine.native.step(...)

No part of a step runs in Python: `native.step` releases the GIL between the step's first and last instruction.
plan/lower/engine_spec.py makes the engine spec; this module passes it on with the tensors that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.config.keys import Config
from elaswave_fx.devices.emulated import Kernels
from elaswave_fx.optim.optimizer import Optimizer
from elaswave_fx.plan.lower.engine_spec import UPDATE, EngineJob, EngineSpec, engine_spec
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition_memory import made_ahead
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.program.artifact import Artifact, Binding
from elaswave_fx.program.operators import import_modules


class RankEngine:
    """A rank's native engine, with the job's initial state.

    Raises ExecError if the runtime refuses a program, naming it and the instruction.

    Args:
        update: the unit program of `optimizer`.
        version: number of committed steps.
        kernels: the rank's unit durations for a plan; if given, units sleep instead of computing.
    """

    def __init__(
        self,
        job: EngineJob,
        constants: Mapping[str, torch.Tensor],
        initial: InitialState,
        rank: Rank,
        endpoint: _native.Endpoint | None,
        optimizer: Optimizer,
        update: Mapping[str, Any],
        plan: Plan,
        version: int,
        kernels: Callable[[Plan, Rank], Kernels] | None = None,
    ) -> None:
        self._job, self._initial = job, initial
        self.plan = plan  # the plan in force
        self._rank, self._optimizer, self._kernels = rank, optimizer, kernels
        self._constants = {**constants, **self._invariants(constants)}
        self._precomputed: _Precomputed | None = None
        spec = self._spec(plan)
        self._given = spec.tables
        programs = {**job.artifact.programs, UPDATE: update}
        self.native = _native.Engine(spec, endpoint, programs, self._tensors(self._given), version)
        self.load_initial()
        for bucket in job.artifact.buckets:
            if rank in plan.groups[bucket.name]:
                self.native.load(bucket.name, initial.bucket(bucket))

    def precompute(self, plan: Plan) -> None:
        """Prepare the input of `install` for a plan; on any thread, at any time."""
        self._precomputed = self._next(plan, made_ahead(self.plan, plan, self._rank))

    def prepare(self) -> None:
        """Have the runtime read the precomputed spec, if any; between two steps."""
        if self._precomputed is not None:
            self._read(self._precomputed)

    def install(self, plan: Plan, restart_at: int | None = None) -> frozenset[int]:
        """Install a plan, between steps and without a transfer in progress. Return the (indices of) buckets whose
        working copy is incomplete until `native.refresh`.

        `restart_at`: drop all state; the state loaded next is that after this number of steps.
        """
        precomputed, self._precomputed = self._precomputed, None
        if precomputed is None or precomputed.plan is not plan:
            precomputed = self._next(plan, [])
        self._read(precomputed)
        stale = self.native.install(precomputed.spec, restart_at)
        self.plan = plan
        return frozenset(stale)

    def _spec(self, plan: Plan) -> EngineSpec:
        kernels = self._kernels(plan, self._rank) if self._kernels is not None else None
        return engine_spec(self._job, plan, self._rank, kernels)

    def _next(self, plan: Plan, ahead: list[int]) -> _Precomputed:
        spec = self._spec(plan)
        return _Precomputed(plan, _native.NextSpec(spec, ahead), spec.tables)

    def _read(self, precomputed: _Precomputed) -> None:
        """Have the runtime read the spec, with the tensors that it has not been given; a second call does nothing."""
        self.native.prepare(precomputed.spec, self._tensors(precomputed.tables - self._given))
        self._given |= precomputed.tables

    def load_initial(self) -> None:
        """Load this rank's boxes with the initial state."""
        for number, box in numbered(self.plan.boxes):
            if self._rank in box.replica_ranks:
                bucket = self._job.artifact.buckets[box.bucket]
                master = self._initial.slice(bucket, box.span)
                self.native.load(number, master, [] if bucket.buffers else list(self._optimizer.init(master)))

    # --- Tensors by name

    def _invariants(self, constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the values that do not depend on samples, once."""

        def source(binding: Binding) -> torch.Tensor:
            kind, name = binding
            return constants[name] if kind == "constant" else self._initial.tensor(name)

        artifact = self._job.artifact
        inputs = [source(binding) for binding in artifact.invariant_inputs]
        outputs = _native.Program(artifact.programs["invariants"]).run(inputs)
        return {name: tensor.contiguous() for name, tensor in zip(artifact.invariant_names, outputs, strict=True)}

    def _tensors(self, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """Constants, frozen parameters and constant buffers; the latter two in their compute dtype."""
        if not names:
            return {}
        artifact = self._job.artifact
        read_as = {info.name: info.torch_dtype for info in artifact.tensors}
        return {
            name: self._constants[name]
            if name in self._constants
            else self._initial.tensor(name).to(read_as[name]).clone()
            for name in sorted(names)
        }


class _Precomputed(NamedTuple):
    """A plan, its spec for the runtime, and the names of the tensors that the spec needs."""

    plan: Plan
    spec: _native.NextSpec
    tables: frozenset[str]


def engine_job(config: Config, artifact: Artifact) -> EngineJob:
    """The plan-independent part of a job's engine specs."""
    record_dtype = {"fp32": "float32", "bf16": "bfloat16"}[config.copies.record]
    return EngineJob(artifact, config.seed, config.lab.reshard_rng, record_dtype, config.lab.copy_mode)


def load_artifact(folder: Path) -> tuple[Artifact, dict[str, torch.Tensor]]:
    """Load the artifact and its constants, and register its operators."""
    artifact = Artifact.load(folder)
    import_modules(artifact)
    return artifact, Artifact.load_constants(folder)


def input_names(artifact: Artifact, plan: Plan, rank: int) -> tuple[str, ...]:
    """The program inputs that a rank's units read; none in the middle of a pipeline."""
    units = plan.tile(rank).units  # type: ignore[arg-type]
    read = {binding[1] for index in units for binding in artifact.units[index].inputs if binding[0] == "input"}
    return tuple(name for name in artifact.inputs if name in read)


def vouched_inputs(artifact: Artifact, plan: Plan, rank: int) -> tuple[str, ...]:
    """The inputs whose content a rank vouches for: it runs the first unit that reads them."""
    readers, units = first_readers(artifact), plan.tile(rank).units  # type: ignore[arg-type]
    return tuple(name for name in input_names(artifact, plan, rank) if readers[name] in units)


def first_readers(artifact: Artifact) -> dict[str, int]:
    """Input -> the first unit that reads it, whose rank vouches for the input's content."""
    found: dict[str, int] = {}
    for unit in artifact.units:
        for binding in unit.inputs:
            if binding[0] == "input":
                found.setdefault(binding[1], unit.index)
    return found
