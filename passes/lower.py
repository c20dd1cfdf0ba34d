"""lower: a compiled program becomes an artifact: native programs by name, buckets, and bindings of every unit.

Names are kept for kinds and tensors; places are indices from here on:

    kind 825237634c01eb8e -> programs "825237634c01eb8e.forward", ".backward", ".evaluate", and where the pipeline
                             splits the backward programs ".backward_inputs", ".backward_weights"
    unit 3 -> inputs (("value", 2), ("param", 5, 0, (64,)), ...), grads (("value", 2), ("param", 5, 0, (64,)), ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from elaswave_fx.passes.cut_units import draws_of
from elaswave_fx.passes.estimate_cost import value_bytes, view_base
from elaswave_fx.passes.evaluate import evaluation_graph, evaluation_results
from elaswave_fx.passes.recompute import Derivative
from elaswave_fx.passes.unit_program import lower_graph
from elaswave_fx.program.artifact import (
    Artifact,
    Binding,
    BucketBuffer,
    BucketParam,
    BucketSpec,
    FoldSpec,
    TensorInfo,
    UnitSpec,
    ValueSpec,
)
from elaswave_fx.program.batch_size import batch_symbol, fixed_shape
from elaswave_fx.program.ir import (
    Fold,
    ParamSpec,
    Program,
    Result,
    ResultKind,
    Role,
    Source,
    Unit,
    calls,
    flops_of,
    output_nodes,
    placeholders,
    source_of,
    value_of,
)
from elaswave_fx.program.text import program_text

GroupOf = Callable[[str, ParamSpec], int]
_WORD, _ALIGNMENT = 4, 8
"""Bytes of an element of a bucket of buffers, and alignment of buffers in bytes."""


def lower(program: Program, group_of: GroupOf, evaluation_exact: bool) -> Artifact:
    """The artifact of a program whose kinds are split derivatives.

    `group_of` gives the optimizer group of a parameter; `evaluation_exact`: whether the derived evaluation graph equals
    the model in evaluation mode.
    """
    buckets = (*make_buckets(program, group_of), *make_buffer_buckets(program))
    binder = _Binder(program, buckets)
    programs: dict[str, Any] = {}
    for unit in program.units:
        if f"{unit.kind}.forward" not in programs:
            programs |= _programs(unit, program.kinds[unit.kind])
    for fold in program.folds:
        programs[f"fold.{fold.buffer}"] = lower_graph(f"fold.{fold.buffer}", fold.graph)
    assert program.invariants is not None
    programs["invariants"] = lower_graph("invariants", program.invariants)
    return Artifact(
        granule=program.granule,
        batch_coupled=program.batch_coupled,
        whole_batch=program.whole_batch,
        inputs=tuple(source_of(n).name for n in placeholders(program.graph.graph) if source_of(n).role == Role.INPUT),
        params=tuple(_info(name, spec, spec.aliases) for name, spec in program.params.items()),
        buffers=tuple(_info(name, spec) for name, spec in program.buffers.items()),
        programs=programs,
        units=tuple(binder.unit(unit) for unit in program.units),
        values=tuple(
            ValueSpec(
                v.name, v.producer, v.consumers, v.shape, _dtype(v.dtype),
                v.sample_axis.axis if v.sample_axis else -1, v.has_grad, v.bytes_per_sample,
            )
            for v in program.values
        ),
        buckets=buckets,
        folds=tuple(_fold(program, fold) for fold in program.folds),
        invariant_inputs=tuple(binder.source(source_of(n)) for n in placeholders(program.invariants.graph)),
        invariant_names=program.invariants.meta["names"],
        draws=tuple(draws_of(program.units)),
        evaluation_exact=evaluation_exact,
        text=program_text(program),
        notes=program.notes,
    )  # fmt: skip


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _info(name: str, spec: Any, aliases: tuple[str, ...] = ()) -> TensorInfo:
    return TensorInfo(name, spec.shape, _dtype(spec.dtype), aliases)


def _fold(program: Program, fold: Fold) -> FoldSpec:
    return FoldSpec(fold.buffer, fold.unit, _fold_values(program, fold), fold.per_step)


def _fold_values(program: Program, fold: Fold) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(dtype, shape) of the values that one granule yields."""
    values = [value_of(node) for node in placeholders(fold.graph.graph)[1:]]
    symbol = batch_symbol(program)
    return tuple((_dtype(value.dtype), fixed_shape(value, symbol, program.granule)) for value in values)


