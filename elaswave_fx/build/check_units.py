"""Comparison of unit programs with the graphs they were made of, on the same samples and keys.

loss of the graphs 0.86, of the programs 3.77   ->  CaptureError: torch takes an operator apart into something else

The graphs were compared with the model before; the ranks' programs, backward passes included, are derived from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from elaswave_fx.build.unit_sequence import UnitSequence
from elaswave_fx.errors import CaptureError
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.check_gradients import WHERE_INFINITE
from elaswave_fx.program.interpret import interpret_units
from elaswave_fx.program.ir import Program, ResultKind, calls, is_foreign, value_of
from elaswave_fx.program.later_buffers import later_states
from elaswave_fx.program.trial_values import TIMES_NOISE, rounded_otherwise

_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = (1e-4, 2e-2), (2e-3, 0.1)
"""(float32, lower precision anywhere)."""

Tensors = Mapping[str, torch.Tensor]


def check_units(program: Program, artifact: Artifact, batch: Tensors) -> None:
    """Compare loss sum, count and gradients, with the first state and with counters in buffers at later steps. Raise
    CaptureError with the likely reason if they differ."""
    keys = torch.arange(1, len(next(iter(batch.values()))) + 1, dtype=torch.int64)
    state = _as_read(program, program.example.state)
    _compare(program, artifact, batch, keys, state, _of_graphs(program, state, batch, keys))
    for later in later_states(program, program.example.state):
        state = _as_read(program, later)
        try:
            expected = _of_graphs(program, state, batch, keys)
        except (RuntimeError, IndexError):
            continue  # a table may end before
        if all(math.isfinite(each) for each in expected[0].values()):
            _compare(program, artifact, batch, keys, state, expected)


def _as_read(program: Program, state: Tensors) -> Tensors:
    return {name: tensor.detach() for name, tensor in program.as_read(state).items()}


def _compare(
    program: Program,
    artifact: Artifact,
    batch: Tensors,
    keys: torch.Tensor,
    state: Tensors,
    of_graphs: tuple[dict[ResultKind, float], dict[str, torch.Tensor]],
) -> None:
    step = UnitSequence.of(artifact, program.tensors, state).step(batch, keys)
    sums, gradients = of_graphs
    rounded = bool(program.float_dtypes() - {torch.float32, torch.float64})
    for kind, ours in ((ResultKind.LOSS, step.loss), (ResultKind.COUNT, step.count)):
        if not abs(float(ours) - sums[kind]) <= _LOSS_TOLERANCE[rounded] * max(1.0, abs(sums[kind])):
            raise CaptureError(
                f"model: the {kind.value} of the compiled units is {float(ours):.6g}, and that of their graphs "
                f"{sums[kind]:.6g}: {_reason(program, artifact)}"
            )
    largest = max((float(each.norm()) for each in gradients.values()), default=0.0)
    otherwise: Tensors | None = None
    for name, expected in gradients.items():
        if not bool(expected.isfinite().all()):
            raise CaptureError(f"model: the gradient of {name} is not finite: {WHERE_INFINITE}")
        found = step.gradients.get(name, torch.zeros_like(expected))
        off = float((found.double() - expected.double()).norm())
        if not off <= _GRADIENT_TOLERANCE[rounded] * max(float(expected.norm()), 1e-3 * largest):
            if rounded and off <= _GRADIENT_TOLERANCE[rounded] * largest:
                if otherwise is None:
                    _, otherwise = _of_graphs(program, rounded_otherwise(program, state), batch, keys)
                noise = otherwise.get(name, torch.zeros(())).double() - expected.double()
                if off <= TIMES_NOISE * float(noise.norm()):
                    continue
            raise CaptureError(
                f"model: the gradient of {name} has norm {float(found.norm()):.6g} by the compiled units, and "
                f"{float(expected.norm()):.6g} by their graphs: {_reason(program, artifact)}"
            )


def _of_graphs(
    program: Program, state: Tensors, batch: Tensors, keys: torch.Tensor
) -> tuple[dict[ResultKind, float], dict[str, torch.Tensor]]:
    trained = {name: state[name].clone().requires_grad_() for name, spec in program.params.items() if spec.trainable}
    found = interpret_units(program, {**state, **trained}, batch, keys, lambda unit: (unit.graph, unit.results))
    sums = {kind: found[kind.value] for kind in (ResultKind.LOSS, ResultKind.COUNT)}
    derived = torch.autograd.grad(sums[ResultKind.LOSS], list(trained.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(trained, derived, strict=True) if gradient is not None}
    return {kind: float(value.detach()) for kind, value in sums.items()}, gradients


def _reason(program: Program, artifact: Artifact) -> str:
    """The likely reason. Operators that no unit calls were decomposed; those of a loss are the last."""
    trained = [each for name, each in artifact.programs.items() if not name.endswith(".evaluate")]
    called = {instruction["op"] for each in trained for instruction in each["instructions"]}
    names = dict.fromkeys(str(node.target).rsplit(".", 1)[0] for node in calls(program.graph.graph)
                          if isinstance(value_of(node), torch.Tensor))  # fmt: skip
    apart = [name for name in names if name.startswith("aten.") and name.replace(".", "::", 1) not in called]
    own = dict.fromkeys(str(node.target) for node in calls(program.graph.graph) if is_foreign(node))
    drawn = f", or {' or '.join(own)} draws random numbers itself, which it has to get as an argument" if own else ""
    return (
        "torch takes an operator apart into others that compute something else "
        f"(among them {', '.join(apart[-3:]) or 'none'}){drawn}; a way out is to write that part with other operators"
    )
