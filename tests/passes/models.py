"""Small models, each of which shows the passes one thing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.models.losses import token_loss_sum

WIDTH = 8
TOKENS = 6
CLASSES = 5


def vectors(samples: int, seed: int) -> dict[str, Tensor]:
    """x float [samples, TOKENS, WIDTH], y int64 [samples]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, TOKENS, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(0, CLASSES, (samples,), generator=generator)}


def tokens(samples: int, seed: int) -> dict[str, Tensor]:
    """input_ids and labels int64 [samples, TOKENS], ids below 16."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 16, (samples, TOKENS + 1), generator=generator)
    return {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """Residual layers, then the mean over tokens; subclasses change one part."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss_sum(self.head(self.features(x)), y)


class OtherNames(nn.Module):
    """What Classifier computes, under other names and with one layer inside another."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Module()
        inner.zeta, inner.alpha = Layer(), Layer()
        self.stuff = inner
        self.aaa = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.stuff
        x = inner.alpha(inner.zeta(x))
        return token_loss_sum(self.aaa(x.mean(dim=1)), y)


class Tied(nn.Module):
    """One tensor as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layer = Layer()
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss_sum(self.head(self.layer(self.embed(input_ids))), labels)


class Frozen(Classifier):
    """The first layer is not trained, and neither is a bias in the middle of what is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].up.bias.requires_grad_(False)


class Normed(Classifier):
    """BatchNorm over samples."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.norm = nn.BatchNorm1d(WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


class NormedTwice(Normed):
    """The same BatchNorm for two views of a sample, as Siamese networks have it."""

    def features(self, x: Tensor) -> Tensor:
        return self.norm(Classifier.features(self, x)) - self.norm(Classifier.features(self, 2 * x + 1))


class InBatch(Classifier):
    """Every sample is told from the others of its batch."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        features = self.head(self.features(x))
        return token_loss_sum(features @ features.t(), torch.arange(x.shape[0]) + 0 * y)


class SoftmaxOverBatch(Classifier):
    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        return features * features.softmax(dim=0)


@torch.library.custom_op("elaswave_tests::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """An operator that nobody has a rule for: it subtracts the mean over dimension 0."""
    return x - x.mean(dim=0)


center.register_fake(torch.empty_like)
center.register_autograd(lambda ctx, gradient: gradient - gradient.mean(dim=0))


class Centered(Classifier):
    def features(self, x: Tensor) -> Tensor:
        return center(super().features(x))


class GatedCentered(Centered):
    """The coupling reaches the loss through a gate that starts at zero."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        plain = Classifier.features(self, x)
        return plain + center(self.gate * plain)


class Balanced(Classifier):
    """The loss has a small part that is no sum over samples."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.features(x))
        loss, count = token_loss_sum(logits, y)
        return loss + 1e-3 * logits.softmax(dim=-1).mean(dim=0).square().sum(), count


class MeanLoss(Classifier):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(self.head(self.features(x)), y)
        return loss, torch.ones_like(y).sum() if self.counts else torch.ones((), dtype=torch.int64)


class SequenceFirst(nn.Module):
    """[tokens, samples, width] inside, with attention and a loss over the flattened [tokens * samples]."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        made = (nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout) for _ in range(layers))
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return token_loss_sum(self.head(x).reshape(-1, 16), labels.t().reshape(-1))


class Fused(nn.Module):
    """[samples * tokens, width] between its layers."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        for layer in self.layers:
            flat = layer(flat)
        return token_loss_sum(self.head(flat.view(-1, TOKENS, WIDTH).mean(dim=1)), y)


class FixedBatch(Classifier):
    """Knows one batch size only."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert x.shape[0] == 4, "this model wants four samples"
        return super().forward(x, y)


class ExponentialMean(Classifier):
    """A buffer that is updated from its old value and the batch; `read` lets the loss look at it."""

    def __init__(self, layers: int = 2, read: bool = False) -> None:
        super().__init__(layers)
        self.read = read
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        batch = features.detach().mean(dim=0)
        self.mean.mul_(0.9).add_(batch, alpha=0.1)
        self.last.copy_(batch)
        return features + self.mean if self.read else features


class Recurrent(Classifier):
    """Layers that walk along the tokens, with dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(layers=1)
        self.walk = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=dropout)
        self.gated = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        walked, _ = self.walk(x)
        return super().features(x + self.gated(walked)[0])


class EncoderDecoder(nn.Module):
    """The encoder's output is read by every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.cross = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.encoder:
            x = layer(x)
        for attention, layer in zip(self.cross, self.decoder, strict=True):
            target = layer(target + attention(target, x, x, need_weights=False)[0])
        return token_loss_sum(self.head(target.mean(dim=1)), y)


def pairs(samples: int, seed: int) -> dict[str, Tensor]:
    """`vectors` and a second sequence."""
    return {**vectors(samples, seed), "target": vectors(samples, seed + 100)["x"]}
