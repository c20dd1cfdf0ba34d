"""Samples that depend on a number which reading them changes, such as a curriculum by the count of reads.

self.reads += 1; x = x * (1 + self.reads // 1000)   ->  DataError that names `reads`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elaswave_fx.data.global_draws import again
from elaswave_fx.errors import DataError

_FURTHER = (10, 1_000, 1_000_000)
"""So many reads later."""


def refuse_counters(read: Callable[[], dict[str, torch.Tensor]], owner: object, place: str, cure: str) -> None:
    """Raise DataError where what `read` gives depends on a number of `owner` that it changes. They stay as they are."""
    before = _numbers(owner)
    first = {field: tensor.clone() for field, tensor in read().items()}
    for name, value in before.items():
        if _numbers(owner).get(name) == value:
            continue
        for more in _FURTHER:
            vars(owner)[name] = value + more
            try:
                later = read()
            except DataError:  # Not for this number.
                continue
            finally:
                vars(owner)[name] = value
            if not all(field in later and same_bits(tensor, later[field]) for field, tensor in first.items()):
                raise DataError(f"{place}: its samples depend on {name}, which reading them changes, {again(cure)}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, nan included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def _numbers(owner: object) -> dict[str, int | float]:
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if type(value) in (int, float)}
