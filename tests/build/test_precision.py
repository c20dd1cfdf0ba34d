"""precision=bf16 trains as torch.autocast does: products meet bf16; inputs, targets, losses, counts stay as given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.build.compile import compile_model
from elaswave_fx.build.unit_sequence import UnitSequence
from elaswave_fx.config.compose import load_config
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.autocast import without_onednn

SAMPLES, TOKENS, WIDTH, CLASSES = 8, 6, 16, 5
STEPS = 4
CLOSE = 2e-3
Batch = dict[str, Tensor]


def points(samples: int, seed: int) -> Batch:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, WIDTH, generator=make)
    return {"x": x, "y": torch.randint(0, CLASSES, (samples,), generator=make)}


def far_targets(samples: int, seed: int) -> Batch:
    batch = points(samples, seed)
    return {"x": batch["x"], "y": 1000.0 + batch["x"][:, 0]}


def sequences(samples: int, seed: int) -> Batch:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, TOKENS, WIDTH, generator=make)
    return {"x": x, "y": torch.randint(0, CLASSES, (samples,), generator=make)}


def tokens(samples: int, seed: int) -> Batch:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CLASSES, (samples, TOKENS + 1), generator=make)
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def images(samples: int, seed: int, pixels: int = 8) -> Batch:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, pixels, pixels, generator=make)
    return {"x": x, "y": torch.randint(0, CLASSES, (samples,), generator=make)}


large_images = functools.partial(images, pixels=16)


class Classify(nn.Module):
    """A body, a head, a summed cross entropy."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*body), nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.features(x)).reshape(-1, CLASSES)
        return F.cross_entropy(logits, y.flatten(), reduction="sum"), torch.ones_like(y).sum()


class Likelihood(Classify):
    """The loss of a cross entropy in two calls; autocast knows the second one by the operator inside of it alone."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.log_softmax(self.head(self.features(x)), dim=-1)
        each = F.nll_loss(scores, y, reduction="none")
        return F.nll_loss(scores, y, reduction="sum") + 0.1 * each.sum(), torch.ones_like(y).sum()


class Weighted(Classify):
    """Weights that differ tenfold, whose rounding is no coupling of samples."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.features(x))
        return F.cross_entropy(logits, y, torch.arange(1.0, 12.0, 2.5), reduction="sum"), torch.ones_like(y).sum()


class OtherProducts(Classify):
    """Matrix products by names that autocast does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))

    def features(self, x: Tensor) -> Tensor:
        x = torch.linalg.multi_dot([x, self.left, self.right]) + torch.tensordot(x, self.left, 1)
        return torch.inner(x.float(), self.right) + torch.linalg.matmul(x, torch.matrix_power(self.left, 2))


class Mirrored(Classify):
    """What reflection pads is in fp32 from there on."""

    def features(self, x: Tensor) -> Tensor:
        x = F.pad(self.body(x)[:, None], (2, 2), mode="reflect")
        return F.pad(x, (1, 1), mode="replicate").unfold(-1, 7, 1).mean(-1).squeeze(1).cos()


class Regression(nn.Module):
    """Targets near 1000, in which bf16 has steps of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.middle = nn.Parameter(torch.tensor([900.0]))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return ((self.body(x)[:, 0] + self.middle - y) ** 2).sum(), torch.ones_like(y).sum()


class FloatCount(Classify):
    """The count is a sum of fp32 weights, 725 of them: bf16 has 724 and 728."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, _ = super().forward(x, y)
        return loss, (torch.full_like(x[:, 0], 725.0 / SAMPLES) + 0.0 * x[:, 0]).sum()


class Times(Classify):
    """Sines of a time that are made in fp32 inside forward, as in diffusion models."""

    def features(self, x: Tensor) -> Tensor:
        angles = x[:, :1] * torch.exp(-torch.arange(WIDTH // 2).float())
        return self.body(torch.cat((angles.sin(), angles.cos()), 1))


class States(Classify):
    """A state of zeros in fp32 that products are added to, step by step."""

    def features(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], WIDTH)
        for step in range(3):
            state = state + 0.5 * torch.tanh(self.body(x[:, step] + state))
        return state


class Recurrent(Classify):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


class Convolutions(Classify):
    """`norm` of channels after the first convolution; batch normalization makes the granule the batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, WIDTH, 3, stride=2))

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


