"""Output of every model: the sum of its losses and the number of summands.

The step divides by the count over all ranks, so the gradient's scale does not depend on the layout. Means per
micro-batch cannot be combined that way; `check_output` refuses them by name.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from elaswave_fx.errors import CaptureError

IGNORED_LABEL = -100
_RULE = "a model returns (loss sum, count)"


def token_loss_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of `logits` (..., classes) against int64 `labels` (...), summed in fp32.

    Returns (loss sum fp32, count int64), both 0-dim; labels equal to `IGNORED_LABEL` are in neither.
    """
    flat = labels.reshape(-1)
    # A sum over bf16 logits would lose small losses, so the logits are widened first.
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), flat, ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return loss, (flat != IGNORED_LABEL).sum()


def check_output(output: object) -> tuple[Tensor, Tensor]:
    """`output` of a model as (loss sum, count); raise `CaptureError` with what it returned instead."""
    if isinstance(output, Tensor):
        raise CaptureError(f"the model returns {_tensor(output)}, as a mean loss does; {_RULE}")
    if isinstance(output, Mapping):
        keys = ", ".join(str(key) for key in output)
        raise CaptureError(f"the model returns {type(output).__name__} with {keys}; {_RULE}")
    if not isinstance(output, (tuple, list)):
        raise CaptureError(f"the model returns {type(output).__name__}; {_RULE}")
    if len(output) != 2:
        raise CaptureError(f"the model returns {len(output)} values; {_RULE}")
    loss, count = output
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        raise CaptureError(f"the model returns {_describe(loss)} as the loss sum; it is a 0-dim floating tensor")
    if not isinstance(count, Tensor) or count.ndim != 0 or count.is_complex() or count.dtype is torch.bool:
        raise CaptureError(
            f"the model returns {_describe(count)} as the count; it is a 0-dim tensor, such as (labels != -100).sum()"
        )
    if count.requires_grad:
        raise CaptureError("the model returns a count with a gradient; a count does not depend on the parameters")
    return loss, count


def _describe(value: object) -> str:
    return _tensor(value) if isinstance(value, Tensor) else type(value).__name__


def _tensor(value: Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"one {value.ndim}-dim {dtype} tensor"
