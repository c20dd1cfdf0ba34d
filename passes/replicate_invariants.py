"""replicate_invariants: compute values that are the same for every sample once per rank, and only expand them.

Masks and tables are often written out for the whole batch although they depend on no sample. Such a value is built for
one sample instead, from constants alone; `cut_units` then makes it a constant that no block saves or sends.

    before: mask [B, 1, 64, 64] = arange(B) ... le ... expand
    after:  mask [1, 1, 64, 64] from constants; expand(mask, [B, 1, 64, 64])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.program.dependence import Nature, constant_value, natures
from elaswave_fx.program.ir import (
    Program,
    Role,
    calls,
    draws_randomness,
    emit,
    fixed_size,
    is_aten,
    placeholders,
    source_of,
    value_of,
)
from elaswave_fx.program.samples import batch_symbol, fixed_shape, sample_dims, sized_axis

aten = torch.ops.aten
# Operators that use only the shape, dtype and device of their first argument.
_SHAPE_ONLY = (
    "aten.sym_size", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros",
    "aten.new_ones", "aten.new_full",
)  # fmt: skip
_TRIAL_SIZES = (2, 3)
_MOST_SAMPLES, _MOST_ELEMENTS = 4096, 1 << 21
"""Bounds of a third trial, for values that differ only in large batches."""


@dataclass(frozen=True)
class ReplicateInvariants:
    """Build masks, rotary tables and the like once, not per block, and never save or send them."""

    name: ClassVar[str] = "replicate_invariants"

    def apply(self, program: Program) -> Program:
        program = program.clone()
        if batch_symbol(program) is not None:
            _Hoister(program).run()
        _merge_equal(program)
        program.graph.graph.eliminate_dead_code()
        program.graph.recompile()
        return program


def _merge_equal(program: Program) -> None:
    """Merge equal calls on equal constants: every block writes out its own mask and table."""
    kinds = natures(program)
    first: dict[str, fx.Node] = {}
    for node in list(calls(program.graph.graph)):
        if kinds[node] == Nature.FIXED and isinstance(value_of(node), torch.Tensor) and not draws_randomness(node):
            same = first.setdefault(f"{node.target} {node.args} {sorted(node.kwargs.items())}", node)
            if same is not node:
                node.replace_all_uses_with(same)
                program.graph.graph.erase_node(node)


class _Hoister:
    """Finds values that depend only on the batch size, tests them at some sizes, and rebuilds those that do not
    vary."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph.graph
        self.symbol = batch_symbol(program)
        self.fixed = {n for n, nature in natures(program).items() if nature == Nature.FIXED}
        self.sized = self._sized()
        self.clones: dict[fx.Node, Any] = {}

    def _sized(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in calls(self.graph):
            if node in self.fixed or draws_randomness(node):
                continue
            inputs = node.all_input_nodes[1:] if is_aten(node, *_SHAPE_ONLY) else node.all_input_nodes
            if all(source in found or source in self.fixed for source in inputs):
                found.add(node)
        return found

    def run(self) -> None:
        for node in list(calls(self.graph)):
            if node not in self.sized or not isinstance(value_of(node), torch.Tensor):
                continue
            if all(user in self.sized for user in node.users) or self._is_expanded_constant(node):
                continue
            if self._same_for_all(node):
                self._replace(node)

    def _is_expanded_constant(self, node: fx.Node) -> bool:
        return is_aten(node, "aten.expand") and node.args[0] in self.fixed

    def _same_for_all(self, node: fx.Node) -> bool:
        sized = sized_axis(value_of(node), self.symbol)
        if sized is None or sized[1] != 1:
            return False
        one = self._trial(node, 1)
        many = min(_MOST_SAMPLES, _MOST_ELEMENTS // max(1, one.numel())) if one is not None else 0
        for size in (*_TRIAL_SIZES, max(many, *_TRIAL_SIZES)):
            tried = self._trial(node, size) if one is not None else None
            if tried is None or one is None or not torch.equal(one.expand_as(tried), tried):
                return False
        return True

    def _trial(self, node: fx.Node, batch: int) -> torch.Tensor | None:
        """The value at a concrete batch size; None if it reads a buffer, whose data is not available."""

        def blank(call: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
            """Zeros for an argument whose shape alone matters."""
            if not is_aten(call, *_SHAPE_ONLY):
                return None
            like = call.args[0]
            assert isinstance(like, fx.Node)
            shape = fixed_shape(value_of(like), self.symbol, batch)
            return like, torch.zeros(shape, dtype=value_of(like).dtype)

        return constant_value(self.program, node, blank)

    def _replace(self, node: fx.Node) -> None:
        value = value_of(node)
        axis = sample_dims(value, self.symbol)[0]
        source = next(n for n in placeholders(self.graph) if source_of(n).role == Role.INPUT)
        with self.graph.inserting_before(node):
            single = self._clone(node)
            size = emit(self.graph, aten.sym_size.int, source, 0)
            sizes = [size if dim == axis else fixed_size(extent) for dim, extent in enumerate(value.shape)]
            wide = emit(self.graph, aten.expand.default, single, sizes, like=node)
        node.replace_all_uses_with(wide)

    def _clone(self, node: fx.Node) -> Any:
        """The same computation for one sample; integers become plain numbers."""
        if node in self.fixed:
            return node
        if node not in self.clones:
            value = value_of(node)
            if isinstance(value, (torch.SymInt, int)):
                symbolic = isinstance(value, torch.SymInt)
                self.clones[node] = int(value.node.expr.subs(self.symbol, 1)) if symbolic else value
            else:
                self.clones[node] = self._clone_call(node)
        return self.clones[node]

    def _clone_call(self, node: fx.Node) -> fx.Node:
        args = list(node.args)
        if is_aten(node, *_SHAPE_ONLY):
            like = value_of(args[0])  # type: ignore[arg-type]
            shape = fixed_shape(like, self.symbol, 1)
            args[0] = emit(self.graph, aten.zeros.default, shape, dtype=like.dtype, device=like.device)
            rest, kwargs = fx.map_arg((tuple(args[1:]), node.kwargs), self._clone)
            return emit(self.graph, node.target, args[0], *rest, like=node, **kwargs)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._clone)
        return emit(self.graph, node.target, *args, like=node, **kwargs)
