"""Numbers near those of a model or its data, for a trial: what is alike by chance must not hide what training shows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_GOLDEN = 0.6180339887498949
"""Multiples of it, less their whole part, are spread evenly."""


def perturbed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers near the given ones: what starts as zero must not hide what training would bring out."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(sum(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return torch.where(tensor == 0, 0.01 * noise, tensor * (1 + 0.1 * noise.clamp(-3, 3))).to(tensor.dtype)


def told_apart(batch: Mapping[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """The batch with the floats of each sample times a number of its own: weights that are nearly always 1 hide that
    they are divided by their mean. Numbers get smaller by up to a half, and keep sign and bounds."""
    samples = len(next(iter(batch.values())))
    share = 1 - 0.5 * (torch.arange(first, first + samples, dtype=torch.float64) * _GOLDEN % 1)
    return {
        name: tensor * share.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in batch.items()
    }
