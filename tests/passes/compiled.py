"""Compile a small model by the real passes and run its units one after another, as fx graphs and as native programs.

result = compile_model(Tiny(), batches(granule=2))
run_units(result, batch).gradients["head.weight"]     # the units' split derivatives, chained
eager(model, batch).gradients["head.weight"]          # plain autograd
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from elaswave_fx.build.unit_sequence import UnitSequence
from elaswave_fx.passes.lower import lower
from elaswave_fx.passes.pipeline import STANDARD, run_passes
from elaswave_fx.passes.recompute import Derivative, Policy, Recompute
from elaswave_fx.passes.split_backward import SplitBackward
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.batch_run import graph_input
from elaswave_fx.program.capture import capture
from elaswave_fx.program.ir import Program, ResultKind, Role, Source, Unit, placeholders, source_of

Tensors = dict[str, torch.Tensor]
MakeBatch = Callable[[int, int], Tensors]
"""(samples, seed) -> a batch."""


@dataclass(frozen=True)
class Compiled:
    """A model, its program with split derivatives, and what it was captured with."""

    model: nn.Module
    program: Program
    differentiated: Program
    state: Tensors
    batch: Tensors

    def with_policy(self, policy: Policy) -> Compiled:
        return replace(self, program=SplitBackward().apply(Recompute(policy).apply(self.differentiated)))


@dataclass(frozen=True)
class Pass:
    """Sums and gradients of one batch; `folds`: the values that mutable buffers are to be updated with."""

    loss: float
    count: float
    gradients: Tensors
    folds: dict[tuple[str, int], torch.Tensor]


def state_of(model: nn.Module) -> Tensors:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def captured(model: nn.Module, make: MakeBatch, granule: int = 2) -> Program:
    """The program before any pass."""
    return capture(model, (make(2 * granule, 1), make(3 * granule, 2)), granule)


def run_graph(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    keys: torch.Tensor | None = None,
    step_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The results of a program that is not cut into units yet."""
    keys = keys_for(len(next(iter(batch.values())))) if keys is None else keys
    inputs = []
    for node in placeholders(program.graph.graph):
        alone = step_keys is not None and source_of(node).role == Role.STEP_KEYS
        inputs.append(step_keys if alone else graph_input(program, state_of(model), batch, keys, node))
    with torch.no_grad():
        return program.graph(*inputs)


def front(model: nn.Module, make: MakeBatch, granule: int = 1) -> Program:
    """Capture and the passes before units exist, without judging couplings."""
    return run_passes(captured(model, make, granule), STANDARD.before("find_couplings").passes)[0]


def compile_model(model: nn.Module, make: MakeBatch, granule: int = 1) -> Compiled:
    """All passes, with nothing recomputed."""
    torch.manual_seed(0)
    batch = make(2 * granule, 1)
    state = state_of(model)
    differentiated, _ = run_passes(captured(model, make, granule), STANDARD.before("recompute").passes)
    return Compiled(model, differentiated, differentiated, state, batch).with_policy("none")


def artifact_of(compiled: Compiled) -> Artifact:
    return lower(compiled.program, lambda name, spec: int(len(spec.shape) < 2), True)


def keys_for(samples: int) -> torch.Tensor:
    return torch.arange(1, samples + 1, dtype=torch.int64) * 7919


