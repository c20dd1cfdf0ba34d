"""Mixed precision: torch.autocast in eager runs and in captured graphs.

    run_under_autocast(model)     model(**batch) computes products in bf16 and norms, softmax and losses as torch says
    with traced_under_autocast(model): export(model, ...)     the graph has the casts as calls

Inputs, targets and parameters keep their dtypes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

_LOW = torch.bfloat16


def run_under_autocast(model: nn.Module) -> None:
    """Make every later call of `model`, by any caller, run under autocast."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    model.forward = _Autocast(model.forward, without_onednn if recurrent else contextlib.nullcontext)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Run recurrent layers step by step, as in a captured graph; oneDNN lacks them in bf16 on many CPUs."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


class _Autocast:
    """A forward method that enters autocast first. `__wrapped__` is the plain method, whose signature this has."""

    def __init__(self, forward: Callable[..., Any], kernels: Callable[[], AbstractContextManager[None]]) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._kernels = forward, kernels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._kernels(), torch.autocast("cpu", dtype=_LOW):
            return self._forward(*args, **kwargs)


@contextlib.contextmanager
def traced_under_autocast(model: nn.Module) -> Iterator[None]:
    """Autocast around an export, if `model` runs under it; inside of forward it would hide which module calls what."""
    forward = vars(model).get("forward")
    if not isinstance(forward, _Autocast):
        yield
        return
    del model.forward
    try:
        with torch.autocast("cpu", dtype=_LOW, cache_enabled=False):
            yield
    finally:
        model.forward = forward


def decompositions_under_autocast(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions whose calls are cast like the model's own while autocast is on. They run below autocast, so the
    products in them would otherwise stay in fp32."""
    if not torch.is_autocast_enabled("cpu"):
        return table
    return {op: _cast_inside(decompose) for op, decompose in table.items()}


def _cast_inside(decompose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decompose)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=_LOW, cache_enabled=False):
            return decompose(*args, **kwargs)

    return run
