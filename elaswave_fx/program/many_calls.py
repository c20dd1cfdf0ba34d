"""Results of many calls in a row, with the same samples, parameters and draws: a count of calls shows in them, wherever
it is kept: in a file's position, a table of another library, a variable of the process.

calls = ManyCalls(model, batch)     # the first one
calls.refuse_changes()              # CaptureError: Net computes something else in later calls
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.batch_run import is_close
from elaswave_fx.program.state_kept import SEED, state_kept

_WORKED_S, _WAITED_S, _MOST = 0.25, 1.0, 2000
"""Bounds of calls in a row: seconds of processor time; of waiting; calls that cost next to nothing."""


def numbers_within_budget() -> Iterator[int]:
    """1, 2, 3 … until the bounds are reached: of processor time, as others use the machine too, and of waiting."""
    began_s, worked_s = time.monotonic(), time.process_time()
    for number in range(1, _MOST):
        yield number
        if number >= 16 and number % 16:
            continue  # asking for the time takes as long as a small call
        waited, worked = time.monotonic() - began_s, time.process_time() - worked_s
        if waited > _WAITED_S or worked > _WORKED_S:
            return


class ManyCalls:
    """Calls of a model, of which the first is made on construction. Parameters and buffers are restored; other state
    is for the caller to restore."""

    def __init__(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
        self._model, self._batch = model, batch
        self._first = results(model, batch)

    @property
    def runs(self) -> bool:
        """Whether the first call returned something."""
        return bool(self._first)

    def refuse_changes(self) -> None:
        """Raise CaptureError if a later call returns something else than the first."""
        for _ in numbers_within_budget():
            if self.differ():
                raise CaptureError(
                    f"model: {type(self._model).__name__} computes something else in later calls with the same samples "
                    "and parameters: it depends on how often it is called, and its program is captured once; a way "
                    "out is a buffer (register_buffer) that counts"
                )

    def differ(self) -> bool:
        """Whether another call returns something else than the first; a call that fails returns nothing."""
        return are_unlike(results(self._model, self._batch), self._first)


def results(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a call returns, with the draws of any other; none if it fails. Parameters and buffers are
    restored."""
    inputs = {name: tensor.clone() for name, tensor in batch.items()}
    found: list[torch.Tensor] = []
    with (
        state_kept(model),
        torch.random.fork_rng(devices=()),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Exception),  # of the user's code; the capture tells why it fails
        _without_compiling(),
    ):
        torch.default_generator.manual_seed(SEED)
        model.train()
        found = [each.detach() for each in tree_leaves(model(**inputs)) if isinstance(each, torch.Tensor)]
    return found


def are_unlike(some: list[torch.Tensor], others: list[torch.Tensor], tolerance: float = 1e-4) -> bool:
    """Whether two calls return something else; one that failed tells nothing."""
    if not some or not others:
        return False
    return len(some) != len(others) or not all(_is_equal(*pair, tolerance) for pair in zip(some, others, strict=True))


def _without_compiling() -> AbstractContextManager[object]:
    """What torch.compile wraps runs as it is."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _is_equal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return one.shape == other.shape and is_close(one, other, tolerance)