def run_units(compiled: Compiled, batch: Mapping[str, torch.Tensor], halves: bool = False) -> Pass:
    """Forward through all units in order, backward in the opposite one, as interpreted fx graphs.

    `halves`: all first halves of backward passes, then all second ones.
    """
    program = compiled.program
    keys = keys_for(len(next(iter(batch.values()))))
    found: dict[Any, Any] = {Source(Role.KEYS): keys, Source(Role.STEP_KEYS): keys[:1]}
    found |= {Source(Role.INPUT, name): tensor for name, tensor in batch.items()}
    found |= {Source(Role.CONSTANT, name): tensor for name, tensor in program.tensors.items()}
    for name, tensor in compiled.state.items():
        found |= {Source(Role.PARAM, name): tensor, Source(Role.BUFFER, name): tensor}
    invariants = program.invariants
    assert invariants is not None
    made = invariants(*(found[source_of(node)] for node in placeholders(invariants.graph)))
    found |= {Source(Role.CONSTANT, n): t for n, t in zip(invariants.meta["names"], made, strict=True)}
    saved = {}
    folds: dict[tuple[str, int], torch.Tensor] = {}
    for unit in program.units:
        split: Derivative = program.kinds[unit.kind]
        outputs = split.forward(*(found[source] for source in unit.sources))
        for result, output in zip(unit.results, outputs, strict=False):
            if result.kind == ResultKind.FOLD:
                folds[result.name, result.number] = output
            elif result.kind == ResultKind.VALUE:
                assert output.is_contiguous(), f"{result.name} crosses with strides {output.stride()}"
                found[Source(Role.VALUE, result.name)] = output
            else:
                found[result.kind] = output
        saved[unit.index] = outputs[len(unit.results) :]
    gradients = _run_backward(program, saved, halves)
    loss, count = found[ResultKind.LOSS], found[ResultKind.COUNT]
    return Pass(float(loss), float(count), gradients, folds)


def _run_backward(program: Program, saved: Mapping[int, Any], halves: bool) -> Tensors:
    gradients: dict[Source, torch.Tensor] = {}

    def add(unit: Unit, found: Sequence[Any]) -> None:
        for source, gradient in zip(unit.sources, found, strict=True):
            if gradient is not None:
                assert source.role != Role.VALUE or gradient.is_contiguous()
                gradients[source] = gradients[source] + gradient if source in gradients else gradient

    held = {}
    for unit in reversed(program.units):
        split: Derivative = program.kinds[unit.kind]
        if split.backward is None:
            continue
        tangents = [
            torch.ones(()) if result.kind == ResultKind.LOSS else gradients[Source(Role.VALUE, result.name)]
            for result, wanted in zip(unit.results, unit.grad_results, strict=True)
            if wanted
        ]
        if halves:
            assert split.halves is not None
            found = split.halves.inputs(*saved[unit.index], *tangents)
            add(unit, found[: len(unit.sources)])
            held[unit.index] = found[len(unit.sources) :]
        else:
            add(unit, split.backward(*saved[unit.index], *tangents))
    for unit in reversed(program.units):
        second = program.kinds[unit.kind].halves
        if unit.index in held and second.weights is not None:
            add(unit, second.weights(*held[unit.index]))
    return {source.name: gradient for source, gradient in gradients.items() if source.role == Role.PARAM}


def run_native(compiled: Compiled, batch: Mapping[str, torch.Tensor], halves: bool = False) -> Pass:
    """The same by the lowered programs and the native executor, each unit's second half right after its first."""
    units = UnitSequence(artifact_of(compiled), compiled.program.tensors, lambda name: compiled.state[name], halves)
    step = units.step(batch, keys_for(len(next(iter(batch.values())))))
    return Pass(float(step.loss), float(step.count), dict(step.gradients), {})


def eager(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Pass:
    """Plain autograd of the loss sum, on a copy of the model."""
    model = copy.deepcopy(model).train()
    loss, count = model(**batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Pass(float(loss.detach()), float(count), gradients, {})


def assert_same(ours: Pass, theirs: Pass, tolerance: float = 2e-5) -> None:
    """Sums and every gradient agree; neither side has a gradient that the other lacks."""
    assert abs(ours.loss - theirs.loss) <= tolerance * max(1.0, abs(theirs.loss)), (ours.loss, theirs.loss)
    assert ours.count == theirs.count
    assert ours.gradients.keys() == theirs.gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in theirs.gradients.values())
    for name, expected in theirs.gradients.items():
        difference = float((ours.gradients[name].float() - expected.float()).abs().max())
        assert difference <= tolerance * scale, f"{name}: {difference:.3g} of {scale:.3g}"


def assert_bits(ours: Pass, theirs: Pass) -> None:
    """Sums and every gradient are equal bit for bit."""
    assert (ours.loss, ours.count) == (theirs.loss, theirs.count)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, expected in theirs.gradients.items():
        assert torch.equal(ours.gradients[name], expected), name


def calls_of(module: fx.GraphModule) -> list[str]:
    """The names of all operators of a graph, in order."""
    return [str(node.target).removesuffix(".default") for node in module.graph.nodes if node.op == "call_function"]
