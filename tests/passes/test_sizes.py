"""Operators whose sizes torch works out by itself: the batch size stays symbolic, units compute what autograd does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.passes.check_evaluation import evaluation_agrees
from tests.passes.compiled import assert_bits, assert_same, compile_model, eager, run_native, run_units

Operator = Callable[[Tensor], Tensor]
SIZES = {1: (12,), 2: (8, 6), 3: (4, 6, 4)}
CHANNELS, CLASSES = 4, 3
WINDOW = torch.hann_window(8)


def spectrum(x: Tensor) -> Tensor:
    return torch.stft(x.flatten(1), 8, 4, window=WINDOW, return_complex=True)


def unpooled(x: Tensor) -> Tensor:
    pooled, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, places, (2, 2))


def warped(x: Tensor) -> Tensor:
    turn = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.8, 0.1]]).expand(x.shape[0], 2, 3)
    return F.grid_sample(x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False)


def pyramid(x: Tensor) -> Tensor:
    """What a U-Net and a feature pyramid do."""
    small = F.avg_pool2d(x, 2)
    return torch.cat([x + F.interpolate(small, size=x.shape[-2:]), nn.Upsample(scale_factor=2)(small)], dim=1)


OPERATORS: dict[str, tuple[int, Mapping[str, Operator]]] = {
    "1d": (1, {
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "linear": lambda x: F.interpolate(x, size=7, mode="linear"),
        "area": lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
        "stft": lambda x: spectrum(x).abs(),
        "istft": lambda x: torch.istft(spectrum(x) * 0.5, 8, 4, window=WINDOW),
        "take_along_dim": lambda x: torch.take_along_dim(x, x.argmax(2, keepdim=True), 2),
    }),
    "2d": (2, {
        "nearest-exact": lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
        "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        "bicubic": lambda x: F.interpolate(x, size=(5, 9), mode="bicubic"),
        "antialias": lambda x: F.interpolate(x, scale_factor=0.6, mode="bilinear", antialias=True),
        "antialias bicubic": lambda x: F.interpolate(x, size=(5, 5), mode="bicubic", antialias=True),
        "recomputed scale": lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
    }),
    "2d, others": (2, {"pyramid": pyramid, "warped": warped, "unpooled": unpooled}),
    "3d": (3, {
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "trilinear": lambda x: F.interpolate(x, scale_factor=0.5, mode="trilinear"),
    }),
}  # fmt: skip


class Resizing(nn.Module):
    """A convolution, operators side by side, and a head on moments of what they give."""

    def __init__(self, rank: int, operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.enter = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank](3, CHANNELS, 3, padding=1)
        self.head = nn.Linear(3 * len(operators), CLASSES)
        self.operators = operators

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.enter(x))
        made = [operator(h).flatten(1) for operator in self.operators.values()]
        moments = [moment for each in made for moment in (each.mean(1), each.square().mean(1), each[:, ::3].sum(1))]
        return F.cross_entropy(self.head(torch.stack(moments, 1)), y, reduction="sum"), torch.ones_like(y).sum()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_batch_size_stays_symbolic(name: str) -> None:
    rank, operators = OPERATORS[name]

    def make(samples: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 3, *SIZES[rank], generator=generator)
        return {"x": x, "y": torch.randint(0, CLASSES, (samples,), generator=generator)}

    torch.manual_seed(0)
    model = Resizing(rank, operators)
    result = compile_model(model, make)
    assert result.program.dynamic_batch and not result.program.batch_coupled
    for samples in (1, 3):
        batch = make(samples, 5)
        ours = run_units(result, batch)
        assert_bits(run_native(result, batch), ours)
        assert_same(ours, eager(model, batch))
    assert evaluation_agrees(result.program, model, result.state, result.batch)


class Paired(nn.Module):
    """Two samples in a row make one row: a single sample has none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows, labels = x.view(-1, 8), y.view(-1, 2)[:, 0]
        return F.cross_entropy(self.head(rows), labels, reduction="sum"), torch.ones_like(labels).sum()


def test_samples_that_share_a_row_are_computed_with() -> None:
    def make(samples: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 4, generator=generator)
        return {"x": x, "y": torch.randint(0, CLASSES, (samples,), generator=generator)}

    model = Paired()
    result = compile_model(model, make, granule=2)
    batch = make(2 if result.program.batch_coupled else 6, 5)
    ours = run_units(result, batch)
    assert_bits(run_native(result, batch), ours)
    assert_same(ours, eager(model, batch))
