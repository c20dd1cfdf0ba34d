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
    """Yield parameters and buffers by name, and restore them afterwards, with their sizes, and which are trained."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in (*parameters.items(), *buffers.items())}
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in parameters.values()]
    try:
        yield before
    finally:
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
        for parameter, flag in trained:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        for tensor in buffers.values():
            if not tensor.is_leaf:  # it was updated from a tensor with a gradient
                tensor.detach_()


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def equal_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def buffer_sizes(model: nn.Module) -> dict[str, torch.Size]:
    """Sizes of all buffers, by all their names."""
    return {name: buffer.shape for name, buffer in model.named_buffers(remove_duplicate=False)}


def refuse_other_buffers(model: nn.Module, before: dict[str, torch.Size]) -> None:
    """Raise CaptureError for a buffer that a call has registered, created or resized: the initial state has no value
    for it. `before`: the sizes before the call."""
    for name, size in buffer_sizes(model).items():
        if before.get(name) == size:
            continue
        if name in before:
            change = f"resizes the buffer {name}, of size {list(before[name])} before"
        else:
            change = f"registers the buffer {name}, of which the initial state has nothing"
        raise CaptureError(
            f"model: forward {change}; a way out is to give it its size in the constructor, which may call forward "
            "once, or to keep it as a plain attribute, if it is a table"
        )
