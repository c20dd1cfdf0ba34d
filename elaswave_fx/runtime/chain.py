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

_RUNS_MIN, _RUNS_MAX = 3, 30
_MEASURE_S = 1.0


@dataclass(frozen=True)
class ChainStep:
    """One forward and backward pass: sums, gradients by parameter, seconds of each unit's two programs."""

    loss: torch.Tensor
    count: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


@dataclass(frozen=True)
class _Wires:
    """One unit's two programs, with places of what they read and write in the lists of values and gradients."""

    forward: Any
    fixed: list[torch.Tensor | None]
    reads: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    backward: Any
    tangents: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]


class _Places:
    """Numbers for bindings, in order of their first use."""

    def __init__(self) -> None:
        self.of: dict[Any, int] = {}

    def __call__(self, key: Any) -> int:
        return self.of.setdefault(key, len(self.of))


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
        self._values, self._gradients = _Places(), _Places()
        self._wires = [self._wire(unit) for unit in artifact.units]

    def _wire(self, unit: UnitSpec) -> _Wires:
        fixed = [self._fixed(binding) for binding in unit.inputs]
        given = enumerate(zip(unit.inputs, fixed, strict=True))
        values = self._artifact.values
        wanted = [o for o in unit.outputs if o[0] == "loss" or (o[0] == "value" and values[o[1]].has_grad)]
        returned = [(at, b) for at, b in enumerate(unit.grads) if b[0] in ("param", "value")]
        return _Wires(
            self._programs[f"{unit.kind}.forward"],
            fixed,
            tuple((at, self._values(binding)) for at, (binding, tensor) in given if tensor is None),
            tuple(self._values(binding) for binding in unit.outputs),
            self._programs.get(f"{unit.kind}.backward"),
            tuple(self._gradients(binding) for binding in wanted),
            tuple((at, self._gradients(self._name(b) if b[0] == "param" else b)) for at, b in returned),
        )

    def _fixed(self, binding: Binding) -> torch.Tensor | None:
        """What does not change from step to step."""
        if binding[0] in ("param", "frozen", "buffer", "constant"):
            name = self._name(binding)
            return self._held[name] if binding[0] == "constant" else self._tensor_of(name)
        return None

    def step(self, batch: Mapping[str, torch.Tensor], keys: torch.Tensor) -> ChainStep:
        """Forward and backward of one batch; `keys` int64 [samples] serve every unit alike."""
        given = {("keys",): keys, ("step_keys",): keys[:1], **{("input", name): batch[name] for name in batch}}
        found: list[Any] = [given.get(key) for key in self._values.of]
        gradients: list[Any] = [None] * len(self._gradients.of)
        held: list[Any] = []
        forward_s: list[float] = []
        backward_s: list[float] = []
        for wires in self._wires:
            inputs: list[Any] = wires.fixed.copy()
            for at, place in wires.reads:
                inputs[at] = found[place]
            start = time.perf_counter()
            outputs = wires.forward.run(inputs, len(wires.writes))
            forward_s.append(time.perf_counter() - start)
            for place, value in zip(wires.writes, outputs, strict=False):
                found[place] = value
            held.append(outputs[-1])
        loss, count = (found[self._values.of[key]] for key in (("loss",), ("count",)))
        if ("loss",) in self._gradients.of:
            gradients[self._gradients.of["loss",]] = torch.ones_like(loss)
        for wires in reversed(self._wires):
            backward_s.append(_run_backward(wires, held.pop(), gradients))
        named = {key: gradients[place] for key, place in self._gradients.of.items() if isinstance(key, str)}
        return ChainStep(loss, count, named, tuple(forward_s), tuple(reversed(backward_s)))


def _run_backward(wires: _Wires, held: Any, gradients: list[Any]) -> float:
    """Adds to the gradients; seconds of the program alone."""
    if wires.backward is None:
        return 0.0
    start = time.perf_counter()
    outputs = wires.backward.run([held, *(gradients[place] for place in wires.tangents)])
    seconds = time.perf_counter() - start
    for at, place in wires.gradients:
        known = gradients[place]
        gradients[place] = outputs[at] if known is None else known + outputs[at]
    return seconds


def measure_kinds(chain: Chain, artifact: Artifact, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Seconds per sample (forward, backward) of every kind of unit: the fastest run, averaged over its units.

    Many runs where they are quick: a kind with a single unit would else look slower than one with many.
    """
    samples = len(next(iter(batch.values())))
    keys = torch.arange(1, samples + 1, dtype=torch.int64)
    steps: list[ChainStep] = []
    end = time.perf_counter() + _MEASURE_S
    while len(steps) < _RUNS_MIN or (len(steps) < _RUNS_MAX and time.perf_counter() < end):
        steps.append(chain.step(batch, keys))
    found: dict[str, list[tuple[float, float]]] = {}
    for unit in artifact.units:
        forward = min(step.forward_s[unit.index] for step in steps)
        backward = min(step.backward_s[unit.index] for step in steps)
        found.setdefault(unit.kind, []).append((forward, backward))
    return {
        kind: tuple(math.fsum(pair[way] for pair in pairs) / len(pairs) / samples for way in (0, 1))
        for kind, pairs in found.items()
    }
