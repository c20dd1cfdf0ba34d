"""Perturbed numbers of a model or its data, for a trial: accidental equalities must not hide what training shows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elaswave_fx.program.ir import Program

_GOLDEN = 0.6180339887498949
"""Fractional parts of its multiples are spread evenly."""
FAR = 4.0
"""Factor of weights at which limits such as relu(abs(h) - 3) are reached."""
TIMES_NOISE = 4.0
"""Difference of gradients in lower precision that may be rounding, by their change with another rounding."""


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


def rounded_otherwise(program: Program, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with trained parameters changed by up to half a step of the lowest precision in the program. A change of
    gradients by that is noise: the exact gradient of a bias in front of a normalization is 0."""
    draws = torch.Generator().manual_seed(0)
    step = max(torch.finfo(dtype).eps for dtype in program.float_dtypes())
    other = dict(state)
    for name, spec in program.params.items():
        if spec.trainable:
            factor = 1 + step * (torch.rand(spec.shape, generator=draws) - 0.5)
            other[name] = (state[name].detach().float() * factor).to(state[name].dtype)
    return other
