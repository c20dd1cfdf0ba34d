"""Restoration of a model's state after a trial of its forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

SEED = 0x5DEECE66D
"""Seed of trials. A model is unlikely to set the same one, which would hide that it draws the same in every step."""


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield parameters and buffers by name, and restore them afterwards."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in (*parameters.items(), *buffers.items())}
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield before
    finally:
        for module, own in registered:
            for (
                name,
                tensor,
            ) in own.items():  # forward may have assigned other tensors; scripted modules have no update()
                module._buffers[name] = tensor
        with torch.no_grad():
            for name, tensor in (*parameters.items(), *buffers.items()):
                tensor.copy_(before[name])
        for tensor in buffers.values():
            if not tensor.is_leaf:  # it was updated from a tensor with a gradient
                tensor.detach_()