class BiasBeforeNorm(Classify):
    """Biases without effect, each in front of a norm of its channel: their gradients are rounding alone."""

    def __init__(self) -> None:
        first, second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, WIDTH, 3, 2, 1)
        super().__init__(first, nn.GroupNorm(8, 8), nn.SiLU(), second, nn.InstanceNorm2d(WIDTH), nn.SiLU())

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


class Transformed(Convolutions):
    """Images turned by an angle of their own; the grid is a product, which eager code rounds to bf16."""

    def __init__(self) -> None:
        super().__init__(nn.GroupNorm(2, 8))
        self.angle = nn.Linear(3, 6)

    def features(self, x: Tensor) -> Tensor:
        turned = self.angle(x.mean((2, 3))).unflatten(1, (2, 3))
        return super().features(F.grid_sample(x, F.affine_grid(turned, list(x.shape), False), align_corners=False))


class Experts(Classify):
    """Each sample goes to the two best of four experts, whose weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def features(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.router(x), dim=-1)
        best = scores * (scores >= scores.topk(2, dim=-1)[0][:, -1:])
        made = [torch.tanh(F.linear(x, self.experts[number])) for number in range(4)]
        return sum((best[:, number, None] * made[number] for number in range(4)), torch.zeros(()))


class Attention(Classify):
    """Embeddings, two blocks and an output layer whose weights are those of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.head.weight = self.embedding.weight
        self.place = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )

    def features(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.place
        for block in self.blocks:
            h = block(h)
        return h


class Bags(Classify):
    """Two tables: one of rows, one of means of rows."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.rows, self.means = nn.Embedding(CLASSES, WIDTH), nn.Embedding(CLASSES, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return self.body(self.rows(x) + self.means(x).mean(1, keepdim=True))


@torch.jit.script
def gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(x @ weight) * torch.tanh(x @ weight + bias)


class ScriptedFunction(Classify):
    """TorchScript, which calls other operators the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        return gated(x, self.weight, self.bias)


def norms() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)]


