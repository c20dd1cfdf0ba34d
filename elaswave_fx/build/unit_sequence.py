"""All units of an artifact in one process, one after another: for measurements and comparisons, not for training.

units = UnitSequence(artifact, constants, tensor_of)
units.step(batch, keys)   ->  loss, count; gradients by parameter, seconds by unit
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.program.artifact import Artifact, Binding, Seconds, UnitSpec

_RUNS_MIN, _RUNS_MAX = 3, 60
_MEASURE_S = 1.0

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SequenceStep:
    """One forward and backward pass: sums, gradients by parameter, seconds of each unit.

    `weights_s`: the part of `backward_s` for gradients of parameters; zeros where backward programs run whole.
    """

    loss: torch.Tensor
    count: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weights_s: tuple[float, ...]


class _Places:
    """Numbers for bindings, in order of their first use."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, key: Any) -> int:
        return self.of.setdefault(key, len(self.of))


class UnitSequence:
    """Unit programs bound to tensors. `tensor_of(name)` gives parameters and buffers in the dtype they compute in.

    `halves`: backward programs run in halves, one right after the other.
    """

    def __init__(
        self,
        artifact: Artifact,
        constants: Mapping[str, torch.Tensor],
        tensor_of: Callable[[str], torch.Tensor],
        halves: bool = False,
    ) -> None:
        self._artifact = artifact
        self._halves = halves
        self._programs = {name: _native.Program(data) for name, data in artifact.programs.items()}
        places = {
            (i, p.offset): p.name
            for i, bucket in enumerate(artifact.buckets)
            for p in (*bucket.params, *bucket.buffers)
        }
        sources = [
            constants[name] if kind == "constant" else tensor_of(name) for kind, name in artifact.invariant_inputs
        ]
        invariants = self._programs["invariants"].run(sources)
        self._held = {**constants, **dict(zip(artifact.invariant_names, invariants, strict=True))}
        self._tensor_of = tensor_of
        self._name = lambda b: places[b[1], b[2]] if b[0] in ("param", "mutable") else b[1]
        self._values, self._gradients = _Places(), _Places()
        self._loss, self._count = self._values(("loss",)), self._values(("count",))
        self._units = _native.UnitSequence()
        for unit in artifact.units:
            self._add(unit)

    @staticmethod
    def of(artifact: Artifact, constants: Tensors, state: Tensors) -> UnitSequence:
        """The sequence that ranks run: parameters and buffers by name, in the dtype that units read, backward in halves
        if split."""
        held = {info.name: state[info.name].detach().to(info.torch_dtype) for info in artifact.tensors}
        return UnitSequence(artifact, constants, held.__getitem__, halves=artifact.is_split)

    def _add(self, unit: UnitSpec) -> None:
        fixed = [self._fixed(binding) for binding in unit.inputs]
        given = enumerate(zip(unit.inputs, fixed, strict=True))
        values = self._artifact.values
        wanted = [o for o in unit.outputs if o[0] == "loss" or (o[0] == "value" and values[o[1]].has_grad)]
        returned = [(at, b) for at, b in enumerate(unit.grads) if b[0] in ("param", "value")]
        self._units.add(
            forward=self._programs[f"{unit.kind}.forward"],
            fixed=fixed,
            reads=[(at, self._values(binding)) for at, (binding, tensor) in given if tensor is None],
            writes=[self._values(binding) for binding in unit.outputs],
            backward=self._programs.get(f"{unit.kind}.backward{'_inputs' if self._halves else ''}"),
            weights=self._programs.get(f"{unit.kind}.backward_weights") if self._halves else None,
            results=len(unit.grads),
            tangents=[self._gradients(binding) for binding in wanted],
            gradients=[(at, self._gradients(self._name(b) if b[0] == "param" else b)) for at, b in returned],
        )

    def _fixed(self, binding: Binding) -> torch.Tensor | None:
        """The tensor of a binding that is the same in every step; None for others."""
        if binding[0] in ("param", "mutable", "frozen", "buffer", "constant"):
            name = self._name(binding)
            return self._held[name] if binding[0] == "constant" else self._tensor_of(name)
        return None

    def step(self, batch: Mapping[str, torch.Tensor], keys: torch.Tensor) -> SequenceStep:
        """Forward and backward of one batch; `keys` int64 [samples] serve every unit."""
        given = {("keys",): keys, ("step_keys",): keys[:1], **{("input", name): batch[name] for name in batch}}
        values, gradients, *seconds = self._units.step(
            values=[given.get(key) for key in self._values.of],
            gradients=len(self._gradients.of),
            loss=self._loss,
            loss_gradient=self._gradients.of.get(("loss",), len(self._gradients.of)),
        )
        named = {key: gradients[place] for key, place in self._gradients.of.items() if isinstance(key, str)}
        return SequenceStep(values[self._loss], values[self._count], named, *map(tuple, seconds))


def measure_kinds(units: UnitSequence, artifact: Artifact, batch: Mapping[str, torch.Tensor]) -> dict[str, Seconds]:
    """Seconds per sample of every kind of unit: the fastest run, averaged over its units.

    Quick units run many times: else a kind with a single unit would look slower than a kind with many.
    """
    samples = len(next(iter(batch.values())))
    keys = torch.arange(1, samples + 1, dtype=torch.int64)
    times: list[tuple[tuple[float, ...], ...]] = []  # kept outputs would force new memory
    end = time.perf_counter() + _MEASURE_S
    while len(times) < _RUNS_MIN or (len(times) < _RUNS_MAX and time.perf_counter() < end):
        step = units.step(batch, keys)
        times.append((step.forward_s, step.backward_s, step.weights_s))
    found: dict[str, list[Seconds]] = {}
    for unit in artifact.units:
        fastest = (min(each[part][unit.index] for each in times) for part in range(3))
        found.setdefault(unit.kind, []).append((next(fastest), next(fastest), next(fastest)))
    mean = lambda units, part: math.fsum(each[part] for each in units) / len(units) / samples  # noqa: E731
    return {kind: (mean(each, 0), mean(each, 1), mean(each, 2)) for kind, each in found.items()}
