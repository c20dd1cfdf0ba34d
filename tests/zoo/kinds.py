"""Kinds of modules that people bring, and what becomes of each: it trains as a plain PyTorch loop does, or is refused.

    KINDS["layer norm"]  ->  Kind(place="features", make=…, granule=1, refused=())
    net("layer norm")    ->  the module, between an entering and a leaving layer, with a loss that is a sum

`docs/reference/models.md` is the table of this list; test_kinds.py tries every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.zoo import bodies
from tests.zoo.bodies import WIDTH, Do

SAMPLES = 8
CLASSES = 4
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """One row of the table. `place`: the data that it computes with. `granule`: samples that are never separated,
    where it needs them together. `draws`: random numbers, which are keyed, so that a plain loop has others.
    `refused`: words of the refusal. `counts`: the count is of samples, not one."""

    place: str
    make: Callable[[], nn.Module]
    granule: int = 1
    draws: bool = False
    loss: Loss | None = None
    refused: tuple[str, ...] = ()
    counts: bool = True


def _drawn(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


class Samples:
    """Eight samples for modules of one place."""

    def __init__(self, module: str) -> None:
        self.shape = {"features": (8,), "sequence": (16, 8), "image": (3, 16, 16), "tokens": (12,)}[KINDS[module].place]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.shape == (12,):
            return {"x": torch.randint(0, 32, self.shape, generator=_drawn(index)), "y": torch.tensor(index % CLASSES)}
        x = torch.randn(self.shape, generator=_drawn(index))
        return {"x": x, "y": torch.tensor(int(x.flatten()[0] > 0) + 2 * int(x.flatten()[1] > 0))}


class Net(nn.Module):
    """A kind's module between an entering and a leaving layer."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.place = KINDS[module].place
        if self.place == "image":
            self.enter: nn.Module = nn.Conv2d(3, 8, 3, padding=1)
        elif self.place == "tokens":
            self.enter = nn.Identity()
        else:
            self.enter = nn.Linear(8, WIDTH)
        self.body = KINDS[module].make()
        self.leave = nn.Linear(8 if self.place == "image" else WIDTH, CLASSES)
        self.counts = KINDS[module].counts
        self.loss = KINDS[module].loss or (lambda scores, y: F.cross_entropy(scores, y, reduction="sum"))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(self.enter(x) if self.place == "tokens" else self.enter(x).tanh())
        if self.place == "image":
            h = h.mean((2, 3))
        elif h.dim() > 2:
            h = h.mean(1)
        return self.loss(self.leave(h), y), torch.ones_like(y).sum() if self.counts else torch.ones(())


def net(module: str) -> nn.Module:
    """The model of a kind, for `model._target_`."""
    return Net(module)


_features, _sequence = partial(Kind, "features"), partial(Kind, "sequence")
_image, _tokens = partial(Kind, "image"), partial(Kind, "tokens")


def _loss(loss: Loss, refused: tuple[str, ...] = (), granule: int = 1, counts: bool = True) -> Kind:
    return Kind("features", nn.Tanh, granule, loss=loss, refused=refused, counts=counts)


class Twice(nn.Module):
    """A module of two arguments, given one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, x)


class SelfAttention(nn.Module):
    """torch's attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]


