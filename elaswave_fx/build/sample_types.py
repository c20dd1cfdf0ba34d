"""Refusal of models that look at the types of samples, which are widened: int16, int32 … to int64, float16 to float32.

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
    """Raise CaptureError if forward computes something else with the types that the user's code gives samples. float64
    is not compared: its rounding is told where the data is opened."""
    if dataset.users is None:
        return
    given = {name: each.dtype for name, each in dataset.given(0).items() if each.dtype != torch.float64}
    other = {name: given[name] for name in batch if name in given and given[name] != batch[name].dtype}
    if not other:
        return
    with python_state_kept(model):
        widened = results(model, batch)
    with python_state_kept(model):
        as_given = results(model, {name: each.to(other.get(name, each.dtype)) for name, each in batch.items()})
    if are_unlike(widened, as_given):
        fields = ", ".join(f"{name} as {_name(batch[name].dtype)}, not {_name(kind)}" for name, kind in other.items())
        raise CaptureError(
            f"model: {type(model).__name__} computes something else with the types of the dataset: forward gets "
            f"{fields}; a way out is to convert where samples are made, such as x.float() / 32768 for int16"
        )


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
