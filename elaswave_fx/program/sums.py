"""Whether numbers of the parts of a batch add up to those of the whole: loss and count, and gradients by parameter.

sum_holds(3.0, 1.0, 2.0, 1e-3)                                        ->  True
not_summed(({"w": whole}, {"w": head}, {"w": tail}), 1e-3, 1e-2)      ->  ["w"], where head + tail is not whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Gradients = Mapping[str, torch.Tensor]


def sum_holds(whole: float, head: float, tail: float, tolerance: float) -> bool:
    """Whether `whole` is `head + tail`; `tolerance` is relative to the largest of them."""
    if not (math.isfinite(whole) and math.isfinite(head + tail)):
        return math.isfinite(whole) == math.isfinite(head + tail)  # a part may have nothing to divide by
    return abs(head + tail - whole) <= tolerance * max(abs(whole), abs(head), abs(tail))


def not_summed(gradients: Sequence[Gradients], tolerance: float, least: float) -> list[str]:
    """Return the parameters whose gradient over a batch is not the sum over its two parts.

    Args:
        gradients: of the whole, the head and the tail.
        least: fraction of the largest gradient, below which differences are rounding.
    """
    largest = max((_largest(gradient) for each in gradients for gradient in each.values()), default=0.0)
    found = []
    for name in gradients[0]:
        whole, head, tail = (each[name] for each in gradients)
        scale = max(_largest(whole), _largest(head), _largest(tail), least * largest)
        finite = torch.equal(torch.isfinite(head + tail), torch.isfinite(whole))
        if not finite or _largest(head + tail - whole) > tolerance * scale:
            found.append(name)
    return found


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    largest = float(tensor.abs().max())
    return largest if math.isfinite(largest) else float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())
