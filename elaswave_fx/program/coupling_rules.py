"""Batch-coupled operators that are known by name and shape.

batch_norm over [B, 16, 8, 8]      -> "aten._native_batch_norm_legit.no_stats in stem_norm"
logits = a @ b.t(), [B, B]         -> "aten.matmul.default in the model"
h * (1 + x.shape[0] // 8)          -> "<built-in function floordiv> in the model, of the number of samples"
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from elaswave_fx.program.batch_size import sample_dims
from elaswave_fx.program.fixed_size import SIZES_TRIED
from elaswave_fx.program.ir import Program, argument, calls, is_aten, module_of, value_of
from elaswave_fx.program.samples import SampleAxes, locate_samples

_ALONG_DIM = (
    "aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten._safe_softmax", "aten.cumsum",
    "aten.cumprod", "aten.logcumsumexp", "aten.topk", "aten.kthvalue", "aten.cummax", "aten.cummin",
)  # fmt: skip
_SORTS = ("aten.sort", "aten.argsort")
_EMBEDDINGS = ("aten.embedding", "aten.embedding_bag", "aten._embedding_bag")
_ALONG_DIMS = ("aten.flip", "aten.roll")
_BATCH_STATISTICS = ("aten._native_batch_norm_legit", "aten.native_batch_norm", "aten.batch_norm")


def coupled_by_rule(program: Program) -> tuple[str, ...]:
    """Batch-coupled operators found by shapes and names, and updates of buffers."""
    axes = locate_samples(program)
    if axes.symbol is None:
        place = f": {program.fixed_by}" if program.fixed_by else ""
        return (f"the model exports at one fixed batch size only{place}",)
    operators = [describe(node) for node in calls(program.graph.graph) if _couples(node, axes)]
    operators += [f"{describe(node)}, of the number of samples" for node in calls(program.graph.graph)
                  if _steps_with_size(node, axes.symbol, program.granule)]  # fmt: skip
    updates = [f"buffer {fold.buffer} is updated by every batch" for fold in program.folds if not fold.per_step]
    return tuple(dict.fromkeys(operators or updates))


def describe(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.name
    by_frequency = ", which divides gradients by frequency (scale_grad_by_freq)" if _divides_by_frequency(node) else ""
    return f"{node.target} in {module_of(node)}{by_frequency}"


def _divides_by_frequency(node: fx.Node) -> bool:
    """Whether an embedding divides a row's gradient by the row's frequency in the batch."""
    return is_aten(node, *_EMBEDDINGS) and bool(argument(node, "scale_grad_by_freq", False))


def _couples(node: fx.Node, axes: SampleAxes) -> bool:
    if axes.mixed(node) and not axes.data_dependent(node):
        return not any(axes.mixed(source) for source in node.all_input_nodes)  # one name is enough
    if is_aten(node, *_BATCH_STATISTICS):
        dims = _dims(node.args[0], axes.symbol)  # none, where weights are standardized by it
        return bool(argument(node, "training", True)) and bool(dims) and 1 not in dims
    if _divides_by_frequency(node):
        return True
    if is_aten(node, *_ALONG_DIM):
        along = [argument(node, "dim", -1)]
    elif is_aten(node, *_ALONG_DIMS):
        along = list(argument(node, "dims", ())) or list(range(value_of(node).dim()))
    else:
        return False
    return _along_samples(node, along, axes)


def _steps_with_size(node: fx.Node, symbol: sympy.Symbol, granule: int) -> bool:
    """Whether a call turns the batch size into a step function, such as x.shape[0] // 8: the batches of a trial see one
    step. Smooth functions are left to the trial."""
    value = value_of(node)
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or value.node.expr.is_rational_function(symbol):
        return False
    of = [value.node.expr.subs(symbol, granules * granule) for granules in SIZES_TRIED]
    return any(found not in (of[0], granules * of[0]) for granules, found in zip(SIZES_TRIED, of, strict=True))


def sorts_samples(node: fx.Node, axes: SampleAxes) -> bool:
    """Whether a call sorts along the samples. Not a rule: an order that is undone, as of rows by experts, couples
    nothing."""
    return is_aten(node, *_SORTS) and _along_samples(node, [argument(node, "dim", -1)], axes)


def _along_samples(node: fx.Node, along: list[Any], axes: SampleAxes) -> bool:
    """Whether one of the dimensions `along` of a call's first argument holds samples."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or not value_of(source).dim():
        return False
    rank = value_of(source).dim()
    return bool({int(dim) % rank for dim in along if isinstance(dim, int)} & _dims(source, axes.symbol))


def _dims(node: Any, symbol: sympy.Symbol | None) -> set[int]:
    value = value_of(node)
    return set(sample_dims(value, symbol)) if isinstance(value, torch.Tensor) else set()