class OnAndOff(Classify):
    """Runs under autocast alone: it leaves it and enters it again."""

    def features(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.body(x.float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.tanh(self.body(h))


class Einsum(Classify):
    """Autocast knows the product inside of it."""

    def features(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ji->bj", torch.tanh(self.body(x)), self.body[0].weight)  # type: ignore[index]


class Cells(Classify):
    """Recurrent layers, step by step by the user's own loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.rnn = (kind(WIDTH, WIDTH) for kind in (nn.GRUCell, nn.LSTMCell, nn.RNNCell))

    def features(self, x: Tensor) -> Tensor:
        h = cell = torch.zeros(x.shape[0], WIDTH)
        for step in range(3):
            h = self.rnn(self.gru(x[:, step], h))
            h, cell = self.lstm(x[:, step], (h, cell))
        return h


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch], int]] = {
    "far targets": (Regression, far_targets, 1),
    "float count": (lambda: FloatCount(nn.Linear(WIDTH, WIDTH), nn.Tanh()), points, 1),
    "norms": (lambda: Classify(*norms()), points, 1),
    "times": (lambda: Times(nn.Linear(WIDTH, WIDTH), nn.SiLU()), points, 1),
    "states": (lambda: States(nn.Linear(WIDTH, WIDTH)), sequences, 1),
    "cells": (Cells, sequences, 1),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences, 1),
    "gru": (lambda: Recurrent(nn.GRU), sequences, 1),
    "batch norm": (lambda: Convolutions(nn.BatchNorm2d(8)), images, SAMPLES),
    "group norm": (lambda: Convolutions(nn.GroupNorm(2, 8)), images, 1),
    "bias before norm": (BiasBeforeNorm, large_images, 1),
    "transformed": (Transformed, images, 1),
    "experts": (Experts, points, 1),
    "attention": (Attention, tokens, 1),
    "tables": (Bags, tokens, 1),
    "on and off": (lambda: OnAndOff(nn.Linear(WIDTH, WIDTH)), points, 1),
    "likelihood": (lambda: Likelihood(nn.Linear(WIDTH, WIDTH)), points, 1),
    "class weights": (lambda: Weighted(nn.Linear(WIDTH, WIDTH)), points, 1),
    "other products": (OtherProducts, points, 1),
    "mirrored": (lambda: Mirrored(nn.Linear(WIDTH, WIDTH)), points, 1),
    "einsum": (lambda: Einsum(nn.Linear(WIDTH, WIDTH)), points, 1),
    "scripted function": (ScriptedFunction, points, 1),
}


class Masters:
    """fp32 parameters, updated by plain gradient descent; `read_as` what units read."""

    def __init__(self, model: nn.Module, artifact: Artifact) -> None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.read = {info.name: self.values[info.name].to(info.torch_dtype) for info in artifact.tensors}

    def update(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        for name, gradient in gradients.items():
            self.values[name] -= rate * gradient.float()
            self.read[name].copy_(self.values[name])


def ours(model: nn.Module, batch: Batch, other: Batch, granule: int, rate: float) -> tuple[list[float], list[float]]:
    config = load_config(["precision=bf16", f"parallel.granule={granule}", f"global_batch={SAMPLES}"])
    artifact, constants = compile_model(config, model, (batch, other))
    assert artifact.evaluation_exact
    masters = Masters(model, artifact)
    units = UnitSequence(artifact, constants, masters.read.__getitem__)
    losses, counts = [], []
    for _ in range(STEPS):
        step = units.step(batch, torch.arange(1, SAMPLES + 1))
        losses.append(float(step.loss) / float(step.count))
        counts.append(float(step.count))
        masters.update(step.gradients, rate / float(step.count))
    return losses, counts


def theirs(model: nn.Module, batch: Batch, rate: float) -> tuple[list[float], list[float]]:
    losses, counts = [], []
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    kernels = without_onednn if recurrent else contextlib.nullcontext
    for _ in range(STEPS):
        with kernels(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss, count = model(**batch)
        gradients = torch.autograd.grad(loss / count, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * gradient
        losses.append(loss.item() / count.item())
        counts.append(count.item())
    return losses, counts


@pytest.mark.parametrize("name", MODULES)
def test_bf16_trains_as_autocast_does(name: str) -> None:
    build, make, granule = MODULES[name]
    torch.manual_seed(0)
    model = build().train()
    torch.manual_seed(0)
    plain = build().train()
    batch, rate = make(SAMPLES, 1), 0.05
    found = ours(model, batch, make(2 * SAMPLES, 2), granule, rate)
    expected = theirs(plain, batch, rate)
    assert found[1] == expected[1]
    assert found[0] == pytest.approx(expected[0], rel=CLOSE)
    assert found[0][-1] < found[0][0]


class Smoothed(Classify):
    """Labels are smoothed a little in training: less than bf16 rounds a single loss."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        smoothing = 0.01 if self.training else 0.0
        scores = self.head(self.body(x).flatten(1))
        return F.cross_entropy(scores, y, reduction="sum", label_smoothing=smoothing), torch.ones_like(y).sum()


def test_modes_are_told_apart_in_bf16() -> None:
    config = load_config(["precision=bf16", f"global_batch={SAMPLES}"])
    torch.manual_seed(0)
    artifact, _ = compile_model(config, Smoothed(nn.Linear(WIDTH, WIDTH)), (points(SAMPLES, 1), points(2 * SAMPLES, 2)))
    assert not artifact.evaluation_exact


def test_a_parameter_is_gathered_in_bf16_where_every_reader_rounds_it() -> None:
    config = load_config(["precision=bf16", f"global_batch={SAMPLES}"])
    for model, rounded in (
        (Attention(), ("linear", "out_proj", "in_proj")),
        (Experts(), ("router", "experts", "head")),
    ):
        make = tokens if isinstance(model, Attention) else points
        artifact, _ = compile_model(config, model, (make(SAMPLES, 1), make(2 * SAMPLES, 2)))
        read_as = {param.name: bucket.dtype for bucket in artifact.buckets for param in bucket.params}
        assert read_as == {info.name: info.dtype for info in artifact.params}
        for name, dtype in read_as.items():
            tied_or_added = name in ("embedding.weight", "place") or "norm" in name
            assert (dtype == "float32") == tied_or_added or not any(word in name for word in rounded), name
