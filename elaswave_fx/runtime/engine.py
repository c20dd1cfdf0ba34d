"""One rank's engine: an artifact, a plan and an initial state declared to the native runtime.

After `make_engine` nothing of a step runs in Python: `engine.step(...)` releases the GIL between the step's first and
last instruction. This module only translates names of the artifact to indices and tensors of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.step import eval_program, step_program
from elaswave_fx.program.artifact import Artifact, Binding, BucketSpec, FoldSpec
from elaswave_fx.runtime.optimizer import Optimizer, trace_update
from elaswave_fx.runtime.state import InitialState
from passes.unit_program import lower_graph


@dataclass(frozen=True)
class Share:
    """What this rank has to do with: its units, and the buckets whose group it belongs to."""

    rank: int
    units: tuple[int, ...]
    buckets: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, rank: int) -> Share:
        tile = plan.tile(rank)  # type: ignore[arg-type]
        held = tuple(i for i, bucket in enumerate(plan.workload.buckets) if rank in plan.groups[bucket.name])
        return Share(rank, tuple(range(tile.units.lo, tile.units.hi)), held)


def make_engine(
    artifact: Artifact,
    constants: Mapping[str, torch.Tensor],
    initial: InitialState,
    plan: Plan,
    rank: int,
    endpoint: Any,
    optimizer: Optimizer,
    seed: int,
) -> Any:
    """A native engine that is ready for its first step.

    Raises ExecError when the runtime refuses a program, naming it and the instruction.
    """
    engine = _native.Engine(rank, endpoint, seed, plan.workload.global_batch, artifact.granule)
    return _Declaration(engine, artifact, constants, initial, plan, rank, optimizer).declare()


class _Declaration:
    """Declares programs, tensors, units and instruction lists, in the order in which they refer to each other."""

    def __init__(
        self,
        engine: Any,
        artifact: Artifact,
        constants: Mapping[str, torch.Tensor],
        initial: InitialState,
        plan: Plan,
        rank: int,
        optimizer: Optimizer,
    ) -> None:
        self.engine = engine
        self.artifact = artifact
        self.constants = constants
        self.initial = initial
        self.plan = plan
        self.rank = rank
        self.optimizer = optimizer
        self.share = Share.of(plan, rank)
        self.programs: dict[str, int] = {}
        self.tensors: dict[str, int] = {}

    def declare(self) -> Any:
        self.engine.set_world(list(self.plan.ranks))
        self._invariants()
        for index, bucket in enumerate(self.artifact.buckets):
            self._bucket(index, bucket)
        for value in self.artifact.values:
            self.engine.add_value(value.name, value.axis, value.dtype, list(value.shape), value.has_grad)
        for fold in self.artifact.folds:
            self._fold(fold)
        for index in self.share.units:
            self._unit(index)
        train = step_program(self.plan, self.rank)  # type: ignore[arg-type]
        evaluate = eval_program(self.plan, self.rank)  # type: ignore[arg-type]
        spans = [(span.lo, span.hi) for span in train.micro_batches]
        self.engine.set_schedule(list(train.instructions), list(evaluate.instructions), spans, train.first_sample)
        return self.engine

    def _fold(self, fold: FoldSpec) -> None:
        tiles = [tile for tile in self.plan.tiles if fold.unit in tile.units]
        self.engine.add_fold(
            program=self._program(f"fold.{fold.buffer}"),
            buffers=[self._tensor(fold.buffer, fold.buffer)],
            values=[(dtype, list(shape)) for dtype, shape in fold.values],
            group=[(tile.rank, tile.samples.lo, tile.samples.hi) for tile in tiles],
        )

    def _program(self, name: str) -> int:
        if name not in self.programs:
            self.programs[name] = self.engine.add_program(name, self.artifact.programs[name])
        return self.programs[name]

    def _invariants(self) -> None:
        """Run what no sample enters, once."""
        inputs = [self._source(binding) for binding in self.artifact.invariant_inputs]
        outputs = _native.Program(self.artifact.programs["invariants"]).run(inputs)
        for name, tensor in zip(self.artifact.invariant_names, outputs, strict=True):
            self.tensors[name] = self.engine.add_constant(name, tensor.contiguous())

    def _source(self, binding: Binding) -> torch.Tensor:
        kind, name = binding
        return self.constants[name] if kind == "constant" else self.initial.tensor(name)

    def _tensor(self, key: str, name: str) -> int:
        """The engine's index of a buffer, frozen parameter or constant; declared at first use."""
        if key not in self.tensors:
            tensor = self.constants[name] if name in self.constants else self.initial.tensor(name)
            self.tensors[key] = self.engine.add_constant(name, self._work(name, tensor))
        return self.tensors[key]

    def _work(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Frozen parameters compute in their captured dtype; a buffer keeps its own, and is this rank's to change."""
        stored = {info.name: info.dtype for info in (*self.artifact.params, *self.artifact.buffers)}
        dtype = getattr(torch, stored[name]) if name in stored else tensor.dtype
        return tensor.to(dtype).clone()

    def _bucket(self, index: int, bucket: BucketSpec) -> None:
        planned = self.plan.workload.buckets[index]
        owners = [(owner, span.lo, span.hi) for owner, span in self.plan.layouts[planned.name]]
        held = index in self.share.buckets
        flat = self.initial.bucket(bucket) if held else None
        own = next(((lo, hi) for owner, lo, hi in owners if owner == self.rank), None)
        master = flat[own[0] : own[1]].clone() if flat is not None and own is not None else None
        state = list(self.optimizer.init(master)) if master is not None else []
        work = flat.to(getattr(torch, self.artifact.work_dtype)) if flat is not None else None
        self.engine.add_bucket(
            name=bucket.name,
            numel=bucket.numel,
            owners=owners,
            group=list(self.plan.groups[planned.name]),
            master=master,
            state=state,
            optimizer_program=self._update_program(),
            hyper_group=bucket.group,
            work=work,
        )

    def _update_program(self) -> int:
        if "update" not in self.programs:
            program = lower_graph("update", trace_update(self.optimizer))
            self.programs["update"] = self.engine.add_program("update", program)
        return self.programs["update"]

    def _unit(self, index: int) -> None:
        unit = self.artifact.units[index]
        backward = f"{unit.kind}.backward"
        self.engine.add_unit(
            unit=index,
            forward=self._program(f"{unit.kind}.forward"),
            backward=self._program(backward) if backward in self.artifact.programs else -1,
            evaluate=self._program(f"{unit.kind}.evaluate"),
            inputs=[self._bind(binding) for binding in unit.inputs],
            outputs=list(unit.outputs),
            eval_outputs=list(unit.eval_outputs),
            grads=[self._bind(binding) if binding[0] in ("param", "value") else ("none",) for binding in unit.grads],
            num_saved=unit.num_saved,
        )

    def _bind(self, binding: Binding) -> Binding:
        kind = binding[0]
        if kind == "param":
            return ("param", binding[1], binding[2], list(binding[3]))
        if kind in ("buffer", "frozen", "constant"):
            return ("constant", self._tensor(binding[1], binding[1]))
        return binding


def load_artifact(folder: Path) -> tuple[Artifact, dict[str, torch.Tensor]]:
    """The artifact and its constants."""
    return Artifact.load(folder), Artifact.load_constants(folder)


def input_names(artifact: Artifact, plan: Plan, rank: int) -> tuple[str, ...]:
    """The program inputs that a rank's units read; ranks in the middle of a pipeline read none."""
    units = Share.of(plan, rank).units
    read = {binding[1] for index in units for binding in artifact.units[index].inputs if binding[0] == "input"}
    return tuple(name for name in artifact.inputs if name in read)


def cast_inputs(batch: Mapping[str, torch.Tensor], precision: str) -> dict[str, torch.Tensor]:
    """Inputs as the captured program takes them: floating-point ones in bf16 when it computes in bf16."""
    dtype = {"bf16": torch.bfloat16}.get(precision)
    return {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in batch.items()}
