"""The key of the program cache covers every option that the program depends on, and nothing that it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.build.program_key import computed_text, program_key
from elaswave_fx.config.compose import load_config
from elaswave_fx.program.forward_code import forward_code
from elaswave_fx.program.model_fingerprint import fingerprint
from tests.passes.models import Classifier, vectors


def key(*overrides: str, seed: int = 2, model: Classifier | None = None) -> str:
    model, batch = model or Classifier(), vectors(2, seed)
    code, computed = forward_code(model, batch), computed_text(model, batch)
    return program_key(load_config(overrides), fingerprint(model), batch, code, computed)


@pytest.mark.parametrize(
    "override",
    [
        "precision=bf16",
        "recompute=full",
        "passes.find_cuts.least=2",
        "parallel.granule=2",
        "optimizer.no_decay=none",
    ],
)
def test_what_changes_the_program_changes_the_key(override: str) -> None:
    more = ["global_batch=8"]
    assert key(override, *more) != key(*more)


def test_the_model_changes_the_key() -> None:
    assert key(model=Classifier(dropout=0.1)) != key()


@pytest.mark.parametrize(
    "override",
    ["seed=7", "steps=9", "optimizer.lr=0.5", "clip_norm=null", "parallel.micro_batch=1", "passes.dump=graphs"],
)
def test_what_does_not_change_the_program_keeps_the_key(override: str) -> None:
    assert key(override) == key()
    assert key(seed=5) == key(), "samples are not a part of the program"


OPTIONS = {"scale": 1.0}


class Backwards(torch.autograd.Function):
    """The identity, whose gradient is scaled by what its class holds."""

    by = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * Backwards.by


def made(value: float) -> nn.Module:
    """A layer of a class that is made for it: both have one name."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * value

    return Scaled()


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def key_around(layer: nn.Module) -> str:
    model = Classifier()
    model.layers.append(layer)
    return key(model=model)


def by_class(value: float, _: pytest.MonkeyPatch) -> nn.Module:
    return made(value)


def by_closure(value: float, _: pytest.MonkeyPatch) -> nn.Module:
    return Calls(lambda x: x * value)


def by_default(value: float, _: pytest.MonkeyPatch) -> nn.Module:
    return Calls(lambda x, by=value: x * by)


def by_global(value: float, patch: pytest.MonkeyPatch) -> nn.Module:
    patch.setitem(OPTIONS, "scale", value)
    return Calls(lambda x: x * OPTIONS["scale"])


def by_environment(value: float, patch: pytest.MonkeyPatch) -> nn.Module:
    patch.setenv("SCALE_OF_A_TEST", str(value))
    return Calls(lambda x: x * float(os.environ["SCALE_OF_A_TEST"]))


def by_backward(value: float, patch: pytest.MonkeyPatch) -> nn.Module:
    patch.setattr(Backwards, "by", value)
    return Calls(Backwards.apply)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [by_class, by_closure, by_default, by_global, by_environment, by_backward])
def test_what_is_computed_changes_the_key_wherever_it_comes_from(
    make: Callable[[float, pytest.MonkeyPatch], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = key_around(make(1.0, monkeypatch))
    assert key_around(make(1.0, monkeypatch)) == one
    assert key_around(make(2.0, monkeypatch)) != one
