"""Calls that a forward pass makes in one mode alone, where the values of the trials need not tell.

    calls_apart(model, batch)   ->  {"clamp"} for `if not self.training: x = x.clamp(-5, 5)`, which first weights obey
    drawing_calls(model, batch) ->  0 where evaluation draws nothing

Dropout is called in both modes, or draws in training only; updates of buffers in training have no gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_fx.program.state_kept import SEED, state_kept

_NO_VALUES_OF_THEIR_OWN = {"detach", "clone", "contiguous", "requires_grad_"}

_SWITCHES = {
    "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "clamp_min_", "clamp_max_", "hardtanh", "relu",
    "threshold", "where", "masked_fill", "masked_fill_", "minimum", "maximum", "nan_to_num", "fmin", "fmax",
}  # fmt: skip
"""Functions that may leave every value of a trial as it is, and change others later."""

Batch = Mapping[str, torch.Tensor]


def calls_apart(model: nn.Module, batch: Batch) -> set[str]:
    """Names of functions that evaluation calls more often than training, and of functions on the way to the loss that
    training calls more often and that may be without effect in a trial. The model's mode is restored."""
    evaluating, training = _calls(model, batch, False), _calls(model, batch, True)
    switches = {(name, leads) for name, leads in training if name in _SWITCHES and leads}
    more = _by_name(evaluating) - _by_name(training)
    return set(more) | {name for name, leads in switches if training[name, leads] > evaluating[name, leads]}


def drawing_calls(model: nn.Module, batch: Batch) -> int:
    """Number of operators that draw in the model's present mode."""
    with state_kept(model), torch.random.fork_rng(devices=()), torch.enable_grad(), _Draws() as draws:
        model(**batch)
    return draws.count


def _calls(model: nn.Module, batch: Batch, training: bool) -> Counter[tuple[str, bool]]:
    """Calls by (name, whether the result leads to the loss) with gradients, as torch's own layers decide by them."""
    was_training = model.training
    model.train(training)
    try:
        with state_kept(model), torch.random.fork_rng(devices=()), torch.enable_grad(), _Names() as names:
            torch.manual_seed(SEED)
            model(**batch)
    finally:
        model.train(was_training)
    return names.counts


def _by_name(calls: Counter[tuple[str, bool]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (name, _), count in calls.items():
        totals[name] += count
    return totals


class _Names(TorchFunctionMode):
    """Counts calls whose result has tensors, by name and by whether one of them has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, bool]] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = list(_tensors(result))
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            tensors.append(args[0])
        if tensors and name not in _NO_VALUES_OF_THEIR_OWN:
            self.counts[name, any(tensor.requires_grad for tensor in tensors)] += 1
        return result


class _Draws(TorchDispatchMode):
    """Counts operators that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
