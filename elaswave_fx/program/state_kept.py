"""Restoration of a model's state after a trial of its forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from elaswave_fx.errors import CaptureError

SEED = 0x5DEECE66D
"""Seed of trials. A model is unlikely to set the same one, which would hide that it draws the same in every step."""


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield parameters and buffers by name, and restore them afterwards.

    Raises CaptureError for a buffer that forward registers, creates or resizes: the initial state has no value for it.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in (*parameters.items(), *buffers.items())}
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    changed: list[str] = []
    try:
        yield before
    finally:
        changed = [name for name, tensor in model.named_buffers() if _shape_of(before.get(name)) != tensor.shape]
        for module, own in registered:
            for name in module._buffers.keys() - own.keys():
                del module._buffers[name]
            for name, tensor in own.items():  # forward may have assigned other tensors; scripted modules: no update()
                module._buffers[name] = tensor
        with torch.no_grad():
            for name, tensor in (*parameters.items(), *buffers.items()):
                if tensor.shape != before[name].shape:
                    tensor.data = before[name].clone()
                tensor.copy_(before[name])
        for tensor in buffers.values():
            if not tensor.is_leaf:  # it was updated from a tensor with a gradient
                tensor.detach_()
    if changed:
        first, size = changed[0], _shape_of(before.get(changed[0]))
        what = (
            f"resizes the buffer {first}, of size {list(size)} before"
            if size is not None
            else (f"registers the buffer {first}, of which the initial state has nothing")
        )
        raise CaptureError(
            f"model: forward {what}; a way out is to give it its size in the constructor, which may call forward once, "
            "or to keep it as a plain attribute, if it is a table"
        )


def _shape_of(tensor: torch.Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape
