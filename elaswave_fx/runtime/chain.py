"""All units of an artifact in one process, one after another: for measuring and for comparing, not for training.

chain = Chain(artifact, constants, tensor_of)
chain.step(batch, keys)   ->  loss, count; gradients by parameter, seconds by unit
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elaswave_fx import _native
from elaswave_fx.program.artifact import Artifact, Binding, UnitSpec


@dataclass(frozen=True)
class ChainStep:
    """One forward and backward pass: sums, gradients by parameter, seconds of each unit's two programs."""

    loss: torch.Tensor
    count: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class Chain:
    """Unit programs bound to tensors. `tensor_of(name)` gives parameters and buffers in the dtype they compute in."""

    def __init__(
        self, artifact: Artifact, constants: Mapping[str, torch.Tensor], tensor_of: Callable[[str], torch.Tensor]
    ) -> None:
        self._artifact = artifact
        self._programs = {name: _native.Program(data) for name, data in artifact.programs.items()}
        places = {(i, p.offset): p.name for i, bucket in enumerate(artifact.buckets) for p in bucket.params}
        sources = [
            constants[name] if kind == "constant" else tensor_of(name) for kind, name in artifact.invariant_inputs
        ]
        invariants = self._programs["invariants"].run(sources)
        self._held = {**constants, **dict(zip(artifact.invariant_names, invariants, strict=True))}
        self._tensor_of = tensor_of
        self._name = lambda binding: places[binding[1], binding[2]] if binding[0] == "param" else binding[1]
        self._static = [[self._fixed(binding) for binding in unit.inputs] for unit in artifact.units]

    def _fixed(self, binding: Binding) -> torch.Tensor | None:
        """What does not change from step to step."""
        if binding[0] in ("param", "frozen", "buffer", "constant"):
            name = self._name(binding)
            return self._held[name] if binding[0] == "constant" else self._tensor_of(name)
        return None

    def step(self, batch: Mapping[str, torch.Tensor], keys: torch.Tensor) -> ChainStep:
        """Forward and backward of one batch; `keys` int64 [samples] serve every unit alike."""
        found: dict[Any, torch.Tensor] = {("keys",): keys, ("step_keys",): keys[:1]}
        found |= {("input", name): tensor for name, tensor in batch.items()}
        saved: list[Any] = []
        forward_s, backward_s = [], [0.0] * len(self._artifact.units)
        for unit, static in zip(self._artifact.units, self._static, strict=True):
            inputs = [found[b] if tensor is None else tensor for b, tensor in zip(unit.inputs, static, strict=True)]
            start = time.perf_counter()
            outputs = self._programs[f"{unit.kind}.forward"].run(inputs)
            forward_s.append(time.perf_counter() - start)
            found |= dict(zip(unit.outputs, outputs, strict=False))
            saved.append(outputs[len(unit.outputs) :])
        gradients: dict[Any, torch.Tensor] = {("loss",): torch.ones_like(found["loss",])}
        for unit in reversed(self._artifact.units):
            backward_s[unit.index] = self._backward(unit, saved.pop(), gradients)
        named = {name: grad for name, grad in gradients.items() if isinstance(name, str)}
        return ChainStep(found["loss",], found["count",], named, tuple(forward_s), tuple(backward_s))

    def _backward(self, unit: UnitSpec, saved: list[Any], gradients: dict[Any, torch.Tensor]) -> float:
        program = self._programs.get(f"{unit.kind}.backward")
        if program is None:
            return 0.0
        values = self._artifact.values
        wanted = [o for o in unit.outputs if o[0] == "loss" or (o[0] == "value" and values[o[1]].has_grad)]
        start = time.perf_counter()
        outputs = program.run([*saved, *(gradients[o] for o in wanted)])
        seconds = time.perf_counter() - start
        for binding, gradient in zip(unit.grads, outputs, strict=True):
            if binding[0] in ("param", "value"):
                key = self._name(binding) if binding[0] == "param" else binding
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
        return seconds


def measure_kinds(chain: Chain, artifact: Artifact, batch: Mapping[str, torch.Tensor], runs: int = 3) -> dict[str, Any]:
    """Seconds per sample (forward, backward) of every kind of unit: the fastest of `runs`, averaged over its units."""
    samples = len(next(iter(batch.values())))
    keys = torch.arange(1, samples + 1, dtype=torch.int64)
    steps = [chain.step(batch, keys) for _ in range(runs)]
    found: dict[str, list[tuple[float, float]]] = {}
    for unit in artifact.units:
        forward = min(step.forward_s[unit.index] for step in steps)
        backward = min(step.backward_s[unit.index] for step in steps)
        found.setdefault(unit.kind, []).append((forward, backward))
    return {
        kind: tuple(math.fsum(pair[way] for pair in pairs) / len(pairs) / samples for way in (0, 1))
        for kind, pairs in found.items()
    }