def _programs(unit: Unit, derivative: Derivative) -> dict[str, Any]:
    made = {f"{unit.kind}.forward": lower_graph(f"{unit.kind}.forward", derivative.forward)}
    if derivative.backward is not None:
        made[f"{unit.kind}.backward"] = lower_graph(f"{unit.kind}.backward", derivative.backward)
    if derivative.halves is not None:
        parts = {"inputs": derivative.halves.inputs, "weights": derivative.halves.weights}
        names = {f"{unit.kind}.backward_{part}": graph for part, graph in parts.items() if graph is not None}
        made |= {name: lower_graph(name, graph) for name, graph in names.items()}
    made[f"{unit.kind}.evaluate"] = lower_graph(f"{unit.kind}.evaluate", evaluation_graph(unit))
    return made


def make_buckets(program: Program, group_of: GroupOf) -> tuple[BucketSpec, ...]:
    """Trained parameters by (unit, optimizer group, dtype) in order of first use; tied parameters separately, with all
    users."""
    users: dict[str, list[int]] = {}
    for unit in program.units:
        for source, trained in zip(unit.sources, unit.grad_inputs, strict=True):
            if source.role == Role.PARAM and trained:
                users.setdefault(source.name, []).append(unit.index)
    members: dict[tuple[Any, ...], list[str]] = {}
    for name, indices in users.items():
        group = group_of(name, program.params[name])
        key = (indices[0], group, "" if len(indices) == 1 else name, _dtype(program.params[name].dtype))
        members.setdefault(key, []).append(name)
    return tuple(
        _bucket(program, key, names, tuple(users[names[0]]))
        for key, names in sorted(members.items(), key=lambda item: item[0])
    )


def _bucket(program: Program, key: tuple[Any, ...], names: list[str], users: tuple[int, ...]) -> BucketSpec:
    unit, group, tied, dtype = key
    offset, params = 0, []
    for name in names:
        shape = program.params[name].shape
        params.append(BucketParam(name, offset, shape))
        offset += math.prod(shape)
    label = f"tied.{tied}" if tied else f"unit{unit}.group{group}" + (f".{dtype}" if dtype != "float32" else "")
    return BucketSpec(label, group, offset, tuple(params), users, dtype=dtype)


def make_buffer_buckets(program: Program) -> tuple[BucketSpec, ...]:
    """Buffers that training changes: by their updating unit; by all reading units where others read them too; separate
    if they change once per step."""
    readers = {
        fold.buffer: {unit.index for unit in program.units if Source(Role.BUFFER, fold.buffer) in unit.sources}
        for fold in program.folds
    }
    members: dict[tuple[int, ...], list[str]] = {}
    for fold in program.folds:
        users = tuple(sorted(readers[fold.buffer] | {fold.unit}))
        members.setdefault((fold.per_step, fold.unit, *users), []).append(fold.buffer)
    return tuple(_buffer_bucket(program, key, names) for key, names in sorted(members.items()))


