"""shared_storage: tensors of a model that are one in memory, and those that only look so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.build.make_model import initial_state
from elaswave_fx.checkpoint.initial_state import InitialState, save_state
from elaswave_fx.errors import CaptureError
from elaswave_fx.program.shared_storage import refuse_shared_storage
from tests.passes.compiled import front
from tests.passes.models import Classifier, vectors


def two() -> Any:
    model: Any = nn.Module()
    model.one, model.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    return model


def tied_by_data() -> Any:
    model = two()
    model.other.weight.data = model.one.weight.data
    return model


def transposed() -> Any:
    model = two()
    model.other.weight = nn.Parameter(model.one.weight.t())
    return model


def a_part() -> Any:
    model = two()
    model.other.weight = nn.Parameter(model.one.weight[1:])
    return model


def a_buffer() -> Any:
    model = two()
    model.register_buffer("seen", model.one.weight.detach()[0])
    return model


def expanded() -> Any:
    model = two()
    model.other.weight = nn.Parameter(torch.ones(1, 1).expand(4, 4))
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (tied_by_data, "parameter one.weight and parameter other.weight .* as other.weight = one.weight does"),
        (transposed, "parameter one.weight and parameter other.weight .* as other.weight = one.weight does"),
        (a_part, "parameter one.weight and parameter other.weight .* to take other.weight from one.weight in forward"),
        (a_buffer, "parameter one.weight and buffer seen .* to compute the buffer in forward"),
        (expanded, r"elements of the parameter other.weight \[4, 4\] are one in memory"),
    ],
)
def test_refused(make: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as refused:
        refuse_shared_storage(make())
    assert "\n" not in str(refused.value)


def tied() -> Any:
    model = two()
    model.other.weight = model.one.weight
    return model


def chunks() -> Any:
    """Parts of one tensor between each other."""
    model = two()
    model.one.weight, model.other.weight = (nn.Parameter(part) for part in torch.randn(4, 8).chunk(2, dim=1))
    return model


def frozen() -> Any:
    return tied_by_data().requires_grad_(False)


@pytest.mark.parametrize("make", [tied, chunks, frozen])
def test_what_is_not_one_tensor_in_training_is_kept(make: Any, tmp_path: Path) -> None:
    model = make()
    refuse_shared_storage(model)
    path = tmp_path / "state"
    save_state(initial_state(model), path)
    for name, parameter in model.named_parameters():
        assert torch.equal(InitialState(path).tensor(name), parameter)


class ByAnotherName(Classifier):
    """Reads a parameter by a tensor that torch.export takes for a constant."""

    def __init__(self, take: Callable[[Tensor], Any]) -> None:
        super().__init__(layers=1)
        self.held = [take(self.head.weight)]

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + torch.as_tensor(self.held[0]).mean()


@pytest.mark.parametrize("take", [lambda w: w.data, lambda w: w.detach()[1:], lambda w: w.detach().numpy()])
def test_a_parameter_by_another_name_is_no_constant(take: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="forward reads head.weight by a way that .* for a constant, .* to read it"):
        front(ByAnotherName(take), vectors, 1)


def test_a_copy_of_a_parameter_is_a_constant() -> None:
    model = ByAnotherName(lambda weight: weight.detach().clone())
    (constant,) = front(model, vectors, 1).tensors.values()
    assert torch.equal(constant, model.head.weight)
