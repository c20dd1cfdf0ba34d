"""cut_units: make every unit a separate graph, closed over the values that it can recompute.

Values that depend on no sample are computed once per rank and read as constants. Values of only inputs or only
parameters are recomputed in each unit that reads them. So only true activations cross a border, always contiguous.

    unit 3 of a GPT: (value h2, params, keys) -> (value h3)
    unit 9, the head: (value h8, params, input labels) -> (loss, count)
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.batch_size import fixed_shape, sized_axis
from elaswave_fx.program.data_sizes import number_of_values
from elaswave_fx.program.dependence import Nature, gradient_nodes, natures
from elaswave_fx.program.ir import (
    BorderValue,
    Program,
    Result,
    ResultKind,
    Role,
    Source,
    Unit,
    calls,
    emit,
    may_be_view,
    mean_of,
    output_nodes,
    placeholders,
    set_source,
    source_of,
    statistics_of,
    unit_of,
    value_of,
)
from elaswave_fx.program.keyed_draws import draw_index, draws, set_draw_index
from elaswave_fx.program.samples import locate_samples, per_sample_shape

aten = torch.ops.aten


@dataclass(frozen=True)
class CutUnits:
    """Build one graph per unit, the values between units, and the graph that every rank computes once."""

    name: ClassVar[str] = "cut_units"

    def apply(self, program: Program) -> Program:
        cutter = _Cutter(program)
        units = tuple(cutter.unit(index) for index in range(program.num_units))
        folds = tuple(replace(fold, unit=cutter.fold_unit(fold.buffer)) for fold in program.folds)
        return replace(
            program, units=units, values=tuple(cutter.values()), folds=folds, invariants=cutter.invariant_graph()
        )


def draws_of(units: tuple[Unit, ...]) -> list[tuple[int, int]]:
    """(unit, index of the draw in the unit) of every random draw, in the order of execution."""
    return [(unit.index, draw_index(node)) for unit in units for node in draws(unit.graph.graph)]


class _Cutter:
    """State shared by all units during the cut: natures, gradients, results by unit, invariants found so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.axes = locate_samples(program)
        self.symbol = self.axes.symbol
        self.natures = natures(program)
        self.gradients = gradient_nodes(program)
        self.buffers = {
            source_of(n).name: n for n in placeholders(program.graph.graph) if source_of(n).role == Role.BUFFER
        }
        self.invariants: dict[fx.Node, str] = {}
        self.results: dict[int, list[tuple[fx.Node, Result]]] = {}
        for node, result in self._returned():
            self.results.setdefault(self._result_unit(node, result), []).append((node, result))

    def _returned(self) -> list[tuple[fx.Node, Result]]:
        pairs = zip(output_nodes(self.program.graph.graph), self.program.results, strict=True)
        return [(node, result) for node, result in pairs if node is not None]

    def _result_unit(self, node: fx.Node, result: Result) -> int:
        """The unit that gives a result: where it is computed; for a fold, the last unit that computes one of its
        values."""
        nodes = [node]
        if result.kind == ResultKind.FOLD:
            nodes = [n for n, r in self._returned() if r.kind == ResultKind.FOLD and r.name == result.name]
        units = [unit for n in nodes if self.natures[n] == Nature.MAIN and (unit := unit_of(n)) is not None]
        if not units and result.kind == ResultKind.FOLD and result.name in self.buffers:
            units = [min(self._reading_units(self.buffers[result.name]), default=self.program.num_units - 1)]
        return max(units, default=self.program.num_units - 1)

    def _reading_units(self, node: fx.Node) -> set[int]:
        """The units that need a node, also through values that each of them recomputes."""
        found: set[int] = set()
        seen, waiting = {node}, [node]
        while waiting:
            for user in waiting.pop().users:
                unit = unit_of(user)
                if unit is not None:
                    found.add(unit)
                elif user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return found

    def fold_unit(self, buffer: str) -> int:
        given = [(u, r) for u, found in self.results.items() for _, r in found]
        units = [unit for unit, r in given if r.kind == ResultKind.FOLD and r.name == buffer]
        return max(units, default=self.program.num_units - 1)

    def unit(self, index: int) -> Unit:
        return _UnitBuilder(self, index).build()

    def readers(self, node: fx.Node) -> set[int]:
        """The units that read a node's value or return it as a result."""
        found = {unit for user in node.users if (unit := unit_of(user)) is not None}
        return found | {unit for unit, results in self.results.items() if any(n is node for n, _ in results)}

    def crossing(self, index: int) -> list[fx.Node]:
        """MAIN tensors of a unit that later units read, in graph order."""
        return [
            node
            for node in calls(self.program.graph.graph)
            if self.natures[node] == Nature.MAIN
            and unit_of(node) == index
            and isinstance(value_of(node), torch.Tensor)
            and any(unit > index for unit in self.readers(node))
        ]

    def values(self) -> list[BorderValue]:
        found = []
        for index in range(self.program.num_units):
            for node in self.crossing(index):
                value, axis = value_of(node), self.axes.sliceable(node)
                shape = per_sample_shape(value, axis) if axis else fixed_shape(value, self.symbol, self.program.granule)
                readers = tuple(sorted(self.readers(node) - {index}))
                found.append(BorderValue(node.name, index, readers, shape, value.dtype, axis, node in self.gradients))
        return found

    def invariant(self, node: fx.Node) -> Source:
        return Source(Role.CONSTANT, self.invariants.setdefault(node, f"invariant.{node.name}"))

    def invariant_graph(self) -> fx.GraphModule:
        """The graph from constants and buffers to every invariant; its outputs carry the names that units read."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}

        def copy(node: fx.Node) -> fx.Node:
            if node not in mapping:
                for source in node.all_input_nodes:
                    copy(source)
                mapping[node] = graph.node_copy(node, lambda n: mapping[n])
            return mapping[node]

        outputs = tuple(copy(node) for node in self.invariants)
        graph.output(outputs)
        _placeholders_first(graph)
        module = fx.GraphModule(torch.nn.Module(), graph)
        module.meta["names"] = tuple(self.invariants.values())
        return module


class _UnitBuilder:
    """Copies one unit's calls and, on demand, their inputs."""

    def __init__(self, cutter: _Cutter, index: int) -> None:
        self.cutter = cutter
        self.index = index
        self.graph = fx.Graph()
        self.mapping: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[Source, fx.Node] = {}
        self.grad_inputs: dict[Source, bool] = {}
        self.batch_size: fx.Node | None = None

    def build(self) -> Unit:
        program = self.cutter.program
        crossing = self.cutter.crossing(self.index)
        for node in calls(program.graph.graph):
            if self.cutter.natures[node] == Nature.MAIN and unit_of(node) == self.index:
                self._copy(node)
        results = [(node, Result(ResultKind.VALUE, node.name)) for node in crossing]
        results += self.cutter.results.get(self.index, [])
        self.graph.output(tuple(self._returned(node, result) for node, result in results))
        self.graph.eliminate_dead_code()
        _placeholders_first(self.graph)
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        for number, node in enumerate(draws(self.graph)):
            set_draw_index(node, number)
        module.recompile()
        sources = tuple(source_of(node) for node in placeholders(self.graph))
        grads_in = tuple(self.grad_inputs[source] for source in sources)
        grads_out = tuple(
            r.kind in (ResultKind.VALUE, ResultKind.LOSS) and n in self.cutter.gradients for n, r in results
        )
        kinds = tuple(result for _, result in results)
        return Unit(
            self.index, module, sources, kinds, grads_in, grads_out, self._hash(module, grads_in, grads_out, kinds)
        )

    def _returned(self, node: fx.Node, result: Result) -> fx.Node:
        """A contiguous result with memory of its own."""
        made = self._get(node)
        value = value_of(node)
        if result.kind != ResultKind.VALUE:
            return made
        if may_be_view(node) or not value.is_contiguous():
            return emit(self.graph, aten.clone.default, made, memory_format=torch.contiguous_format)
        # Kernels may return other strides than their shapes predicted: a no-op in most cases.
        return emit(self.graph, aten.contiguous.default, made)

    def _copy(self, node: fx.Node) -> fx.Node:
        self.mapping[node] = self.graph.node_copy(node, self._get)
        statistics = statistics_of(node)
        for name in statistics or ():
            self._input(self.cutter.buffers[name])
        return self.mapping[node]

    def _get(self, node: fx.Node) -> fx.Node:
        if node in self.mapping:
            return self.mapping[node]
        if isinstance(value_of(node), torch.SymInt):
            self.mapping[node] = self._size(node)
        elif node.op == "placeholder":
            self.mapping[node] = self._input(node)
        elif self.cutter.natures[node] == Nature.MAIN:
            self.mapping[node] = self._value(node)
        elif self.cutter.natures[node] == Nature.FIXED and isinstance(value_of(node), torch.Tensor):
            self.mapping[node] = self._placeholder(self.cutter.invariant(node), value_of(node), False)
        else:
            self._copy(node)
        return self.mapping[node]

    def _input(self, node: fx.Node) -> fx.Node:
        source = source_of(node)
        trained = source.role == Role.PARAM and node in self.cutter.gradients
        return self._placeholder(source, value_of(node), trained)

    def _value(self, node: fx.Node) -> fx.Node:
        value = value_of(node)
        return self._placeholder(
            Source(Role.VALUE, node.name), value.new_empty(value.shape), node in self.cutter.gradients
        )

    def _placeholder(self, source: Source, value: Any, grad: bool) -> fx.Node:
        if source not in self.inputs:
            node = self.graph.placeholder(f"{source.role.value}_{len(self.inputs)}")
            node.meta["val"] = value
            set_source(node, source)
            self.inputs[source] = node
            self.grad_inputs[source] = grad
        return self.inputs[source]

    def _size(self, node: fx.Node) -> fx.Node:
        """A multiple of the batch size, taken from any input of this unit that carries samples."""
        factor = value_of(node).node.expr / self.cutter.symbol
        base = self._batch_size()
        if not factor.is_Integer or base is None:
            self._refuse_number(node)
            return self.graph.node_copy(node, self._get)
        return base if factor == 1 else emit(self.graph, operator.mul, base, int(factor))

    def _refuse_number(self, size: fx.Node) -> None:
        """Raise CaptureError for a size that depends on values of another unit."""
        read = [each for each in size.all_input_nodes if self.cutter.natures[each] == Nature.MAIN]
        if free_unbacked_symbols(value_of(size)) and any(unit_of(each) != self.index for each in read):
            refusal = number_of_values(self.cutter.program.graph.graph, "cannot be given to another unit")
            if refusal is not None:
                raise CaptureError(refusal)

    def _batch_size(self) -> fx.Node | None:
        if self.batch_size is None:
            carrier = self._carrier()
            if carrier is None:
                return None
            sized = sized_axis(value_of(carrier), self.cutter.symbol)
            assert sized is not None
            dim, factor = sized
            size = emit(self.graph, aten.sym_size.int, self._get(carrier), dim)
            self.batch_size = size if factor == 1 else emit(self.graph, operator.floordiv, size, factor)
        return self.batch_size

    def _carrier(self) -> fx.Node | None:
        """An input of this unit that holds samples: an incoming value before a program input."""
        reads: list[fx.Node] = []
        for node in calls(self.cutter.program.graph.graph):
            if self.cutter.natures[node] == Nature.MAIN and unit_of(node) == self.index:
                reads += [s for s in node.all_input_nodes if unit_of(s) != self.index or s.op == "placeholder"]
        good = [n for n in reads if n.op == "placeholder" or self.cutter.natures[n] == Nature.MAIN]
        good = [
            n for n in good if isinstance(value_of(n), torch.Tensor) and sized_axis(value_of(n), self.cutter.symbol)
        ]
        values = [n for n in good if n.op != "placeholder"]
        return next(iter(values or good), None)

    def _hash(self, module: fx.GraphModule, *flags: Any) -> str:
        symbol = str(self.cutter.symbol)
        grads_in, grads_out, kinds = flags
        lines = [f"{grads_in} {grads_out} {[(result.kind.value, result.number) for result in kinds]}"]
        numbers = {node: i for i, node in enumerate(module.graph.nodes)}
        for node in module.graph.nodes:
            args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
            role = source_of(node).role.value if node.op == "placeholder" else ""
            value = value_of(node)
            shape = f"{tuple(map(str, value.shape))} {value.dtype}" if isinstance(value, torch.Tensor) else ""
            lines.append(f"{node.op} {role or node.target} {args} {shape.replace(symbol, 'B')} {mean_of(node)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _placeholders_first(graph: fx.Graph) -> None:
    first: Callable[[], fx.Node] = lambda: next(iter(graph.nodes))  # noqa: E731
    for node in reversed([n for n in graph.nodes if n.op == "placeholder"]):
        if first() is not node:
            first().prepend(node)
