"""Samples that depend on a number which reading them changes, such as a curriculum by the count of reads.

self.reads += 1; x = x * (1 + self.reads // 1000)   ->  DataError that names `reads`
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elaswave_fx.data.global_draws import again
from elaswave_fx.errors import DataError
from elaswave_fx.program.later_values import numbers_in, with_changed

_FURTHER = (*(2**power for power in range(1, 21)), 1_000, 1_000_000)
"""So many reads later; as for modules, a power of two gets into the next phase."""


def refuse_counters(read: Callable[[], dict[str, torch.Tensor]], owner: object, place: str, cure: str) -> None:
    """Raise DataError where what `read` gives depends on a number of `owner` that it changes. They stay as they are."""
    own = getattr(owner, "__dict__", {})
    before = {name: (value, numbers_in(value)) for name, value in own.items()}
    first = {field: tensor.clone() for field, tensor in read().items()}
    for name, (value, numbers) in before.items():
        changed = frozenset(path for path, number in numbers_in(own.get(name)).items() if numbers.get(path) != number)
        for more in _FURTHER if changed else ():
            own[name] = with_changed(value, changed, lambda number, by=more: number + by)
            try:
                later = read()
            except DataError:  # Not for this number.
                continue
            finally:
                own[name] = value
            if not all(field in later and same_bits(tensor, later[field]) for field, tensor in first.items()):
                raise DataError(f"{place}: its samples depend on {name}, which reading them changes, {again(cure)}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, nan included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
