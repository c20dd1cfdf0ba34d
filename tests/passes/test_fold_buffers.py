"""fold_buffers: the update of a buffer is a fold over granules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elaswave_fx.errors import CaptureError
from elaswave_fx.passes.fold_buffers import FoldBuffers
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program.ir import Program, ResultKind
from elaswave_fx.program.text import graph_text
from tests.passes.compiled import captured, run_graph, state_of
from tests.passes.models import WIDTH, Classifier, ExponentialMean, Normed, vectors


def folded(model: Classifier) -> Program:
    return FoldBuffers().apply(Normalize().apply(captured(model, vectors)))


def fold_over(program: Program, model: Classifier, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every mutable buffer after these granules, one after the other."""
    buffers = {name: tensor.clone() for name, tensor in state_of(model).items()}
    for batch in batches:
        results = dict(zip(program.results, run_graph(program, model, batch), strict=True))
        for fold in program.folds:
            values = [v for r, v in results.items() if r.kind == ResultKind.FOLD and r.name == fold.buffer]
            (buffers[fold.buffer],) = fold.graph(buffers[fold.buffer], *values)
    return {fold.buffer: buffers[fold.buffer] for fold in program.folds}


@pytest.mark.parametrize("model", [Normed(), ExponentialMean()], ids=["BatchNorm", "own"])
def test_folds_equal_eager_updates(model: Classifier) -> None:
    program = folded(model)
    batches = [vectors(4, seed) for seed in (3, 4, 5)]
    ours = fold_over(program, model, batches)
    for batch in batches:
        with torch.no_grad():
            model(**batch)
    assert ours.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(ours[name], buffer, rtol=1e-5, atol=1e-6)


def test_golden(golden: Callable[[str, str], None]) -> None:
    program = folded(ExponentialMean())
    folds = [f"\nfold {fold.buffer}, {fold.num_values} values\n{graph_text(fold.graph)}" for fold in program.folds]
    golden("passes/fold_buffers.txt", graph_text(program.graph) + "".join(folds))


def test_a_loss_that_reads_an_updated_buffer_is_refused() -> None:
    message = "model: buffer 'mean' is read by aten.add.Tensor in .* and updated in the same step"
    with pytest.raises(CaptureError, match=message):
        folded(ExponentialMean(read=True))


def test_an_update_that_reads_another_buffer_is_refused() -> None:
    class Crossed(ExponentialMean):
        def features(self, x: Tensor) -> Tensor:
            self.mean.add_(self.last)
            return Classifier.features(self, x)

    with pytest.raises(CaptureError, match="model: the update of buffer 'mean' reads another buffer, last"):
        folded(Crossed())


def test_an_update_that_reads_the_batch_size_is_refused() -> None:
    class Counting(ExponentialMean):
        def features(self, x: Tensor) -> Tensor:
            self.mean.add_(x.shape[0])
            return Classifier.features(self, x)

    with pytest.raises(CaptureError, match="model: the update of buffer 'mean' reads the number"):
        folded(Counting())


def test_a_constant_step_needs_no_values() -> None:
    class Steps(Classifier):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.register_buffer("steps", torch.zeros(WIDTH, dtype=torch.int64))

        def features(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            return super().features(x)

    model = Steps()
    program = folded(model)
    assert [fold.num_values for fold in program.folds] == [0]
    assert fold_over(program, model, [vectors(4, 1)] * 3)["steps"].tolist() == [3] * WIDTH
