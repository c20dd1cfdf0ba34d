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
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten

_LOW = torch.bfloat16
_PRODUCTS = (
    aten.tensordot.default, aten.inner.default, aten.chain_matmul.default, aten.linalg_multi_dot.default,
    aten.linalg_matmul.default, aten.matrix_power.default, aten.linalg_matrix_power.default,
)  # fmt: skip
_OF_FP32 = (aten.nll_loss_nd.default, aten.pad.default)
_PADS_OF_FP32 = ("reflect", "replicate")
"""Modes of padding that autocast has among the operators of fp32."""


def run_under_autocast(model: nn.Module) -> None:
    """Make every later call of `model`, by any caller, run under autocast."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    model.forward = _Autocast(model.forward, without_onednn if recurrent else contextlib.nullcontext)


@contextlib.contextmanager
def in_precision(model: nn.Module, precision: str) -> Iterator[None]:
    """Run `model` as in training of this precision, which is fp32 or bf16."""
    before = vars(model).get("forward")
    if precision == "bf16":
        run_under_autocast(model)
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if before is not None:
            model.forward = before


@contextlib.contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """Run `model` in the precision of its parameters."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, _Autocast):
        model.forward = forward.plain
    try:
        yield
    finally:
        if isinstance(forward, _Autocast):
            model.forward = forward


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
        self.plain, self._kernels = forward, kernels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._kernels(), torch.autocast("cpu", dtype=_LOW):
            return self.plain(*args, **kwargs)


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


def composites_under_autocast() -> dict[Any, Callable[..., Any]]:
    """While autocast is on, operators that it does not know, made of others that it casts: eager code calls those, a
    graph has the whole. Products meet bf16, and others the fp32 of their parts."""
    if not torch.is_autocast_enabled("cpu"):
        return {}
    products = {op: functools.partial(_cast_before, op, _LOW, torch.float32) for op in _PRODUCTS}
    return {**products, **{op: functools.partial(_cast_before, op, torch.float32, _LOW) for op in _OF_FP32}}


def _cast_before(op: Any, dtype: torch.dtype, instead_of: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """The operator itself, after casts of its arguments; NotImplemented if there is nothing to cast."""
    leaves, spec = tree_flatten((args, kwargs))
    cast = [isinstance(leaf, torch.Tensor) and leaf.dtype == instead_of for leaf in leaves]
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    if not any(cast) or (op is aten.pad.default and mode not in _PADS_OF_FP32):
        return NotImplemented
    args, kwargs = tree_unflatten(
        [leaf.to(dtype) if casts else leaf for leaf, casts in zip(leaves, cast, strict=True)], spec
    )
    return op(*args, **kwargs)


def _cast_inside(decompose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(decompose)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=_LOW, cache_enabled=False):
            return decompose(*args, **kwargs)

    return run