class OverTime(nn.Module):
    """A module that wants channels before time."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.mT).mT


def _spectrum(x: Tensor) -> Tensor:
    """Magnitudes over windows of 8 of the samples in a row, 16 of them."""
    found = torch.stft(x.flatten(1), 30, 16, window=torch.hann_window(30), return_complex=True)
    return found.abs().mT


def _linear(wrap: Callable[[nn.Linear], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: wrap(nn.Linear(WIDTH, WIDTH))


def _targets(y: Tensor) -> Tensor:
    """Of a regression, around a thousand."""
    return 1000.0 + y[:, None].float() + torch.arange(CLASSES)


def _ctc(scores: Tensor, y: Tensor) -> Tensor:
    steps = torch.stack([scores.roll(shift, -1) for shift in range(CLASSES)]).log_softmax(-1)
    lengths = torch.full_like(y, CLASSES)
    return F.ctc_loss(steps, (y % 3 + 1)[:, None], lengths, torch.ones_like(y), reduction="sum")


def _masked_mean(scores: Tensor, y: Tensor) -> Tensor:
    counts = (y > 0).float()
    return (F.cross_entropy(scores, y, reduction="none") * counts).sum() / counts.sum().clamp(min=1) * y.numel()


def _weighed(scores: Tensor, y: Tensor) -> Tensor:
    weights = 1.0 + y.float()
    return (F.cross_entropy(scores, y, reduction="none") * (weights / weights.mean())).sum()


def _per_positive(scores: Tensor, y: Tensor) -> Tensor:
    positive = (y == 1).float()
    return ((1 - scores.softmax(-1)[:, 1]) ** 2 * positive).sum() / positive.sum().clamp(min=1) * y.numel()


def _partial_likelihood(scores: Tensor, y: Tensor) -> Tensor:
    """Cox's, of times that are the scores' order; that of one sample is 0."""
    risks = scores[:, 0][scores[:, 1].detach().argsort()]
    return (risks.logcumsumexp(0) - risks).sum()


def _balance(scores: Tensor, y: Tensor) -> Tensor:
    shares = F.one_hot(scores.argmax(-1), CLASSES).float().mean(0)
    return F.cross_entropy(scores, y, reduction="sum") + (shares * scores.softmax(-1).mean(0)).sum() * y.numel()


KINDS: dict[str, Kind] = {
    # Layers over features
    "gelu, silu, mish": _features(lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.Mish())),
    "prelu": _features(lambda: nn.PReLU(WIDTH)),
    "glu": _features(lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())),
    "softmax, log softmax": _features(lambda: nn.Sequential(nn.Softmax(-1), nn.LogSoftmax(-1))),
    "maxout": _features(bodies.Maxout),
    "highway": _features(bodies.Highway),
    "bilinear": _features(lambda: Twice(nn.Bilinear(WIDTH, WIDTH, WIDTH))),
    "layer norm": _features(lambda: nn.LayerNorm(WIDTH)),
    "RMS norm": _features(lambda: nn.RMSNorm(WIDTH)),
    "unit length": _features(lambda: Do(lambda x: F.normalize(x, dim=-1))),
    "weight norm": _features(_linear(parametrizations.weight_norm)),
    "orthogonal weights": _features(_linear(parametrizations.orthogonal)),
    "low rank, frozen base (LoRA)": _features(bodies.LowRank),
    "hypernetwork": _features(bodies.Hyper),
    "differential equation": _features(bodies.Ode),
    "radial basis functions": _features(bodies.Kernels),
    "codebook, straight through": _features(bodies.Codebook),
    "fake quantization": _features(bodies.Quantized),
    "experts, top 1": _features(bodies.Experts),
    "experts, top 2": _features(lambda: bodies.Experts(2)),
    "linear solve, determinant": _features(bodies.Solved),
    "linear solve, checked": _features(lambda: bodies.Solved(True), refused=("_linalg_check_errors", "solve_ex")),
    "Fourier transform": _features(bodies.Complex),
    "Fourier operator": _features(bodies.Modes),
    "complex numbers": _features(bodies.Turned),
    "Kronecker product": _features(bodies.Kronecker),
    "capsules": _features(bodies.Capsules),
    "slices written": _features(bodies.Filled),
    "adaptive softmax": _features(bodies.AdaptiveSoftmax),
    "sorted features": _features(lambda: Do(lambda x: x.sort(-1).values)),
    "cumulative sums": _features(lambda: Do(lambda x: x.cumsum(-1) / WIDTH)),
    "names of Python, fx and other alphabets": _features(bodies.Keyed),
    "derivative: autograd.grad": _features(lambda: bodies.Forces(bodies.by_engine)),
    "derivative: autograd.grad without a graph": _features(lambda: bodies.Forces(bodies.as_constants)),
    "derivative: random mask": _features(lambda: bodies.Forces(bodies.masked), draws=True),
    "derivative: torch.func.grad": _features(lambda: bodies.Forces(lambda f, x: torch.func.grad(f)(x))),
    "derivative: torch.func.jvp": _features(lambda: bodies.Forces(bodies.along)),
    "derivative: Laplacian": _features(lambda: bodies.Forces(bodies.laplacian)),
    "derivative: vmap of grad": _features(lambda: bodies.Forces(bodies.of_samples)),
    "derivative: torch.func.hessian": _features(lambda: bodies.Forces(bodies.hessian), refused=("jacrev for jacfwd",)),
    "derivative: no_grad beside it": _features(lambda: bodies.Forces(bodies.with_no_grad)),
    "derivative: dropout": _features(lambda: bodies.Forces(bodies.by_engine, 0.3), refused=("torch.rand",)),
    "derivative: backward()": _features(lambda: bodies.Forces(bodies.backwards), refused=("torch.autograd.grad",)),
    "checkpoint": _features(lambda: bodies.Checkpointed(False)),
    "checkpoint, reentrant": _features(lambda: bodies.Checkpointed(True)),
    "autograd.Function": _features(lambda: Do(bodies.Swish.apply)),  # type: ignore[arg-type]
    "tied parameter": _features(bodies.Tied),
    # Over sequences
    "1-d convolution": _sequence(lambda: OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "RNN": _sequence(lambda: bodies.First(nn.RNN(WIDTH, WIDTH, batch_first=True))),
    "LSTM, both ways": _sequence(
        lambda: bodies.First(nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True))
    ),
    "LSTM, dropout between layers": _sequence(
        lambda: bodies.First(nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)), draws=True
    ),
    "GRU": _sequence(lambda: bodies.First(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "GRU cell": _sequence(bodies.Cells),
    "packed sequences": _sequence(bodies.Packed, refused=("packed sequences", "padded")),
    "state space": _sequence(bodies.StateSpace),
    "multi-head attention": _sequence(SelfAttention),
    "causal attention": _sequence(lambda: bodies.Attention("causal")),
    "rotary attention": _sequence(lambda: bodies.Attention("rotary")),
    "relative attention": _sequence(lambda: bodies.Attention("relative")),
    "linear attention": _sequence(lambda: bodies.Attention("linear")),
    "TransformerEncoder with a mask": _sequence(bodies.Encoder),
    "TransformerDecoder": _sequence(bodies.Decoder),
    "set": _sequence(bodies.Pooled),
    "graph": _sequence(bodies.Graph),
    "short-time Fourier transform": _sequence(lambda: Do(_spectrum)),
    # Over tokens
    "embedding": _tokens(lambda: nn.Embedding(32, WIDTH, padding_idx=0)),
    "embedding, sparse gradient": _tokens(lambda: nn.Embedding(32, WIDTH, sparse=True)),
    "embedding bag": _tokens(lambda: nn.EmbeddingBag(32, WIDTH, mode="mean")),
    "embedding, gradient by frequency": _tokens(
        lambda: nn.Embedding(32, WIDTH, scale_grad_by_freq=True), granule=SAMPLES
    ),
    "one-hot": _tokens(lambda: nn.Sequential(Do(lambda x: F.one_hot(x, 32).float()), nn.Linear(32, WIDTH))),
    # Over images
    "grouped, dilated convolution": _image(lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)),
    "transposed convolution": _image(lambda: nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1)),
    "3-d convolution, trilinear": _image(bodies.Deep),
    "pixel shuffle": _image(lambda: nn.Sequential(nn.Conv2d(8, 32, 1), nn.PixelShuffle(2))),
    "unfold, fold": _image(bodies.Patches),
    "average, largest, adaptive pooling": _image(
        lambda: nn.Sequential(nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2))
    ),
    "unpooling": _image(bodies.Unpooled),
    "group norm, instance norm": _image(lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True))),
    "local response norm": _image(lambda: nn.LocalResponseNorm(3)),
    "padding: reflect, replicate, circular": _image(
        lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1))
    ),
    "U-Net": _image(bodies.UNet),
    **{
        f"interpolation, {mode}": _image(lambda mode=mode: bodies.Resized(mode))
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "spatial transformer": _image(bodies.Warped),
    # Losses
    "weighted, smoothed cross entropy": _loss(
        lambda s, y: F.cross_entropy(s, y, torch.arange(1.0, 5.0), reduction="sum", label_smoothing=0.1)
    ),
    "binary cross entropy": _loss(
        lambda s, y: F.binary_cross_entropy_with_logits(s, F.one_hot(y, CLASSES).float(), reduction="sum")
    ),
    "squared error, large targets": _loss(lambda s, y: F.mse_loss(s, _targets(y), reduction="sum") / 1e4),
    "Huber, Poisson, Gaussian": _loss(
        lambda s, y: (
            F.huber_loss(s[:, 0], y.float(), reduction="sum")
            + F.poisson_nll_loss(s[:, 1], y.float(), reduction="sum")
            + F.gaussian_nll_loss(s[:, 2], y.float(), s[:, 3].exp(), reduction="sum")
        )
    ),
    "Kullback-Leibler": _loss(
        lambda s, y: F.kl_div(s.log_softmax(-1), F.one_hot(y, CLASSES).float() * 0.6 + 0.1, reduction="sum")
    ),
    "triplet margin": _loss(
        lambda s, y: F.triplet_margin_loss(s, s.roll(1, -1), s.flip(-1) + y[:, None], reduction="sum")
    ),
    "CTC": _loss(_ctc, refused=("ctc_loss", "looks at values")),
    # Random numbers
    "dropout": _features(lambda: nn.Dropout(0.2), draws=True),
    "dropout of channels": _image(lambda: nn.Dropout2d(0.2), draws=True),
    "alpha dropout": _features(lambda: bodies.Noise("alpha"), draws=True),
    "feature alpha dropout": _features(lambda: bodies.Noise("feature alpha"), draws=True),
    "stochastic depth": _features(lambda: bodies.Noise("path"), draws=True),
    "Gaussian noise": _features(lambda: bodies.Noise("normal"), draws=True),
    "Gumbel softmax": _features(lambda: bodies.Noise("gumbel"), draws=True),
    "multinomial": _features(lambda: bodies.Noise("multinomial"), draws=True),
    "Poisson": _features(lambda: bodies.Noise("poisson"), refused=("poisson", "cannot be keyed")),
    # Samples together
    "batch norm": _image(lambda: nn.BatchNorm2d(8), granule=SAMPLES),
    "batch norm, called twice": _image(lambda: bodies.Twin(nn.BatchNorm2d(8)), granule=SAMPLES),
    "instance norm, running statistics": _image(
        lambda: nn.InstanceNorm2d(8, track_running_stats=True), granule=SAMPLES
    ),
    "weights over their mean in a batch": _loss(_weighed, granule=SAMPLES),
    "mean over masked labels": _loss(_masked_mean, granule=SAMPLES),
    "mean over positives": _loss(_per_positive, granule=SAMPLES),
    "partial likelihood": _loss(_partial_likelihood, granule=SAMPLES),
    "balance of experts": _loss(_balance, granule=SAMPLES),
    "mean, with the count one": _loss(F.cross_entropy, granule=SAMPLES, counts=False),
    "contrast within a batch": _features(bodies.Contrast, granule=SAMPLES),
    "moving average of a batch": _features(bodies.Averages, granule=SAMPLES),
    # State of a step
    "state for so many samples": _sequence(lambda: bodies.StateOfSamples(SAMPLES), granule=SAMPLES),
    "spectral norm": _features(_linear(parametrizations.spectral_norm)),
    "counter in a buffer": _features(bodies.Gate),
    # Questions to the compiler
    "bound unless compiled": _features(bodies.Compiled),
    # Refused
    "backward that is no derivative": _features(
        lambda: Do(bodies.BatchScaled.apply),
        refused=("BatchScaled", "derivative"),  # type: ignore[arg-type]
    ),
    "counter in Python": _features(bodies.Counted, refused=("calls",)),
    "schedule in a list": _features(bodies.Warmed, refused=("schedule",)),
    "branch by random numbers of Python": _features(bodies.Seldom, refused=("random",)),
    "mask by NumPy": _features(bodies.NumpyMask, refused=("numpy",)),
    "generator of its own": _features(bodies.OwnGenerator, refused=("torch.Generator", "key of step")),
    "branch on data": _features(bodies.Branching, refused=("x.sum() > 0", "only the data tells")),
    "branch on data, in try": _features(bodies.Tried, refused=("another way", "except RuntimeError")),
    "tensor to number": _features(bodies.Numbered, refused=("item",)),
    "hook on a tensor": _features(bodies.Hooked, refused=("hook",)),
    "hook on a gradient": _features(bodies.HookedParameter, refused=("hook",)),
    "parameter changed in forward": _features(bodies.Clamped, refused=("scale",)),
    "complex parameter": _features(lambda: bodies.Complex(pairs=False), refused=("filter is complex",)),
    "sparse buffer": _features(bodies.Neighbours, refused=("sparse_coo",)),
    "two parameters, one storage": _features(bodies.Shared, refused=("one.weight", "two.weight")),
}
