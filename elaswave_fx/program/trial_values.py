"""Perturbed numbers of a model or its data, for a trial: accidental equalities must not hide what training shows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_GOLDEN = 0.6180339887498949
"""Fractional parts of its multiples are spread evenly."""


def perturbed(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers near the given ones: an initial zero must not hide effects that appear in training."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(sum(name.encode()))
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return torch.where(tensor == 0, 0.01 * noise, tensor * (1 + 0.1 * noise.clamp(-3, 3))).to(tensor.dtype)


def told_apart(batch: Mapping[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """The batch with the floats of each sample scaled by a factor of its own: weights that are nearly always 1 hide a
    division by their mean. Factors are between a half and 1, so that sign and bounds are kept."""
    samples = len(next(iter(batch.values())))
    share = 1 - 0.5 * (torch.arange(first, first + samples, dtype=torch.float64) * _GOLDEN % 1)
    return {
        name: tensor * share.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in batch.items()
    }
