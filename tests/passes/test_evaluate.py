"""evaluate: the derived evaluation is the model in evaluation mode, or is known not to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.models.gpt import GPT
from elaswave_fx.passes.check_evaluation import evaluation_agrees
from elaswave_fx.passes.evaluate import evaluation_graph
from tests.passes.compiled import Compiled, assert_bits, calls_of, compile_model, run_native, run_units
from tests.passes.models import TOKENS, WIDTH, Classifier, tokens, vectors
from tests.passes.zoo import compiled


def agrees(result: Compiled, samples: int = 4) -> bool:
    make = vectors if "x" in result.batch else tokens
    return evaluation_agrees(result.program, result.model, result.state, make(samples, 21))


def draws_left(result: Compiled) -> list[str]:
    evaluated = [call for unit in result.program.units for call in calls_of(evaluation_graph(unit))]
    return [call for call in evaluated if call.startswith("elaswave.")]


def test_statistics_are_read_from_buffers() -> None:
    result = compiled("batch norm")
    moved = {name: tensor + 0.5 if "running" in name else tensor for name, tensor in result.state.items()}
    with torch.no_grad():
        for name, buffer in result.model.named_buffers():
            buffer.copy_(moved[name])
    assert evaluation_agrees(result.program, result.model, moved, vectors(4, 21))
    assert not evaluation_agrees(result.program, result.model, result_state_of_another(moved), vectors(4, 21))
    assert result.model.training, "the mode is put back"
    with torch.no_grad():
        for name, buffer in result.model.named_buffers():
            buffer.copy_(result.state[name])


def result_state_of_another(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 3 if "running_var" in name else tensor for name, tensor in state.items()}


class Standardized(Classifier):
    """Inputs are normalized over the batch before any parameter is read."""

    def __init__(self, affine: bool) -> None:
        super().__init__(layers=1)
        self.norm = nn.BatchNorm1d(WIDTH, affine=affine)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_inputs_are_read_from_buffers(affine: bool) -> None:
    result = compile_model(Standardized(affine), vectors, granule=4)
    assert agrees(result) and len(result.program.folds) == 3


def test_dropout_and_attention_dropout_are_gone() -> None:
    model = GPT(vocab_size=16, seq_len=TOKENS, layers=1, width=16, heads=2, dropout=0.5, attention_dropout=0.5)
    result = compile_model(model, tokens)
    assert agrees(result) and not draws_left(result)


class Dropping(Classifier):
    """Whole channels and whole paths are dropped, as in convolutional networks, in two ways of writing it."""

    def features(self, x: Tensor) -> Tensor:
        x = F.dropout1d(self.layers[0](x), 0.25, self.training)
        if self.training:
            x = x.div(0.75) * (0.75 + torch.rand(x.shape[0], 1, 1)).floor_()
        return x.mean(dim=1)


def test_masks_of_whole_channels_and_paths_keep_their_mean() -> None:
    result = compile_model(Dropping(layers=1), vectors)
    assert agrees(result) and not draws_left(result)


class EveryDropout(Classifier):
    """Every dropout that torch has, where features stand in channels of one to three dimensions."""

    def features(self, x: Tensor) -> Tensor:
        x = F.feature_alpha_dropout(F.alpha_dropout(self.layers[0](x), 0.2, self.training), 0.3, self.training)
        x = F.alpha_dropout(x * 1.0, 0.4, self.training, inplace=True)
        x = torch.feature_dropout(F.dropout1d(x, 0.1, self.training), 0.2, self.training)
        x = F.dropout3d(F.dropout2d(x.view(-1, TOKENS, 4, 2), 0.2, self.training)[:, :, None], 0.2, self.training)
        x = F.dropout(F.rrelu(x, training=self.training), 0.2, self.training, inplace=True)
        return self.layers[1](x.view(-1, TOKENS, WIDTH)).mean(dim=1)


def test_no_dropout_acts_in_evaluation_and_couples_nothing() -> None:
    result = compile_model(EveryDropout(), vectors)
    assert agrees(result)
    assert result.program.dynamic_batch and not result.program.batch_coupled
    batch = vectors(3, 5)
    assert_bits(run_native(result, batch), run_units(result, batch))


class Always(Classifier):
    """Draws in evaluation too."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + torch.rand(x.shape[0], 1)


