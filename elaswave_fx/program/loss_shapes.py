"""Shapes of losses under a symbolic batch size. torch's Python references for some composite losses read `reduction`, a
number, as another argument, and so take reduction="none" for a mean.

    with losses_by_their_kernels():
        exported.run_decompositions(…)      # nll_loss(scores, y, None, 0): [B], not []
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch._decomp import decomposition_table

_MISREAD = (
    torch.ops.aten.nll_loss.default,
    torch.ops.aten.margin_ranking_loss.default,
    torch.ops.aten.hinge_embedding_loss.default,
)


@contextlib.contextmanager
def losses_by_their_kernels() -> Iterator[None]:
    """Make fake tensors decompose these losses instead of calling their references."""
    with mock.patch.dict(decomposition_table):
        for operator in _MISREAD:
            decomposition_table.pop(operator, None)
        yield
