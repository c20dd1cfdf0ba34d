"""One rank's engine: an artifact, plans and an initial state declared to the native runtime.

    rank_engine = RankEngine(artifact, constants, initial, rank, endpoint, optimizer, update, seed)
    rank_engine.install(plan)      # the first plan, and every later one: what stays as it was is left alone
    rank_engine.native.step(...)

Nothing of a step runs in Python: `native.step` releases the GIL between the step's first and last instruction. This
module only translates names of the artifact to indices and tensors of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.checkpoint.initial_state import InitialState
from elaswave_fx.devices.emulated import Kernels
from elaswave_fx.optim.optimizer import Optimizer
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.step import eval_program, step_program
from elaswave_fx.program.artifact import Artifact, Binding, BucketSpec, FoldSpec
from elaswave_fx.program.operators import import_modules


class RankEngine:
    """A native engine and what it was last told.

    Programs, constants and mutable buffers are declared once, at first use; every rank keeps every mutable buffer, so
    that none is lost with a rank. Raises ExecError when the runtime refuses a program, naming it and the instruction.

    `update`: the unit program of `optimizer`. `kernels`: how long units take this rank by a plan; given, they are
    waited for and not computed.
    """

    def __init__(
        self,
        artifact: Artifact,
        constants: Mapping[str, torch.Tensor],
        initial: InitialState,
        rank: int,
        endpoint: Any,
        optimizer: Optimizer,
        update: Mapping[str, Any],
        seed: int,
        global_batch: int,
        kernels: Callable[[Plan, Any], Kernels] | None = None,
    ) -> None:
        self.native = _native.Engine(rank, endpoint, seed, global_batch, artifact.granule)
        self._artifact, self._constants, self._initial = artifact, constants, initial
        self._rank, self._optimizer, self._kernels = rank, optimizer, kernels
        self._programs: dict[str, int] = {}
        self._tensors: dict[str, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}  # of the plan that is installed
        self._update = self._add_program("update", update)
        self._invariants()
        for value in artifact.values:
            self.native.add_value(value.name, value.axis, value.dtype, list(value.shape), value.has_grad)

    def install(self, plan: Plan, anew: bool = False) -> frozenset[int]:
        """Take the plan over: between steps, with no transfer under way. Returns the buckets (indices) whose working
        copy is new here and without content until `native.refresh_work`; at the first plan all have their content.

        `anew`: boxes and mutable buffers go back to the beginning, as at the first plan.
        """
        first = not self._groups
        self.native.set_world(list(plan.ranks))
        new = frozenset(
            index for index, bucket in enumerate(self._artifact.buckets) if self._install_bucket(plan, bucket, first)
        )
        self._install_boxes(plan, first, anew)
        self._install_folds(plan, first)
        self._install_units(plan)
        self._groups = {name: tuple(group) for name, group in plan.groups.items()}
        return new

    def bucket_index(self, name: str) -> int:
        """The index of a bucket in plan and artifact."""
        return next(index for index, bucket in enumerate(self._artifact.buckets) if bucket.name == name)

    # --- Parameters and their state

    def _install_bucket(self, plan: Plan, bucket: BucketSpec, first: bool) -> bool:
        group = tuple(plan.groups[bucket.name])
        before = self._groups.get(bucket.name, ())
        if group == before:
            return False
        work = None
        if self._rank in group:
            dtype = getattr(torch, self._artifact.work_dtype)
            if first:
                work = self._initial.bucket(bucket).to(dtype)
            elif self._rank in before:
                work = self.native.bucket_work(bucket.name)
            else:
                work = torch.zeros(bucket.numel, dtype=dtype)
        self.native.add_bucket(
            name=bucket.name,
            numel=bucket.numel,
            group=list(group),
            dtype=self._artifact.work_dtype,
            optimizer_program=self._update,
            hyper_group=bucket.group,
            work=work,
        )
        return not first and work is not None and self._rank not in before

    def _install_boxes(self, plan: Plan, first: bool, anew: bool) -> None:
        for number, box in enumerate(plan.boxes):
            if first:
                self.native.add_box(
                    bucket=box.bucket, lo=box.span.lo, hi=box.span.hi, owner=box.owner, holders=list(box.holders)
                )
            else:
                self.native.assign_box(number, box.owner, list(box.holders))
            if (first or anew) and self._rank in box.replica_ranks:
                self._load_seed(plan, number)
        for fold in self._artifact.folds if anew else ():
            self.native.set_buffer(fold.buffer, self._initial.tensor(fold.buffer))

    def _load_seed(self, plan: Plan, number: int) -> None:
        """A box as it was before the first step."""
        box = plan.boxes[number]
        master = self._initial.slice(self._artifact.buckets[box.bucket], box.span)
        self.native.set_base(number, master, list(self._optimizer.init(master)))

    # --- Buffers

    def _install_folds(self, plan: Plan, first: bool) -> None:
        for index, fold in enumerate(self._artifact.folds):
            group = [
                (tile.rank, tile.samples.lo, tile.samples.hi) if fold.unit in tile.units else (tile.rank, 0, 0)
                for tile in plan.tiles
            ]
            if first:
                self._add_fold(fold, group)
            else:
                self.native.regroup_fold(index, group)

    def _add_fold(self, fold: FoldSpec, group: Sequence[tuple[int, int, int]]) -> None:
        self.native.add_fold(
            program=self._program(f"fold.{fold.buffer}"),
            buffers=[self._tensor(fold.buffer)],
            values=[(dtype, list(shape)) for dtype, shape in fold.values],
            group=group,
        )

    # --- Units

    def _install_units(self, plan: Plan) -> None:
        tile = plan.tile(self._rank)  # type: ignore[arg-type]
        self.native.clear_units()
        kernels = self._kernels(plan, self._rank) if self._kernels is not None else {}
        for index in tile.units:
            self._unit(index, kernels.get(index))
        train = step_program(plan, self._rank)  # type: ignore[arg-type]
        evaluate = eval_program(plan, self._rank)  # type: ignore[arg-type]
        spans = [(span.lo, span.hi) for span in train.micro_batches]
        self.native.set_schedule(list(train.instructions), list(evaluate.instructions), spans, train.first_sample)

    def _unit(self, index: int, modelled: tuple[float, float, float] | None) -> None:
        unit = self._artifact.units[index]
        backward = f"{unit.kind}.backward"
        self.native.add_unit(
            unit=index,
            forward=self._program(f"{unit.kind}.forward"),
            backward=self._program(backward) if backward in self._artifact.programs else -1,
            evaluate=self._program(f"{unit.kind}.evaluate"),
            inputs=[self._bind(binding) for binding in unit.inputs],
            outputs=list(unit.outputs),
            eval_outputs=list(unit.eval_outputs),
            grads=[self._bind(binding) if binding[0] in ("param", "value") else ("none",) for binding in unit.grads],
            num_saved=unit.num_saved,
            modelled=modelled,
        )

    def _bind(self, binding: Binding) -> Binding:
        kind = binding[0]
        if kind == "param":
            return ("param", binding[1], binding[2], list(binding[3]))
        if kind in ("buffer", "frozen", "constant"):
            return ("constant", self._tensor(binding[1]))
        return binding

    # --- Programs and tensors, each declared once

    def _program(self, name: str) -> int:
        if name not in self._programs:
            self._add_program(name, self._artifact.programs[name])
        return self._programs[name]

    def _add_program(self, name: str, program: Any) -> int:
        self._programs[name] = self.native.add_program(name, program)
        return self._programs[name]

    def _invariants(self) -> None:
        """Run what no sample enters, once."""
        inputs = [self._source(binding) for binding in self._artifact.invariant_inputs]
        outputs = _native.Program(self._artifact.programs["invariants"]).run(inputs)
        for name, tensor in zip(self._artifact.invariant_names, outputs, strict=True):
            self._tensors[name] = self.native.add_constant(name, tensor.contiguous())

    def _source(self, binding: Binding) -> torch.Tensor:
        kind, name = binding
        return self._constants[name] if kind == "constant" else self._initial.tensor(name)

    def _tensor(self, name: str) -> int:
        """The engine's index of a buffer, frozen parameter or constant."""
        if name not in self._tensors:
            tensor = self._constants[name] if name in self._constants else self._initial.tensor(name)
            self._tensors[name] = self.native.add_constant(name, self._work(name, tensor))
        return self._tensors[name]

    def _work(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Frozen parameters compute in their captured dtype; a buffer keeps its own, and is this rank's to change."""
        stored = {info.name: info.dtype for info in (*self._artifact.params, *self._artifact.buffers)}
        dtype = getattr(torch, stored[name]) if name in stored else tensor.dtype
        return tensor.to(dtype).clone()


def load_artifact(folder: Path) -> tuple[Artifact, dict[str, torch.Tensor]]:
    """The artifact and its constants; its operators are known afterwards."""
    artifact = Artifact.load(folder)
    import_modules(artifact)
    return artifact, Artifact.load_constants(folder)


def input_names(artifact: Artifact, plan: Plan, rank: int) -> tuple[str, ...]:
    """The program inputs that a rank's units read; ranks in the middle of a pipeline read none."""
    units = plan.tile(rank).units  # type: ignore[arg-type]
    read = {binding[1] for index in units for binding in artifact.units[index].inputs if binding[0] == "input"}
    return tuple(name for name in artifact.inputs if name in read)


def first_readers(artifact: Artifact) -> dict[str, int]:
    """Input -> the first unit that reads it: whoever runs it vouches for the input's content."""
    found: dict[str, int] = {}
    for unit in artifact.units:
        for binding in unit.inputs:
            if binding[0] == "input":
                found.setdefault(binding[1], unit.index)
    return found
