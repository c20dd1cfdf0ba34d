"""Values that depend on the number of samples alone, computed at other numbers.

torch.arange(B) // 8, at 3 samples -> [0, 0, 0]
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from elaswave_fx.program.batch_size import batch_symbol, fixed_shape
from elaswave_fx.program.dependence import Nature, constant_value, natures
from elaswave_fx.program.ir import Program, calls, draws_randomness, is_aten, value_of

# Operators that use only the shape, dtype and device of their first argument.
SHAPE_ONLY = (
    "aten.sym_size", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros",
    "aten.new_ones", "aten.new_full",
)  # fmt: skip
_MOST_SAMPLES, _MOST_ELEMENTS = 4096, 1 << 21
"""Bounds of a trial for values that differ only in large batches."""


class SizedValues:
    """`fixed`: values of constants, whatever the batch. `sized`: those of the number of samples, and of nothing else
    that varies."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._symbol = batch_symbol(program)
        self.fixed = {node for node, nature in natures(program).items() if nature == Nature.FIXED}
        self.sized: set[fx.Node] = set()
        for node in calls(program.graph.graph):
            if node in self.fixed or draws_randomness(node):
                continue
            inputs = node.all_input_nodes[1:] if is_aten(node, *SHAPE_ONLY) else node.all_input_nodes
            if all(source in self.sized or source in self.fixed for source in inputs):
                self.sized.add(node)

    def at(self, node: fx.Node, samples: int) -> torch.Tensor | None:
        """The value of a node of `sized`; None if it reads a buffer, whose data is not available, or has none at that
        number of samples, as has a table of 16 rows of more."""

        def blank(call: fx.Node) -> tuple[fx.Node, torch.Tensor] | None:
            """Zeros for an argument whose shape alone matters."""
            if not is_aten(call, *SHAPE_ONLY):
                return None
            like = call.args[0]
            assert isinstance(like, fx.Node)
            shape = fixed_shape(value_of(like), self._symbol, samples)
            return like, torch.zeros(shape, dtype=value_of(like).dtype)

        with contextlib.suppress(Exception):  # whatever operators raise at another size
            return constant_value(self._program, node, blank)
        return None


def many_samples(one: torch.Tensor) -> int:
    """A large number of samples, for values of as many elements as `one` has for a sample."""
    return min(_MOST_SAMPLES, _MOST_ELEMENTS // max(1, one.numel()))
