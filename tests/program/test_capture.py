"""capture: what is exported is what the model computes, or a refusal says why not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.program.capture import capture
from elaswave_fx.program.ir import ResultKind, Role, Source, placeholders, source_of
from tests.passes.compiled import captured, run_graph
from tests.passes.models import (
    CLASSES,
    TOKENS,
    WIDTH,
    Classifier,
    ExponentialMean,
    FixedBatch,
    Normed,
    Tied,
    tokens,
    vectors,
)


def sources(model: nn.Module) -> set[Source]:
    make = tokens if isinstance(model, Tied) else vectors
    return {source_of(node) for node in placeholders(captured(model, make).graph.graph)}


class Small(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=1)


def test_a_program_knows_its_sources() -> None:
    class Sourced(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.unused = nn.Parameter(torch.ones(3))
            self.constant = torch.full((WIDTH,), 2.0)

        def features(self, x: Tensor) -> Tensor:
            return super().features(x) * self.table + self.constant

    program = captured(Sourced(), vectors)
    assert program.dynamic_batch
    read = {source_of(node) for node in placeholders(program.graph.graph)}
    assert {s.name for s in read if s.role == Role.PARAM} == {n for n, _ in Small().named_parameters()}
    assert {s.name for s in read if s.role == Role.BUFFER} == {"table"}
    assert {s.name for s in read if s.role == Role.INPUT} == {"x", "y"}
    ((constant, tensor),) = program.tensors.items()
    assert Source(Role.CONSTANT, constant) in read and torch.equal(tensor, torch.full((WIDTH,), 2.0))
    assert not program.params["unused"].aliases and "unused" in program.params


def test_the_graph_computes_the_model_for_any_batch() -> None:
    model = Small()
    program = captured(model, vectors)
    for samples in (1, 2, 5):
        batch = vectors(samples, samples)
        with torch.no_grad():
            expected = model(**batch)
        for got, wanted in zip(run_graph(program, model, batch), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_one_tensor_given_as_two_inputs_is_captured_as_two() -> None:
    class Both(Small):
        def forward(self, x: Tensor, target: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return token_loss_sum(self.head(self.features(x) - 2 * target[:, 0]), y)

    def twice(samples: int, seed: int) -> dict[str, Tensor]:
        batch = vectors(samples, seed)
        return {"x": batch["x"], "target": batch["x"], "y": batch["y"]}

    model = Both()
    program = captured(model, twice)
    batch = {**twice(3, 5), "target": torch.ones(3, TOKENS, WIDTH)}
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-6, atol=1e-6)


def test_capturing_leaves_parameters_and_buffers_as_they_were() -> None:
    model = Normed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured(model, vectors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tied_tensor_is_one_parameter() -> None:
    program = captured(Tied(), tokens)
    assert program.params["embed.weight"].aliases == ("head.weight",)
    assert "head.weight" not in program.params
    assert Source(Role.PARAM, "embed.weight") in sources(Tied())


def test_a_buffer_under_two_names_is_one() -> None:
    class Shared(Small):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))
            self.again = nn.Module()
            self.again.register_buffer("table", self.table)

        def features(self, x: Tensor) -> Tensor:
            return super().features(x) * self.table + self.again.table

    assert set(captured(Shared(), vectors).buffers) == {"table"}


def test_updates_of_buffers_are_results() -> None:
    program = captured(ExponentialMean(layers=1), vectors)
    updated = {result.name for result in program.results if result.kind == ResultKind.BUFFER}
    assert updated == {"mean", "last"}


def test_where_only_one_batch_size_exports_the_granule_serves() -> None:
    model = FixedBatch(layers=1)
    program = captured(model, vectors, granule=4)
    assert not program.dynamic_batch
    batch = vectors(4, 9)
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-6, atol=1e-6)


def test_parameters_become_contiguous() -> None:
    model = Small()
    model.head.weight = nn.Parameter(torch.randn(WIDTH, CLASSES).t())
    captured(model, vectors)
    assert model.head.weight.is_contiguous()


class Branching(Small):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features * 2 if features.sum() > 0 else features


class Conditional(Small):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return torch.cond(features.sum() > 0, lambda f: f * 2, lambda f: f + 1, (features,))


class Coin(Small):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * random.random()


class WritesInput(Small):
    def features(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().features(x)


class OneResult(Small):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y)[0]


class ThreeResults(Small):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss, count = super().forward(x, y)
        return loss, count, loss * 2


class NeedsTwo(Small):
    def features(self, x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            raise ValueError("one sample is not enough")
        return super().features(x)


class Mixed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head = self.head.double()


class Autocast(Small):
    """Casts are part of the graph."""

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().features(x).float()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Branching(),
            r"model: Branching cannot be exported in Branching\.features, line \d+ \(.*\): Could not guard on data-dep",
        ),
        (Conditional(), "model: cond in .* is a control-flow operator; it cannot be cut"),
        (
            Coin(),
            r"forward draws from Python's generator \(module random\) in Coin.features, line \d+ .*by torch, such as",
        ),
        (WritesInput(), "model: the forward pass mutates 'x'; only buffers may be updated"),
        (OneResult(), r"model: returns a single value; a model returns \(loss sum, count\)"),
        (ThreeResults(), r"model: returns more than two values; a model returns \(loss sum, count\)"),
        (NeedsTwo(), "NeedsTwo"),
        (Mixed(), "model: head.weight is torch.float64 and layers.0.norm.weight is torch.float32"),
        (Small().requires_grad_(False), "model: Small has no parameter to train"),
        (Small().to("meta"), "model: must be built on the cpu, but .* is on meta"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_refusals(model: nn.Module, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=message) as refused:
        captured(model, vectors, granule=1)
    assert "\n" not in str(refused.value), "one line for the user"
    assert capfd.readouterr().err == ""


def test_autocast_becomes_casts() -> None:
    model = Autocast()
    program = captured(model, vectors)
    batch = vectors(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0], rtol=1e-5, atol=1e-5)


def test_a_model_that_fails_on_one_granule_says_so() -> None:
    batches = (vectors(4, 1), vectors(6, 2))
    assert capture(NeedsTwo(), batches, granule=2).granule == 2
    with pytest.raises(CaptureError, match=r"NeedsTwo .*one sample is not enough"):
        capture(NeedsTwo(), batches, granule=1)
