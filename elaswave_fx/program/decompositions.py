"""Operators that an export writes out as others, in functional form.

    decompositions()   ->  {aten.lstm.input: …, aten.one_hot.default: …}, for ExportedProgram.run_decompositions

Most have a backward pass that takes sizes as plain numbers, or none. Under autocast their parts are cast as in eager
code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from elaswave_fx.program.autocast import composites_under_autocast, decompositions_under_autocast

aten = torch.ops.aten

_RECURRENT = [aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]
"""One call per step."""
_COMPOSITE = (aten.einsum.default, aten.gru_cell.default, aten.lstm_cell.default, aten.rnn_tanh_cell.default,
              aten.rnn_relu_cell.default)  # fmt: skip
"""Composite operators that are written out in any precision; autocast casts the products in them. What it does not know
besides stays whole: `composites_under_autocast`."""
_WITHOUT_COMPLEX_DERIVATIVE = (aten.slice_scatter.default, aten.select_scatter.default)
"""What `x[:, :n] = y` becomes in an export; of complex tensors, only the assignment has a derivative."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table, for autocast as it is on or off now."""
    return decompositions_under_autocast(
        {
            **get_decompositions(_RECURRENT),
            aten.one_hot.default: _one_hot,
            aten.sgn.default: _sign,
            aten.affine_grid_generator.default: _affine_grid,
            **{op: functools.partial(_by_torch, op) for op in _COMPOSITE},
            **{op: functools.partial(_as_pairs, op) for op in _WITHOUT_COMPLEX_DERIVATIVE},
            aten._conj.default: torch.conj_physical,  # view_as_real refuses the view
            **composites_under_autocast(),
        }
    )


def _by_torch(op: torch._ops.OpOverload, *args: Any) -> Any:
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def _as_pairs(op: torch._ops.OpOverload, x: Tensor, part: Tensor, dim: int = 0, *where: Any) -> Any:
    """The operator on pairs of real and imaginary parts, if `x` is complex."""
    if not x.is_complex():
        return NotImplemented
    pairs = [torch.view_as_real(each.to(x.dtype)) for each in (x, part)]
    return torch.view_as_complex(op(*pairs, dim % x.dim(), *where))


def _one_hot(index: Tensor, classes: int) -> Tensor:
    """One-hot encoding that raises for a class out of range, as eager code does; torch's gives zeros without data."""
    return index.new_zeros((*index.shape, classes)).scatter(-1, index.unsqueeze(-1), 1)


def _sign(x: Tensor) -> Tensor:
    """The sign of real numbers, whose derivative is for any size."""
    return NotImplemented if x.is_complex() else torch.sign(x)


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """The grid [samples, *size[2:], coordinates], by a matrix product, as eager code has it: autocast rounds that."""
    lines = [_line(steps, align_corners, theta) for steps in size[2:]]
    points = torch.meshgrid(*lines, indexing="ij")
    points = torch.stack((*reversed(points), torch.ones_like(points[0])), -1).flatten(0, -2)
    return points.expand(size[0], -1, -1).bmm(theta.mT).view(size[0], *size[2:], len(lines))


def _line(steps: int, align_corners: bool, like: Tensor) -> Tensor:
    """Coordinates of pixels along one axis: of their centers, or so that the outermost are at -1 and 1."""
    if steps <= 1:
        return like.new_zeros(steps)
    line = torch.linspace(-1, 1, steps, dtype=like.dtype, device=like.device)
    return line if align_corners else line * (steps - 1) / steps
