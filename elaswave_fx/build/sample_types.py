"""Refusal of models that look at the types of samples, of which whole numbers are widened to int64.

x of int16:  x.float() / torch.iinfo(x.dtype).max     ->  CaptureError: computes something else
             x.float() / 32768                        ->  the same with int64
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from elaswave_fx.data.dataset import Dataset
from elaswave_fx.errors import CaptureError
from elaswave_fx.program.held_state import python_state_kept
from elaswave_fx.program.many_calls import are_unlike, results


def refuse_other_types(dataset: Dataset, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError if forward computes something else with the whole numbers that the user's code gives.

    Floating-point types are not compared: float32 is finer than halves, and the rounding of float64 is told where the
    data is opened.
    """
    if dataset.users is None:
        return
    given = {name: tensor.dtype for name, tensor in dataset.given(0).items()}
    own = {name: tensor.to(given[name]) for name, tensor in batch.items() if _is_narrower(given.get(name), tensor)}
    if not own:
        return
    calls: list[list[torch.Tensor]] = []
    for inputs in ({**batch, **own}, batch, batch):
        with python_state_kept(model):
            calls.append(results(model, inputs))
    as_given, widened, again = calls
    if are_unlike(as_given, widened) and not are_unlike(widened, again):  # a model that counts has a reason of its own
        fields = ", ".join(f"{name} as {_name(batch[name])}, not {_name(tensor)}" for name, tensor in own.items())
        raise CaptureError(
            f"model: {type(model).__name__} computes something else with the types of the dataset: forward gets "
            f"{fields}; a way out is to convert where samples are made, such as x.float() / 32768 for int16"
        )


def _is_narrower(given: torch.dtype | None, tensor: torch.Tensor) -> bool:
    """Whether `given` is another integer type that holds these values."""
    if given in (None, tensor.dtype) or given.is_floating_point or tensor.is_floating_point():
        return False
    return torch.equal(tensor.to(given).to(tensor.dtype), tensor)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
