"""The batch size as a symbol, and the dimensions whose sizes depend on it.

x [B, 64, 8], B symbolic   -> sample_dims 0
rows [64 * B, 8]           -> sized_axis (0, 64), fixed_shape at 3 samples (192, 8)
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from elaswave_fx.program.ir import Program, Role, placeholders, source_of, value_of


def batch_size(program: Program) -> torch.SymInt | None:
    """The batch size as a symbol; None when the program was captured at a fixed size."""
    for node in placeholders(program.graph.graph):
        if source_of(node).role == Role.INPUT and isinstance(value_of(node), torch.Tensor):
            size = value_of(node).shape[0]
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                return size
    return None


def batch_symbol(program: Program) -> sympy.Symbol | None:
    """The symbol of the batch size; None when the program was captured at a fixed size."""
    size = batch_size(program)
    return size.node.expr if size is not None else None


def sample_dims(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> list[int]:
    """The dimensions whose size depends on the batch size."""
    return [
        dim
        for dim, size in enumerate(tensor.shape)
        if symbol is not None and isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols
    ]


def sized_axis(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> tuple[int, int] | None:
    """The one dimension whose size is a whole multiple of the batch size, and the multiple; None if there is none."""
    dims = sample_dims(tensor, symbol)
    if len(dims) != 1:
        return None
    size: Any = tensor.shape[dims[0]]
    factor = size.node.expr.coeff(symbol)
    return (dims[0], int(factor)) if factor.is_Integer and size.node.expr == factor * symbol else None


def fixed_shape(tensor: torch.Tensor, symbol: sympy.Symbol | None, batch: int) -> tuple[int, ...]:
    """The shape for a batch of `batch` samples."""
    return tuple(
        int(size.node.expr.subs(symbol, batch)) if isinstance(size, torch.SymInt) else size for size in tensor.shape
    )
