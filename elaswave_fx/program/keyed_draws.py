"""Keyed random draws: the operators of the native library `elaswave`, and helpers of passes.

This is the one module that loads the native library for its operators. A draw is a function of (seed, unit, op, global
sample, element): `sample_keys` folds seed, unit and sample into one int64 per sample (Philox 4x32-10, Salmon et al.
2011), and a keyed operator draws element by element from a sample's key and its own number `op`.

    keys = sample_keys(seed=7, first=32, count=16, unit=3)        # the samples 32..47 of the run, for unit 3
    keyed_dropout(x [16, 64, 128], keys, p=0.1, op=0, axis=0, period=1)
"""

from __future__ import annotations

import torch
from torch import fx

from elaswave_fx import _native  # noqa: F401  registers torch.ops.elaswave
from elaswave_fx.program.ir import argument, calls, is_aten

DROPOUT = "elaswave.keyed_dropout"
UNIFORM = "elaswave.keyed_uniform"
NORMAL = "elaswave.keyed_normal"
DRAWS = (DROPOUT, UNIFORM, NORMAL)
NO_AXIS = -1
"""The axis of a draw that belongs to no sample; its keys hold one element."""

keyed_dropout = torch.ops.elaswave.keyed_dropout.default
keyed_uniform = torch.ops.elaswave.keyed_uniform.default
keyed_normal = torch.ops.elaswave.keyed_normal.default


def sample_keys(seed: int, first: int, count: int, unit: int) -> torch.Tensor:
    """Keys int64 [count] of the samples at positions first, first + 1, ... of the run, for the draws of a unit."""
    return torch.ops.elaswave.sample_keys(seed, first, count, unit)


def is_draw(node: fx.Node) -> bool:
    return is_aten(node, *DRAWS)


def draws(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in calls(graph) if is_draw(node)]


def draw_index(node: fx.Node) -> int:
    return int(argument(node, "op"))


def set_draw_index(node: fx.Node, index: int) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    node.update_arg(names.index("op"), index)