def _buffer_bucket(program: Program, key: tuple[int, ...], names: list[str]) -> BucketSpec:
    per_step, unit, *users = key
    offset, buffers = 0, []
    for name in names:
        spec = program.buffers[name]
        buffers.append(BucketBuffer(name, offset, spec.shape, _dtype(spec.dtype)))
        offset += -(-math.prod(spec.shape) * spec.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // _WORD
    label = f"unit{unit}.{'step_' if per_step else ''}buffers" + "".join(f".{user}" for user in users if user != unit)
    return BucketSpec(label, 0, offset, (), tuple(users), tuple(buffers))


class _Binder:
    """Translates sources and results of units to bindings of the runtime."""

    def __init__(self, program: Program, buckets: tuple[BucketSpec, ...]) -> None:
        self.program = program
        self.values = {value.name: index for index, value in enumerate(program.values)}
        self.places = {p.name: (index, p.offset) for index, bucket in enumerate(buckets) for p in bucket.params}
        self.buffers = {b.name: (index, b) for index, bucket in enumerate(buckets) for b in bucket.buffers}
        self.folds = {fold.buffer: index for index, fold in enumerate(program.folds)}

    def source(self, source: Source) -> Binding:
        if source.role == Role.PARAM and source.name in self.places:
            return ("param", *self.places[source.name], self.program.params[source.name].shape)
        if source.role == Role.PARAM:
            return ("frozen", source.name)
        if source.role == Role.BUFFER and source.name in self.buffers:
            bucket, buffer = self.buffers[source.name]
            return ("mutable", bucket, buffer.offset, buffer.shape, buffer.dtype)
        if source.role == Role.VALUE:
            return ("value", self.values[source.name])
        if source.role in (Role.KEYS, Role.STEP_KEYS):
            return (source.role.value,)
        return (source.role.value, source.name)

    def result(self, result: Result) -> Binding:
        if result.kind == ResultKind.VALUE:
            return ("value", self.values[result.name])
        if result.kind == ResultKind.FOLD:
            return ("fold", self.folds[result.name], result.number)
        return (result.kind.value,)

    def unit(self, unit: Unit) -> UnitSpec:
        derivative = self.program.kinds[unit.kind]
        gradients = [None] * len(unit.sources)
        if derivative.backward is not None:
            gradients = output_nodes(derivative.backward.graph)
        grads = [
            self.source(source) if gradient is not None else ("none",)
            for source, gradient in zip(unit.sources, gradients, strict=True)
        ]
        return UnitSpec(
            unit.index,
            unit.kind,
            tuple(self.source(source) for source in unit.sources),
            tuple(self.result(result) for result in unit.results),
            tuple(self.result(result) for result in evaluation_results(unit)),
            tuple(grads),
            derivative.num_saved,
            sum(flops_of(node) for node in calls(unit.graph.graph)),
            *_kept_bytes(unit, derivative, 1 if self.program.dynamic_batch else self.program.granule),
            derivative.halves.num_held if derivative.halves is not None else 0,
            derivative.halves.weights_share if derivative.halves is not None else 0.0,
        )


def _kept_bytes(unit: Unit, derivative: Derivative, batch: int) -> tuple[int, int]:
    """Bytes per sample kept for backward, and between its halves, without what is kept anyway (parameters, constants).
    Views count as their base, once."""
    anyway = {
        node for node, source in zip(placeholders(derivative.forward.graph), unit.sources, strict=True)
        if source.role in (Role.PARAM, Role.CONSTANT, Role.BUFFER)
    }  # fmt: skip
    saved = output_nodes(derivative.forward.graph)[len(unit.results) :]
    if derivative.halves is None:
        return _bytes_of(saved, anyway) // batch, 0
    given = placeholders(derivative.halves.inputs.graph)
    lasting = {node for node, kept in zip(given, saved, strict=False) if kept in anyway}
    held = output_nodes(derivative.halves.inputs.graph)[len(unit.sources) :]
    return _bytes_of(saved, anyway) // batch, _bytes_of(held, lasting) // batch


def _bytes_of(nodes: Sequence[fx.Node | None], anyway: set[fx.Node]) -> int:
    """Bytes of the memory behind these values, each piece once."""
    return sum(value_bytes(value_of(base)) for base in {view_base(n) for n in nodes if n is not None} - anyway)
