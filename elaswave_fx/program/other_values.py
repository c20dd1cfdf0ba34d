"""Calls tried alone on other values of their arguments, as the trial of a program meets few.

torch.renorm(h, 2, 1, 1000.0)      -> couples samples, though no norm over the trial's batch is above 1000
torch.isin(drawn, items)           -> couples samples, though no drawn item of the trial is an item of its batch
an operator of one's own that clips by a norm over the batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from elaswave_fx.program.batch_run import BatchRun, is_close
from elaswave_fx.program.ir import is_aten, is_foreign, is_getitem
from elaswave_fx.program.positions import READS_ROWS, WRITES_ROWS, is_of_integers
from elaswave_fx.program.samples import SampleAxes, SampleAxis, split_samples

_WHATEVER_VALUES = (
    "aten.linear", "aten.matmul", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.einsum", "aten.conv1d",
    "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.conv_transpose1d", "aten.conv_transpose2d",
    "aten.conv_transpose3d", "aten.embedding", "aten.embedding_bag", "aten._embedding_bag", "aten.layer_norm",
    "aten.native_layer_norm", "aten.group_norm", "aten.native_group_norm", "aten.rms_norm", "aten.softmax",
    "aten.log_softmax", "aten._softmax", "aten._log_softmax", "aten.sum", "aten.mean", "aten.cat", "aten.stack",
    "aten.scaled_dot_product_attention", "aten.pad", "aten.constant_pad_nd", "aten.max_pool2d", "aten.avg_pool2d",
    "aten.adaptive_avg_pool2d", "aten.upsample_nearest2d", "aten.upsample_bilinear2d",
)  # fmt: skip
"""Frequent operators that read the same entries whatever their values."""
_BY_PLACES = (*READS_ROWS, *WRITES_ROWS, "aten.index_fill", "aten.put", "aten.segment_reduce", "aten._unsafe_index_put")

_SCALE = 1e8  # above any bound, or below

_Change = Callable[[torch.Tensor], torch.Tensor]


def _some_equal(tensor: torch.Tensor, numbers: range) -> torch.Tensor:
    """Entries hashed to `numbers`, so that some become equal."""
    hashed = (tensor * 7919.0).floor() if tensor.is_floating_point() else tensor * 7919
    return hashed % len(numbers) + numbers.start


_CHANGES: tuple[Callable[..., torch.Tensor], ...] = (
    lambda tensor, numbers: tensor * _SCALE if tensor.is_floating_point() else tensor,
    lambda tensor, numbers: tensor / _SCALE if tensor.is_floating_point() else tensor,
    lambda tensor, numbers: tensor.sign() if tensor.is_floating_point() else tensor,
    _some_equal,
)


def joins_for_other_values(
    node: fx.Node, axes: SampleAxes, runs: tuple[BatchRun, BatchRun, BatchRun], tolerance: float
) -> bool:
    """Whether the parts of a call's result join to the whole for other values of its arguments too; values at which it
    fails say nothing. The arguments' values are known in `runs`: a batch and its two parts."""
    if not _may_depend_on_values(node):
        return True
    numbers = _numbers(runs[0], node)
    return all(_joins(node, axes, runs, partial(change, numbers=numbers), tolerance) for change in _CHANGES)


def parts_join(values: Sequence[torch.Tensor], axis: SampleAxis, tolerance: float) -> bool:
    """Whether the values of the two parts of a batch, [1] and [2], are the one of the whole, [0], within rounding."""
    whole, head, tail = (split_samples(value, axis) for value in values)
    joined = torch.cat([head, tail], dim=axis.axis + 1)
    return joined.shape == whole.shape and is_close(joined, whole, tolerance)


def _may_depend_on_values(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_aten(node, *_WHATEVER_VALUES, *_BY_PLACES):
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
    try:
        changed = {source: _changed(source, node, axes, runs, change) for source in node.all_input_nodes}
        with torch.no_grad():
            found = [run.result_of(node, lambda source, part=part: changed[source][part])
                     for part, run in enumerate(runs)]  # fmt: skip
    except Exception:  # noqa: BLE001 - an operator need not accept them, and may be the user's
        return True
    return all(
        parts_join([value if each is node else value[each.args[1]] for value in found], axis, tolerance)
        for each, axis in results.items()
    )


def _changed(
    source: fx.Node, node: fx.Node, axes: SampleAxes, runs: tuple[BatchRun, BatchRun, BatchRun], change: _Change
) -> list[Any]:
    """Values of an argument for the batch, changed, and for its parts, which are cut from that: rounding may part what
    was computed for them."""
    values = [run.value(source) for run in runs]
    whole, axis = values[0], axes.of(source)
    if axis is None or not isinstance(whole, torch.Tensor) or not whole.numel() or whole.dtype == torch.bool:
        return values
    if not whole.is_floating_point() and (is_foreign(node) or whole.is_complex()):
        return values  # integers may be places
    new = change(whole.detach()).to(whole.dtype)
    samples, dim = split_samples(new, axis), axis.axis + 1
    first = split_samples(values[1], axis).shape[dim]
    return [new, *(part.flatten(axis.axis, axis.axis + 2) for part in samples.tensor_split([first], dim))]


def _numbers(run: BatchRun, node: fx.Node) -> range:
    """Integers from the least one among a call's arguments on, at most as many as the largest argument has entries."""
    tensors = [value for value in map(run.value, node.all_input_nodes) if isinstance(value, torch.Tensor)]
    entries = max((value.numel() for value in tensors), default=0) | 1
    bounds = [value.aminmax() for value in tensors if is_of_integers(value) and value.numel()]
    if not bounds:
        return range(entries)
    least, most = min(int(low) for low, _ in bounds), max(int(high) for _, high in bounds)
    return range(least, least + min(entries, most - least + 1))
