"""export_unnoticed: user code computes in an export what it computes in an eager call, or the model is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.compiler import is_compiling

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.capture import capture
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
    "asked",
    [
        torch.compiler.is_compiling,
        is_compiling,
        torch._dynamo.is_compiling,
        torch.compiler.is_exporting,
        torch.compiler.is_dynamo_compiling,
    ],
)
def test_the_branch_of_an_eager_call_is_captured(asked: Callable[[], bool]) -> None:
    """The values are within the bounds at first, so that a comparison of results finds nothing."""
    before = asked.__code__
    assert "clamp" in operators(lambda x: x if asked() else x.clamp(-99, 99))
    assert "clamp" not in operators(lambda x: x.clamp(-99, 99) if asked() else x)
    assert asked.__code__ is before


def test_torch_itself_is_told_of_the_export() -> None:
    ask = eval("lambda: is_compiling()", {"is_compiling": torch.compiler.is_compiling})
    ask.__code__ = ask.__code__.replace(co_filename=torch.__file__)
    assert "clamp" in operators(lambda x: x.clamp(-99, 99) if ask() else x)


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (by_item, "Python looks at a value"),
        (by_numpy, "numpy.. is not supported"),
        (by_assertion, "Python looks at a value"),
        (by_nonzero, "nonzero.. or the like gives as many values as the data has"),
    ],
)
def test_an_error_of_the_export_that_forward_catches_is_no_branch(
    change: Callable[[Tensor], Tensor], reason: str
) -> None:
    with pytest.raises(CaptureError, match=f"Changed cannot be exported: .*{reason}"):
        operators(change)


def test_errors_of_eager_code_may_be_caught() -> None:
    def change(x: Tensor) -> Tensor:
        try:
            return x * {"one": 1}["two"]
        except KeyError:
            return x.clamp(-99, 99)

    assert "clamp" in operators(change)
