"""Comparison of a captured program with its eager model, on the same batch with the same random numbers.

loss of the eager model 2011.88, of the graph 1674.97  ->  CaptureError
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    Role,
    is_aten,
    is_getitem,
    placeholders,
    source_of,
)
from elaswave_fx.program.state_kept import SEED, state_kept

_RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_TOLERANCE_OF_OTHERS = 1e-2
_COUNT_TOLERANCE = 1e-5


class ModelFails(CaptureError):
    """The model itself raises an error on a batch."""


def check_against_eager(model: nn.Module, program: Program, batch: Mapping[str, torch.Tensor]) -> None:
    """Compare loss sum and count of the graph, before any pass, with those of the model. The model's state is kept.

    Raises CaptureError with both numbers when they differ by more than rounding, ModelFails when the model fails on
    the batch.
    """
    samples = len(next(iter(batch.values())))
    with state_kept(model) as before:
        expected = _run_eager(model, batch, samples)
    torch.manual_seed(SEED)
    with torch.no_grad():
        outputs = SameDraws(program.graph).run(*inputs_of(program, before, batch))
    got = {result.kind: float(value) for result, value in zip(program.results, outputs, strict=True)
           if result.kind in (ResultKind.LOSS, ResultKind.COUNT)}  # fmt: skip
    loss_tolerance = max(_RELATIVE_TOLERANCE.get(dtype, _TOLERANCE_OF_OTHERS) for dtype in program.float_dtypes())
    tolerances = {ResultKind.LOSS: loss_tolerance, ResultKind.COUNT: _COUNT_TOLERANCE}
    for kind, value in zip((ResultKind.LOSS, ResultKind.COUNT), expected, strict=True):
        if not math.isfinite(value):
            raise CaptureError(
                f"model: with {samples} samples and its first weights the {kind.value} of {type(model).__name__} is "
                f"{value}; a model starts with a finite one, and a part of a batch may lack what a mean divides by: "
                "sum the loss and give the count, or set parallel.granule=the samples that belong together"
            )
        if not abs(value - got[kind]) <= tolerances[kind] * max(1.0, abs(value)):
            raise CaptureError(
                f"model: with {samples} samples the {kind.value} of {type(model).__name__} is {value:.6g} and that of "
                f"its captured graph {got[kind]:.6g}; something in it is not seen by the capture, such as a seed, a "
                "random number drawn outside of torch, or inside one of its layers, or a branch on the batch size or "
                "on torch.compiler; a way out is to write that part with tensor operators"
            )


def cure_of(reason: str, otherwise: str) -> str:
    """The way out of an error of torch in forward."""
    if re.search(r"Target -?\d+ is out of bounds", reason) is None:
        return otherwise
    return (
        "labels are below the number of logits (model.config.num_labels of a classifier with model=hf), and -100 where "
        "they are not counted"
    )


def _run_eager(model: nn.Module, batch: Mapping[str, torch.Tensor], samples: int) -> list[float]:
    torch.manual_seed(SEED)
    try:
        with torch.enable_grad():  # forward itself may take gradients
            output = model(**{name: tensor.clone() for name, tensor in batch.items()})
            return [float(value.detach()) for value in output]
    except (RuntimeError, ValueError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        cure = cure_of(first, "it has to run on every whole number of granules (parallel.granule)")
        raise ModelFails(
            f"model: {type(model).__name__} fails on {samples} samples of the data: {first.rstrip('.')}; {cure}"
        ) from error


def inputs_of(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    values = []
    for source in map(source_of, placeholders(program.graph.graph)):
        if source.role == Role.INPUT:
            values.append(batch[source.name])
        else:
            values.append(program.tensors[source.name] if source.role == Role.CONSTANT else state[source.name])
    return values


class SameDraws(fx.Interpreter):
    """Draws dropout masks as the eager operator does; the functional operator uses other numbers of the generator."""

    def run_node(self, n: fx.Node) -> Any:
        mask_is_used = any(user.args[1] == 1 and user.users for user in n.users if is_getitem(user))
        if is_aten(n, "aten.native_dropout") and not mask_is_used:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return torch.dropout(*args), None
        return super().run_node(n)
