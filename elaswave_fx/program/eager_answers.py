"""Answers for torch's own code where it inspects values during a capture, when there are none.

    nn.TransformerEncoder(mask=m): is `m` the causal mask?      ->  no: `m` is added to the scores as it is
    Normal(mean, scale): are all scales positive?               ->  yes, as eager code found in the trial before

These inspections are checks that raise, or shortcuts to a faster kernel, so the result does not depend on them. The
export refuses inspections by the user's code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # Imported while autograd.grad is replaced, it would find one function under two names.
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_fx.program.value_checks import ANSWERS, place_in_torch

DETACHES_IN_PLACE = "forward calls detach_(), which an export does not record"
_INSTANCE_NORM = torch.instance_norm
_RECORD = PreDispatchTorchFunctionMode.__torch_function__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


@contextlib.contextmanager
def eager_answers() -> Iterator[None]:
    """Answer these inspections, trace `.data` as detach() and inference_mode() as no_grad(), trace through checkpoints
    and autograd.Functions, refuse detach_(), and update the running statistics of instance norms by calls: the
    operator's schema does not declare that it writes them."""
    ask = torch.Tensor.__bool__

    def answer(tensor: torch.Tensor) -> bool:
        known = ANSWERS.get(place_in_torch(sys._getframe(1)))
        return ask(tensor) if known is None else known

    with (
        mock.patch.object(torch.Tensor, "__bool__", answer),
        mock.patch.object(torch.Tensor, "data", property(_detached, _overwrite)),
        mock.patch.object(torch.Tensor, "detach_", _refuse_to_detach),
        mock.patch("torch.detach_", _refuse_to_detach),
        mock.patch.object(torch.inference_mode, "__enter__", _enter_no_grad),
        mock.patch.object(torch.inference_mode, "__exit__", _exit_no_grad),
        through_checkpoints(),
        mock.patch.object(PreDispatchTorchFunctionMode, "__torch_function__", _record),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", _its_context_alone),
        mock.patch("torch.instance_norm", _instance_norm),
    ):
        yield


def through_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """Run what `checkpoint(use_reentrant=True)` wraps as part of the forward pass."""
    return mock.patch.object(checkpoint, "CheckpointFunction", _SeenThrough)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """`x.data`, which the export would take for a constant."""
    return tensor.detach()


def _refuse_to_detach(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        raise RuntimeError(DETACHES_IN_PLACE)
    return tensor


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.detach().copy_(value)


def _enter_no_grad(mode: Any) -> None:
    mode.instead = torch.set_grad_enabled(not mode.mode)


def _exit_no_grad(mode: Any, *_: object) -> None:
    mode.instead.__exit__(None, None, None)


def _record(mode: PreDispatchTorchFunctionMode, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Record a call, but no grad mode in the forward of an autograd.Function: autograd is off there, and the export
    would not see that `apply` turns it on again behind a no_grad() inside."""
    if function is torch._C._set_grad_enabled and in_own_function():
        return function(*args)
    return _RECORD(mode, function, types, args, kwargs)


def in_own_function() -> bool:
    """Whether the forward of an autograd.Function runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


def _instance_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None,
    var: torch.Tensor | None, batch: bool, momentum: float, eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    """torch's operator of these arguments; `batch`: by the statistics of each channel of each sample, which the running
    ones follow."""
    if batch and mean is not None and var is not None:
        with torch.no_grad():
            of_samples = torch.var_mean(x.flatten(2), dim=2, correction=1)
            for running, each in zip((var, mean), of_samples, strict=True):
                running.copy_((1 - momentum) * running + momentum * each.mean(0))
        mean = var = None
    return _INSTANCE_NORM(x, weight, bias, mean, var, batch, momentum, eps, cudnn)


def _its_context_alone(
    function: Callable[..., Any], preserve_rng_state: bool = True, context_fn: Callable[[], Any] | None = None,
    *_: Any, **__: Any,
) -> Iterator[None]:  # fmt: skip
    """Replacement of what `checkpoint(use_reentrant=False)` does around the wrapped function: only the context of its
    forward pass is left. The export takes a nested one for computation without gradients. A dispatch mode chooses what
    is kept for the backward pass, and changes no value."""
    context = contextlib.nullcontext() if context_fn is None else context_fn()[0]
    with contextlib.nullcontext() if isinstance(context, TorchDispatchMode) else context:
        yield


class _SeenThrough:
    """Replacement of the autograd.Function of `checkpoint(use_reentrant=True)`: the wrapped function is captured
    directly, without gradients if no argument requires one."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        differentiable = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with contextlib.nullcontext() if differentiable else torch.no_grad():
            return function(*args)
