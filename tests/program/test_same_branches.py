"""same_branches: user code takes the branches of a call in an export, or the model is refused."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.compiler import is_exporting
from transformers.utils import is_torchdynamo_compiling

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.capture import capture
from elaswave_fx.program.same_branches import note_of_compiled_branch, refuse_other_branches
from tests.passes.models import Classifier, vectors


class Changed(Classifier):
    """`change` is applied to its features."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.change = change

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.change(x), y)


def operators(change: Callable[[Tensor], Tensor]) -> str:
    return str(capture(Changed(change), (vectors(2, 0), vectors(3, 1)), 1).graph.graph)


@pytest.mark.parametrize(
    "asked", [torch.compiler.is_compiling, torch._dynamo.is_compiling, is_exporting, is_torchdynamo_compiling]
)
def test_the_branch_of_a_compiled_model_is_captured_and_named(asked: Callable[[], bool]) -> None:
    """The values are within the bounds at first, so that a comparison of results finds nothing."""

    def change(x: Tensor) -> Tensor:
        return x if asked() else x.clamp(-99, 99)

    assert "clamp" not in operators(change)
    (note,) = note_of_compiled_branch(Changed(change), vectors(2, 0))
    assert "change, line" in note and "return x if asked() else x.clamp(-99, 99)" in note
    assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    assert note_of_compiled_branch(Changed(lambda x: x), vectors(2, 0)) == ()


def test_a_check_of_values_that_is_left_out_when_compiled_is_captured() -> None:
    def change(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x.tanh()

    assert "tanh" in operators(change)


def by_item(x: Tensor) -> Tensor:
    try:
        if float(x.abs().max()) > 99:
            x = x.clamp(-99, 99)
    except Exception:  # noqa: BLE001
        pass
    return x


def by_numpy(x: Tensor) -> Tensor:
    with contextlib.suppress(TypeError, RuntimeError):
        if np.abs(x.detach().numpy()).max() > 99:
            return x.clamp(-99, 99)
    return x


def by_assertion(x: Tensor) -> Tensor:
    try:
        assert torch.isfinite(x).all()
    except (AssertionError, RuntimeError):
        return x * 0.5
    return x


def by_nonzero(x: Tensor) -> Tensor:
    try:
        return x if len(x.nonzero()) > 0 else x * 2
    except Exception:  # noqa: BLE001
        return x * 3


def by_type(x: Tensor) -> Tensor:
    return x.clamp(-99, 99) if type(x) is Tensor else x


def by_type_of_size(x: Tensor) -> Tensor:
    return x.clamp(-99, 99) if isinstance(x.size(0), int) else x


@pytest.mark.parametrize("change", [by_item, by_numpy, by_assertion, by_nonzero, by_type, by_type_of_size])
def test_another_branch_in_an_export_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=f"another way in an export than in a call: {change.__name__}, line|not seen by the cap"
    ):
        operators(change)


def test_errors_of_eager_code_may_be_caught() -> None:
    def change(x: Tensor) -> Tensor:
        try:
            return x * {"one": 1}["two"]
        except KeyError:
            return x.clamp(-99, 99)

    assert "clamp" in operators(change)


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.linspace(0.5, 1, size)


def test_what_is_made_once_is_no_other_branch() -> None:
    def change(x: Tensor) -> Tensor:
        return x * table(x.shape[-1])

    assert "mul" in operators(change)


def test_a_log_of_values_is_no_other_branch() -> None:
    log = logging.Logger("values")
    log.addHandler(logging.StreamHandler(io.StringIO()))

    def change(x: Tensor) -> Tensor:
        log.error("largest %.3f", x.max().item())
        return x.tanh()

    assert "tanh" in operators(change)


class Twice(Changed):
    """One module under two names, and a parameter under two."""

    def __init__(self) -> None:
        super().__init__(lambda x: x.tanh())
        self.again = self.layers[0]
        self.head.register_parameter("second", self.head.bias)


def test_the_state_is_as_before_under_all_its_names() -> None:
    model = Twice()
    before = [*model.named_parameters(remove_duplicate=False)]
    refuse_other_branches(model, vectors(2, 0), contextlib.nullcontext)
    for (name, one), (again, other) in zip(before, model.named_parameters(remove_duplicate=False), strict=True):
        assert name == again and one is other
    loss, _ = model(**vectors(2, 0))
    assert type(loss) is Tensor
