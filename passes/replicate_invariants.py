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

from elaswave_fx.program.batch_size import batch_symbol, fixed_shape, sample_dims, sized_axis
from elaswave_fx.program.dependence import Nature, natures
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
from elaswave_fx.program.sized_values import SHAPE_ONLY, SizedValues, many_samples

aten = torch.ops.aten
_TRIAL_SIZES = (2, 3)


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
        self.values = SizedValues(program)
        self.fixed, self.sized = self.values.fixed, self.values.sized
        self.clones: dict[fx.Node, Any] = {}

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
        one = self.values.at(node, 1)
        many = many_samples(one) if one is not None else 0
        for size in (*_TRIAL_SIZES, max(many, *_TRIAL_SIZES)):
            tried = self.values.at(node, size) if one is not None else None
            if tried is None or one is None or not torch.equal(one.expand_as(tried), tried):
                return False
        return True

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
        if is_aten(node, *SHAPE_ONLY):
            like = value_of(args[0])  # type: ignore[arg-type]
            shape = fixed_shape(like, self.symbol, 1)
            args[0] = emit(self.graph, aten.zeros.default, shape, dtype=like.dtype, device=like.device)
            rest, kwargs = fx.map_arg((tuple(args[1:]), node.kwargs), self._clone)
            return emit(self.graph, node.target, args[0], *rest, like=node, **kwargs)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._clone)
        return emit(self.graph, node.target, *args, like=node, **kwargs)
