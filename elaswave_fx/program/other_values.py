"""Calls tried alone on other values of their arguments, as the trial of a program meets few.

    torch.renorm(h, 2, 1, 1000.0)      -> couples samples, though no norm over the trial's batch is above 1000
    torch.isin(drawn, items)           -> couples samples, though no drawn item of the trial is an item of its batch
    an operator of one's own that clips by a norm over the batch

Values change entry by entry: parts of the changed batch are the changed parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from elaswave_fx.program.batch_run import BatchRun, is_close
from elaswave_fx.program.ir import is_aten, is_getitem
from elaswave_fx.program.positions import READS_ROWS, WRITES_ROWS  # their places are judged there
from elaswave_fx.program.samples import SampleAxes, SampleAxis, split_samples

_WHATEVER_VALUES = (
    "aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.einsum", "aten.conv1d",
    "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.embedding", "aten.embedding_bag", "aten.layer_norm",
    "aten.native_layer_norm", "aten.rms_norm", "aten.softmax", "aten.log_softmax", "aten._softmax",
    "aten._log_softmax", "aten.sum", "aten.mean", "aten.scaled_dot_product_attention", "aten.cat", "aten.stack",
)  # fmt: skip
"""Frequent operators that read the same entries whatever their values."""

_SCALE = 1e8  # above any bound, or below

_Change = Callable[[torch.Tensor, int], torch.Tensor]

_CHANGES: tuple[_Change, ...] = (
    lambda tensor, _: tensor * _SCALE if tensor.is_floating_point() else tensor,
    lambda tensor, _: tensor / _SCALE if tensor.is_floating_point() else tensor,
    lambda tensor, _: tensor.sign() if tensor.is_floating_point() else tensor % 2,
    lambda tensor, entries: ((tensor * 7919.0).floor() % (entries | 1)).to(tensor.dtype),  # some are equal
)
"""Changes of an argument, entry by entry; `entries`: as many as the largest argument has."""


def joins_for_other_values(
    node: fx.Node, axes: SampleAxes, runs: tuple[BatchRun, BatchRun, BatchRun], tolerance: float
) -> bool:
    """Whether the parts of a call's result join to the whole for other values of its arguments too; values at which it
    fails say nothing. The arguments' values are known in `runs`: a batch and its two parts."""
    if not _may_depend_on_values(node):
        return True
    return all(_joins(node, axes, runs, change, tolerance) for change in _CHANGES)


def parts_join(values: Sequence[torch.Tensor], axis: SampleAxis, tolerance: float) -> bool:
    """Whether the values of the two parts of a batch, [1] and [2], are the one of the whole, [0], within rounding."""
    whole, head, tail = (split_samples(value, axis) for value in values)
    joined = torch.cat([head, tail], dim=axis.axis + 1)
    return joined.shape == whole.shape and is_close(joined, whole, tolerance)


def _may_depend_on_values(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_aten(node, *_WHATEVER_VALUES, *READS_ROWS, *WRITES_ROWS):
        return False
    if target.namespace in ("elaswave", "torchvision"):  # ours; its time may grow with a box
        return False
    return torch.Tag.pointwise not in target.tags and not target.is_view


def _joins(
    node: fx.Node,
    axes: SampleAxes,
    runs: tuple[BatchRun, BatchRun, BatchRun],
    change: _Change,
    tolerance: float,
) -> bool:
    results = {each: axis for each in (node, *filter(is_getitem, node.users)) if (axis := axes.of(each)) is not None}
    if not results:
        return True
    entries = max((value.numel() for value in map(runs[0].value, node.all_input_nodes)
                   if isinstance(value, torch.Tensor)), default=0)  # fmt: skip

    def result_of(run: BatchRun) -> Any:
        def changed(source: fx.Node) -> Any:
            value = run.value(source)
            changes = isinstance(value, torch.Tensor) and value.dtype != torch.bool and axes.of(source) is not None
            return change(value.detach(), entries) if changes else value

        return run.result_of(node, changed)

    try:
        found = [result_of(run) for run in runs]
    except (RuntimeError, IndexError, ValueError):
        return True
    return all(
        parts_join([value if each is node else value[each.args[1]] for value in found], axis, tolerance)
        for each, axis in results.items()
    )
