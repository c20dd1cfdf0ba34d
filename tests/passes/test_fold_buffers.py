"""fold_buffers: the update of a buffer is a fold over granules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elaswave_fx.passes.fold_buffers import FoldBuffers
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program.ir import Program, ResultKind
from elaswave_fx.program.text import graph_text
from tests.passes.compiled import captured, run_graph, state_of
from tests.passes.models import WIDTH, Classifier, ExponentialMean, Normed, NormedTwice, vectors


def folded(model: Classifier) -> Program:
    return FoldBuffers().apply(Normalize().apply(captured(model, vectors)))


def fold_over(program: Program, model: Classifier, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every mutable buffer after a step of these granules, one after the other."""
    buffers = {name: tensor.clone() for name, tensor in state_of(model).items()}
    for number, batch in enumerate(batches):
        results = dict(zip(program.results, run_graph(program, model, batch), strict=True))
        for fold in program.folds:
            values = [v for r, v in results.items() if r.kind == ResultKind.FOLD and r.name == fold.buffer]
            if number == 0 or not fold.per_step:
                (buffers[fold.buffer],) = fold.graph(buffers[fold.buffer], *values)
    return {fold.buffer: buffers[fold.buffer] for fold in program.folds}


@pytest.mark.parametrize(
    "model", [Normed(), NormedTwice(), ExponentialMean()], ids=["BatchNorm", "BatchNorm called twice", "own"]
)
def test_folds_equal_eager_updates(model: Classifier) -> None:
    program = folded(model)
    batches = [vectors(4, seed) for seed in (3, 4, 5)]
    ours = fold_over(program, model, batches)
    for batch in batches:
        with torch.no_grad():
            model(**batch)
    expected = dict(model.named_buffers())
    assert ours.keys() == expected.keys()
    for name in ours.keys() - {"norm.num_batches_tracked"}:  # It counts steps.
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-5, atol=1e-6)
    assert not program.whole_batch


def test_golden(golden: Callable[[str, str], None]) -> None:
    program = folded(ExponentialMean())
    folds = [f"\nfold {fold.buffer}, {fold.num_values} values\n{graph_text(fold.graph)}" for fold in program.folds]
    golden("passes/fold_buffers.txt", graph_text(program.graph) + "".join(folds))


class Kept(ExponentialMean):
    """Buffers that become values of the last sample and of the batch, whatever they were before."""

    def features(self, x: Tensor) -> Tensor:
        features = Classifier.features(self, x)
        with torch.no_grad():
            self.mean.copy_(x.mean(dim=(0, 1)))
            self.last.copy_(features[-1])
        return features


def test_a_buffer_that_is_overwritten_is_that_of_the_last_granule() -> None:
    model = Kept()
    program = folded(model)
    batches = [vectors(4, seed) for seed in (3, 4)]
    ours = fold_over(program, model, batches)
    with torch.no_grad():
        model(**batches[-1])
    assert not program.whole_batch and ours.keys() == {"mean", "last"}
    torch.testing.assert_close(ours, dict(model.named_buffers()), rtol=1e-5, atol=1e-6)


class Crossed(ExponentialMean):
    """A buffer whose update reads another one."""

    def features(self, x: Tensor) -> Tensor:
        self.mean.add_(self.last + (x.mean() if self.read else 0))
        return Classifier.features(self, x)


class Cumulative(Classifier):
    """An average of all steps, whose rate follows from a counter. `constant`: from a buffer that never changes;
    `summed`: a sum of samples over the counter."""

    def __init__(self, constant: bool = False, summed: bool = False) -> None:
        super().__init__(layers=1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.ones(()))
        self.constant, self.summed = constant, summed

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if not self.constant:
            self.steps.add_(1)
        seen = features.detach().mean(dim=0)
        self.mean.add_(seen / self.steps if self.summed else (seen - self.mean) / (self.steps + 1))
        return features


class Counting(ExponentialMean):
    """A buffer that counts samples."""

    def features(self, x: Tensor) -> Tensor:
        self.mean.add_(x.shape[0])
        return Classifier.features(self, x)


class Memory(ExponentialMean):
    """A buffer with the last features, which the next batch is compared with."""

    def features(self, x: Tensor) -> Tensor:
        features = Classifier.features(self, x)
        compared = features + self.last
        self.last = features.detach().sum(dim=0)
        return compared


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            ExponentialMean(read=True),
            "buffer 'mean' is read by aten.add.Tensor in the model, and updated from the same",
        ),
        (Memory(), "buffer 'last' is read by aten.add.Tensor in the model, and updated from the same samples"),
        (Counting(), "the update of buffer 'mean' reads the number"),
        (Cumulative(), "the update of buffer 'mean' reads another one, 'steps', and samples"),
        (Cumulative(summed=True), "the update of buffer 'mean' reads another one, 'steps', and samples"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Classifier) else "",
)
def test_an_update_that_does_not_split_wants_the_whole_batch(model: Classifier, reason: str) -> None:
    program = folded(model)
    assert reason in program.whole_batch[0]
    batch = vectors(4, 1)
    ours = fold_over(program, model, [batch])
    with torch.no_grad():
        model(**batch)
    for name, value in ours.items():
        torch.testing.assert_close(value, dict(model.named_buffers())[name], rtol=1e-5, atol=1e-6)


def test_a_rate_of_a_buffer_that_never_changes_is_the_same_in_all_granules() -> None:
    assert not folded(Cumulative(constant=True)).whole_batch


class Steps(Classifier):
    """A counter that opens a gate."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("steps", torch.zeros(WIDTH, dtype=torch.int64))

    def features(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return super().features(x) * (self.steps / 4)


@pytest.mark.parametrize(
    ("model", "buffer"), [(Steps(), "steps"), (Crossed(), "mean")], ids=["a counter", "another buffer"]
)
def test_what_no_sample_has_a_part_in_is_updated_once_per_step(model: Classifier, buffer: str) -> None:
    program = folded(model)
    assert [fold.buffer for fold in program.folds if fold.per_step] == [buffer]
    assert not program.whole_batch
    ours = fold_over(program, model, [vectors(4, 1)] * 3)
    with torch.no_grad():
        model(**vectors(12, 1))
    torch.testing.assert_close(ours[buffer], dict(model.named_buffers())[buffer])