class OnlyInTraining(Classifier):
    """Adds noise that is not of mean zero, in training only: evaluation cannot be derived."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features + torch.rand(x.shape[0], 1) if self.training else features


class OtherFormula(Classifier):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1.0 if self.training else 2.0)


class Detector(Classifier):
    """Has another result in evaluation, as torchvision's detectors, or none."""

    def __init__(self, evaluate: Callable[[Tensor], Any]) -> None:
        super().__init__(layers=1)
        self.evaluate = evaluate

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) if self.training else self.evaluate(self.head(self.features(x)))


def refuse(_: Tensor) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    "evaluate",
    [refuse, lambda scores: scores, lambda scores: {"scores": scores}, lambda scores: (scores, scores)],
    ids=["an error", "scores", "a mapping", "a pair"],
)
def test_a_model_without_a_loss_in_evaluation_trains(evaluate: Callable[[Tensor], Any]) -> None:
    model = Detector(evaluate)
    assert not agrees(compile_model(model, vectors))
    model.evaluate = lambda scores: (scores.sum(), torch.ones(()))
    assert not agrees(compile_model(model, vectors)), "another loss"
    assert agrees(compile_model(Classifier(layers=1), vectors))


class GateFromZero(Classifier):
    """A branch that is there in training alone, and adds nothing at first."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.gate = nn.Parameter(torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features + self.gate * features.cos() if self.training else features


class Averaged(Classifier):
    """Evaluates another tensor, which is equal at first."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("average", self.head.weight.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.head.weight if self.training else self.average
        return F.cross_entropy(F.linear(self.features(x), weight), y, reduction="sum"), torch.ones_like(y).sum()


class NoisyPenalty(Always):
    """Draws in both modes, and adds a penalty in one."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x, y)
        return loss + 3 * x.square().sum() if self.training else loss, count


class OnlyWithGradients(Classifier):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + torch.is_grad_enabled())


class OwnGradient(Classifier):
    """Takes a gradient in forward, which fails without gradients."""

    def features(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().features(x).square().sum(), x, create_graph=True)
        return super().features(x) + slope.mean(1, keepdim=True)


class BoundInEvaluation(Classifier):
    """A bound that no value of a trial reaches."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features if self.training else features.clamp(-1e4, 1e4)


class BoundInTraining(Classifier):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return torch.where(features > 1e4, features.sqrt(), features) if self.training else features


class NoisyLabels(Classifier):
    """One label in a thousand is another one, in training alone."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            y = torch.where(torch.rand(y.shape) < 1e-3, torch.zeros_like(y), y)
        return super().forward(x, y)


class NoisyLabelsOfAlways(Always):
    """The same where evaluation draws something else."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            y = torch.where(torch.rand(y.shape) < 1e-3, torch.zeros_like(y), y)
        return super().forward(x, y)


class OtherWeight(Always):
    """A variational loss whose second part has a weight of its own in training."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features + torch.randn_like(features) * features.exp().clamp(max=4.0)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x, y)
        return loss + (0.01 if self.training else 0.02) * x.square().sum(), count


class EveryDraw(Classifier):
    """Draws in evaluation whatever has an equal."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        size = (x.shape[0], 1)
        drawn = (
            torch.rand(size) + torch.randn(size) + torch.bernoulli(torch.full(size, 0.3)) + torch.randint(2, 9, size)
        )
        features = features + drawn + torch.empty(size).uniform_(-1.0, 3.0) + torch.empty(size).exponential_(2.0)
        features = features + torch.normal(torch.ones(size), 2.0) + torch.empty(size).normal_(1.0, 0.1)
        features = features + torch.rand_like(features) * torch.randn_like(features)
        return features + torch.randint_like(features, 3)


class MaskedInEvaluation(Classifier):
    """Evaluation would take the mean of a mask."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * torch.bernoulli(torch.empty(x.shape[0], 1), p=0.6)


class Cauchy(Classifier):
    """Draws in evaluation what has none."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + torch.empty(x.shape[0], 1).cauchy_().clamp(-1, 1)


