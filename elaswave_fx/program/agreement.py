"""Does a captured program compute what its model computes? Both run on the same batch with the same random numbers.

loss of the eager model 2011.88, of the graph 1674.97  ->  CaptureError
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import Program, ResultKind, Role, is_aten, is_getitem, placeholders, source_of

_RELATIVE_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_TOLERANCE_OF_OTHERS = 1e-2


def check_against_eager(model: nn.Module, program: Program, batch: Mapping[str, torch.Tensor]) -> None:
    """Compare loss sum and count of the graph, before any pass, with those of the model. The model's state is kept.

    Raises CaptureError with both numbers when they differ by more than rounding, or when the model fails on the batch.
    """
    samples = len(next(iter(batch.values())))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    try:
        expected = _run_eager(model, batch, samples)
    finally:
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(before[name])
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = _SameDraws(program.graph).run(*_inputs(program, before, batch))
    got = {result.kind: float(value) for result, value in zip(program.results, outputs, strict=True)
           if result.kind in (ResultKind.LOSS, ResultKind.COUNT)}  # fmt: skip
    dtypes = {tensor.dtype for tensor in before.values() if tensor.is_floating_point()}
    tolerance = max((_RELATIVE_TOLERANCE.get(dtype, _TOLERANCE_OF_OTHERS) for dtype in dtypes), default=1e-5)
    for kind, value in zip((ResultKind.LOSS, ResultKind.COUNT), expected, strict=True):
        if not abs(value - got[kind]) <= tolerance * max(1.0, abs(value)):
            raise CaptureError(
                f"model: with {samples} samples the {kind.value} of {type(model).__name__} is {value:.6g} and that of "
                f"its captured graph {got[kind]:.6g}; something in it is not seen by the capture, such as a random "
                "number drawn outside of torch or a branch on the batch size"
            )


def _run_eager(model: nn.Module, batch: Mapping[str, torch.Tensor], samples: int) -> list[float]:
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return [float(value) for value in model(**{name: tensor.clone() for name, tensor in batch.items()})]
    except (RuntimeError, ValueError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CaptureError(
            f"model: {type(model).__name__} fails on {samples} samples: {first}; it has to run on every whole number "
            "of granules (parallel.granule)"
        ) from error


def _inputs(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    values = []
    for source in map(source_of, placeholders(program.graph.graph)):
        if source.role == Role.INPUT:
            values.append(batch[source.name])
        else:
            values.append(program.tensors[source.name] if source.role == Role.CONSTANT else state[source.name])
    return values


class _SameDraws(fx.Interpreter):
    """Draws dropout masks as the eager operator does; the functional one takes other numbers from the generator."""

    def run_node(self, n: fx.Node) -> Any:
        mask_is_used = any(user.args[1] == 1 and user.users for user in n.users if is_getitem(user))
        if is_aten(n, "aten.native_dropout") and not mask_is_used:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return torch.dropout(*args), None
        return super().run_node(n)
