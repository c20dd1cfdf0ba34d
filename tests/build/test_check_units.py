"""check_units: what compiled units compute is what their graphs do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elaswave_fx.build.check_units import check_units
from elaswave_fx.errors import CaptureError
from tests.passes.compiled import Compiled, artifact_of, compile_model
from tests.passes.models import Classifier, Normed, tokens, vectors
from tests.passes.models import SequenceFirst as Dropping


class Padded(Classifier):
    """torch takes this loss apart into what counts the -1 of padded labels as the class 0."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.stack([y, *[torch.full_like(y, -1)] * (self.head.out_features - 1)], dim=1)
        return F.multilabel_margin_loss(self.head(self.features(x)), labels, reduction="sum"), torch.ones_like(y).sum()


def check(result: Compiled, artifact: Any = None) -> None:
    make = vectors if "x" in result.batch else tokens
    check_units(result.program, artifact or artifact_of(result), make(4, 21))


@pytest.mark.parametrize(
    "model", [Classifier(), Normed(layers=1), Dropping(layers=1, dropout=0.5)], ids=["plain", "coupled", "dropout"]
)
def test_units_compute_what_their_graph_does(model: nn.Module) -> None:
    check(compile_model(model, tokens if isinstance(model, Dropping) else vectors, 4))


def test_an_operator_that_is_taken_apart_wrongly_is_named() -> None:
    words = "the loss of the compiled units is .* that of their graphs .*aten.multilabel_margin_loss.*other op"
    with pytest.raises(CaptureError, match=words):
        check(compile_model(Padded(layers=1), vectors))


class Signed(Classifier):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features * features.sgn()


def test_the_sign_of_real_numbers_has_a_derivative() -> None:
    check(compile_model(Signed(layers=1), vectors))


def test_a_gradient_that_is_not_finite_is_named_as_such() -> None:
    class Rooted(Classifier):
        def features(self, x: Tensor) -> Tensor:
            return super().features(x) + (x * self.head.weight.norm()).square().sum((1, 2))[:, None] ** 0.5

    result = compile_model(Rooted(layers=1), vectors)
    batch = {**vectors(4, 21), "x": torch.zeros(4, *vectors(1, 0)["x"].shape[1:])}
    with pytest.raises(CaptureError, match="the gradient of .* is not finite: some operator has no derivative"):
        check_units(result.program, artifact_of(result), batch)


def test_a_wrong_backward_pass_is_found() -> None:
    """The gradients of a norm's weight and bias are taken for each other's."""
    result = compile_model(Classifier(layers=1), vectors)
    whole = artifact_of(result)
    first, *others = whole.units
    at, other = [place for place, binding in enumerate(first.grads) if binding[0] == "param"][:2]
    grads = list(first.grads)
    grads[at], grads[other] = grads[other], grads[at]
    with pytest.raises(CaptureError, match="the gradient of layers.0.norm.* by the compiled units, and .* by their gr"):
        check(result, replace(whole, units=(replace(first, grads=tuple(grads)), *others)))
