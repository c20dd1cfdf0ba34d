"""normalize: what computes nothing goes, running statistics become arithmetic, effects are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.models.losses import token_loss_sum
from elaswave_fx.passes.normalize import Normalize, refuse_effects
from elaswave_fx.program.check_gradients import check_gradients
from elaswave_fx.program.invariants import verify
from elaswave_fx.program.ir import UNSET, calls, is_aten
from elaswave_fx.program.text import graph_text
from tests.passes.compiled import (
    artifact_of,
    assert_same,
    calls_of,
    captured,
    compile_model,
    eager,
    run_graph,
    run_native,
)
from tests.passes.models import WIDTH, Classifier, Normed, tokens, vectors


class Busy(Normed):
    """A cast to what it is already, a slice that is written, a view, BatchNorm."""

    def features(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32).clone()
        x[:, 0] = 0.5
        return super().features(x.view(-1, x.shape[1], WIDTH))


def test_golden(golden: Callable[[str, str], None]) -> None:
    program = Normalize().apply(captured(Busy(), vectors))
    verify(program, "normalize")
    golden("passes/normalize.txt", graph_text(program.graph))


def test_the_numbers_stay_the_same() -> None:
    model = Busy()
    before = captured(model, vectors)
    after = Normalize().apply(before)
    batch = vectors(5, 3)
    for old, new in zip(run_graph(before, model, batch), run_graph(after, model, batch), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


class Swapped(Classifier):
    """Halves of features that change places in memory which holds nothing before."""

    def __init__(self, memory: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.memory = memory

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        swapped = self.memory(features)
        swapped[:, : WIDTH // 2], swapped[:, WIDTH // 2 :] = features[:, WIDTH // 2 :], features[:, : WIDTH // 2]
        return swapped


@pytest.mark.parametrize(
    "memory",
    [
        torch.empty_like,
        lambda x: x.new_empty(x.shape),
        lambda x: torch.empty(x.shape),
        lambda x: torch.empty(x.shape, memory_format=torch.contiguous_format),
        lambda x: torch.empty_strided(x.shape, (1, x.shape[0])),
        lambda x: x.new_empty_strided(x.shape, (1, x.shape[0])),
        lambda x: torch.empty_permuted(x.shape, (1, 0)),
    ],
)
def test_memory_that_holds_nothing_is_zeros(memory: Callable[[Tensor], Tensor]) -> None:
    model = Swapped(memory)
    program = Normalize().apply(captured(model, vectors))
    assert not [node for node in calls(program.graph.graph) if is_aten(node, *UNSET)]
    batch = vectors(3, 1)
    with torch.no_grad():
        torch.testing.assert_close(run_graph(program, model, batch)[0], model(**batch)[0])


def test_what_computes_nothing_is_gone() -> None:
    program = captured(Busy(), vectors)
    before, after = calls_of(program.graph), calls_of(Normalize().apply(program).graph)
    assert "aten._native_batch_norm_legit_functional" in before
    assert not {"aten._native_batch_norm_legit_functional", "aten.copy", "aten.view", "aten.lift_fresh_copy"} & {*after}
    assert "aten._native_batch_norm_legit.no_stats" in after


def test_statistics_in_evaluation_mode_are_read_and_not_updated() -> None:
    class Steady(Normed):
        def train(self, mode: bool = True) -> Steady:
            super().train(mode)
            self.norm.eval()
            return self

    program = Normalize().apply(captured(Steady(), vectors))
    assert "aten._native_batch_norm_legit_no_training" in calls_of(program.graph)
    assert [result.kind.value for result in program.results] == ["loss", "count"]


def test_an_operator_that_writes_to_its_input_is_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add_.Tensor, (x, x)))
    with pytest.raises(CaptureError, match="model: aten.add_.Tensor in the model changes its input in place"):
        refuse_effects(graph)


def test_statistics_of_a_low_precision_are_kept_in_single_precision() -> None:
    model = Normed(layers=1).to(torch.bfloat16)

    def bf16(samples: int, seed: int) -> dict[str, Tensor]:
        batch = vectors(samples, seed)
        return {**batch, "x": batch["x"].to(torch.bfloat16)}

    program = Normalize().apply(captured(model, bf16))
    kept = {name: spec.dtype for name, spec in program.buffers.items()}
    assert kept["norm.running_mean"] == kept["norm.running_var"] == torch.float32
    results = dict(zip(program.results, run_graph(program, model.float(), vectors(4, 1)), strict=True))
    assert {value.dtype for result, value in results.items() if "running" in result.name} == {torch.float32}


class Sparse(nn.Module):
    """Two tables whose gradients are sparse in eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(16, WIDTH, mode="sum", sparse=True)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.table(input_ids)) + self.bag(input_ids)[:, None]
        return token_loss_sum(self.head(features), labels)


def test_sparse_gradients_become_dense_and_are_said() -> None:
    torch.manual_seed(0)
    model = Sparse()
    result = compile_model(model, tokens)
    assert result.program.notes == ("gradients of table, bag are dense: sparse=True changes no number",)
    assert artifact_of(result).notes == result.program.notes
    batch = tokens(3, 5)
    check_gradients(model, Normalize().apply(captured(model, tokens)), batch, batch)
    expected = eager(model, batch)
    dense = {name: gradient.to_dense() for name, gradient in expected.gradients.items()}
    assert_same(run_native(result, batch), replace(expected, gradients=dense))


class Squeezed(Classifier):
    """Takes away a dimension of one element in some way."""

    def __init__(self, squeeze: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.squeeze = squeeze

    def features(self, x: Tensor) -> Tensor:
        return self.squeeze(super().features(x)[:, None])


def _of_the_samples_too(x: Tensor) -> Tensor:
    """Another squeeze, of which nothing remains."""
    return x.squeeze(1).squeeze(0)


@pytest.mark.parametrize(
    "squeeze",
    [Tensor.squeeze, lambda x: x.squeeze((0, 1)), _of_the_samples_too, torch.func.vmap(lambda x: x.squeeze())],
)
def test_squeeze_leaves_the_samples_where_there_is_one(squeeze: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Squeezed(squeeze)
    result = compile_model(model, vectors)
    batch = vectors(4, 5)
    expected = eager(model, batch)
    assert_same(run_native(result, batch), expected)
    ones = [run_native(result, {name: each[i : i + 1] for name, each in batch.items()}) for i in range(4)]
    gradients = {name: sum(one.gradients[name] for one in ones) for name in expected.gradients}
    assert_same(replace(expected, loss=sum(one.loss for one in ones), gradients=gradients), expected)


class Moved(Normed):
    """Running statistics that forward changes before the module does."""

    def features(self, x: Tensor) -> Tensor:
        self.norm.running_mean.sub_(1)
        return super().features(x)


class Taught(Normed):
    """A frozen teacher in training mode under no_grad, whose statistics move though it learns nothing."""

    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.norm(Classifier.features(self, 2 * x))
        return Classifier.features(self, x) * taught.sigmoid()


def test_statistics_move_without_gradients_too() -> None:
    model = Taught()
    before = captured(model, vectors)
    after = Normalize().apply(before)
    assert "aten._native_batch_norm_legit.no_stats" in calls_of(after.graph)
    batch = vectors(5, 3)
    for old, new in zip(run_graph(before, model, batch), run_graph(after, model, batch), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_statistics_that_something_else_changes_are_refused() -> None:
    with pytest.raises(CaptureError, match="in norm keeps running statistics in something else than two buffers, or"):
        Normalize().apply(captured(Moved(), vectors))