class RareLabels(Classifier):
    """Labels of a class that no trial has count for nothing, in training alone; by a mask, or in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(layers=1)
        self.in_place = in_place

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.in_place:
            y = y.clone()
            y[y == 77] = 0
        elif self.training:
            y = y.masked_fill(y == 77, 0)
        return super().forward(x, y)


class HardSamples(Classifier):
    """Only losses above a bound count in training, which all are at first."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(self.head(self.features(x)), y, reduction="none")
        if self.training:
            losses = losses * (losses > 1e-9)
        return losses.sum(), torch.ones_like(y).sum()


class Swapped(Classifier):
    """Evaluates averages, which `eval` puts in the place of the weights, and which are equal at first."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("average", self.head.weight.detach().clone())

    def train(self, mode: bool = True) -> Swapped:
        if mode != self.training:
            with torch.no_grad():
                now = self.head.weight.clone()
                self.head.weight.copy_(self.average)
                self.average.copy_(now)
        return super().train(mode)


class StraightThrough(Classifier):
    """Rounds in both modes, in training with a gradient of its own; looks at its inputs in evaluation."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        hard = features.round()
        if not self.training:
            self.largest = x.detach().abs().max()
        return features + (hard - features).detach() if self.training else hard


class Masked(Classifier):
    """torch's encoder tries in evaluation whether samples can be nested."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.encoder(x, src_key_padding_mask=x[..., 0] > 1e4))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


class BoundBehindFunction(Classifier):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return Scaled.apply(features if self.training else features.clamp(-1e4, 1e4))  # type: ignore[no-any-return]


class Indexed(Classifier):
    """Takes the last of each sample's vectors by indices."""

    def features(self, x: Tensor) -> Tensor:
        return self.layers[0](x)[torch.arange(x.shape[0]), torch.full((x.shape[0],), TOKENS - 1)]


class MovesAlways(Classifier):
    """Reads a mean that it moves, in both modes."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x - self.mean)
        self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean((0, 1)))
        return features


class WithoutGradient(Classifier):
    """Looks in evaluation at what has no numbers for NumPy while it has a gradient."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if not self.training:
            self.seen = features.numpy()
        return features


class NotANumber(Classifier):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("unknown", torch.full((2,), float("nan")))


class OwnEval(Classifier):
    """Has a mode of its own, which only eval() sets."""

    exact = False

    def eval(self) -> OwnEval:
        super().eval()
        self.exact = True
        return self

    def train(self, mode: bool = True) -> OwnEval:
        self.exact = False
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features.clamp(-1e4, 1e4) if self.exact else features


class OwnAverages(Classifier):
    """Updates bounds of its inputs in training, and reads none of them."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("least", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.least.copy_(torch.minimum(self.least * 0.9, x.detach().amin((0, 1)).clamp(max=0.0)))
        return super().features(x)


class CountsModes(Classifier):
    """train() moves what forward reads."""

    times: Tensor

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("times", torch.zeros(()))

    def train(self, mode: bool = True) -> CountsModes:
        if mode and "times" in self._buffers:
            self.times += 1
        return super().train(mode)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + self.times)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (CountsModes(), False),
        (BoundInEvaluation(layers=1), False),
        (BoundInTraining(layers=1), False),
        (NoisyLabels(layers=1), False),
        (NoisyLabelsOfAlways(layers=1), False),
        (RareLabels(in_place=False), False),
        (RareLabels(in_place=True), False),
        (HardSamples(layers=1), False),
        (Swapped(), False),
        (BoundBehindFunction(layers=1), False),
        (OwnAverages(), True),
        (Indexed(layers=1), True),
        (MovesAlways(), False),
        (WithoutGradient(layers=1), True),
        (NotANumber(), True),
        (OwnEval(layers=1), False),
        (StraightThrough(layers=1), True),
        (Masked(), True),
        (OtherWeight(layers=1), False),
        (EveryDraw(layers=1), True),
        (MaskedInEvaluation(layers=1), False),
        (Cauchy(layers=1), True),
        (Always(layers=1), True),
        (OnlyWithGradients(layers=1), False),
        (OwnGradient(layers=1), True),
        (OnlyInTraining(layers=1), False),
        (OtherFormula(layers=1), False),
        (GateFromZero(), False),
        (Averaged(), False),
        (NoisyPenalty(layers=1), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_derived_is_known(model: nn.Module, expected: bool) -> None:
    assert agrees(compile_model(model, vectors)) == expected
