"""Types that samples have before they are widened: what computes something else with them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elaswave_fx.build.builder import build
from elaswave_fx.config.compose import load_config
from elaswave_fx.data import open_source
from elaswave_fx.errors import CaptureError

KINDS = {"int16": torch.int16, "int32": torch.int32, "float16": torch.float16, "int8": torch.int8,
         "uint16": torch.uint16, "int64": torch.int64, "bfloat16": torch.bfloat16,
         "float32": torch.float32, "float64": torch.float64}  # fmt: skip


class Sound(Dataset[dict[str, Tensor]]):
    def __init__(self, stored: str) -> None:
        self.kind = KINDS[stored]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = (torch.tensor([-90.0, -30.0, 30.0, 90.0], dtype=torch.float64) + index).abs()
        if self.kind.is_floating_point:
            x[index % 4] = 999.9  # no value
        return {"x": x.to(self.kind)}


def by_limit(x: Tensor) -> Tensor:
    return x.float() / torch.iinfo(x.dtype).max


def by_type(x: Tensor) -> Tensor:
    return x.float() / 32768 if x.dtype == torch.int16 else x.float()


def hashed(x: Tensor) -> Tensor:
    return (((x * 1103515245 + 1) >> 28) % 32).float()


def squared(x: Tensor) -> Tensor:
    return (x * x).float()


def scaled(x: Tensor) -> Tensor:
    return x.float() / 32768


def rounded(x: Tensor) -> Tensor:
    """In halves with others; what is kept in halves is used in fp32 as a rule."""
    return ((x - 3) / 7 + torch.rand_like(x)).float()


def looked_up(x: Tensor) -> Tensor:
    return nn.functional.one_hot((x + 200).clamp(0, 1)[:, 0], 4).float()


def without_a_value(x: Tensor) -> Tensor:
    return torch.where(x == 999.9, 0, x.float())


def bounded(x: Tensor) -> Tensor:
    """By order, at a number that halves round."""
    return torch.where(x <= 999.6, x.float(), 0)


def by_width(x: Tensor) -> Tensor:
    return x.float() / x.element_size()


def in_halves(x: Tensor) -> Tensor:
    """Compares what rounding may move, in fp32."""
    h = (x / 7 - 3).float()
    return h * (h > 0.01)


def below(x: Tensor) -> Tensor:
    return torch.where(x < 500, x.float(), 0)


WAYS = {each.__name__: each for each in (
    by_limit, by_type, hashed, squared, scaled, rounded, looked_up, without_a_value, bounded, below, by_width,
    in_halves,
)}  # fmt: skip


class Net(nn.Linear):
    def __init__(self, way: str) -> None:
        super().__init__(4, 2)
        self.way = way

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        losses = super().forward(WAYS[self.way](x)).square().sum(1)
        return losses.sum(), torch.ones_like(losses).sum()


def words(way: str, kind: str) -> list[str]:
    return [f"model._target_={__name__}.Net", f"model.way={way}", f"data._target_={__name__}.Sound",
            f"data.stored={kind}", "global_batch=4"]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("by_limit", "int16"),
        ("by_limit", "int8"),
        ("by_type", "int16"),
        ("hashed", "int32"),
        ("squared", "int8"),
        ("by_limit", "uint16"),
    ],
)
def test_what_looks_at_the_type_of_samples_is_refused(way: str, kind: str, tmp_path: Path) -> None:
    why = f"Net computes something else with the types of the dataset: forward gets x as int64, not {kind}; a way out"
    with pytest.raises(CaptureError, match=why):
        build(load_config(words(way, kind)), tmp_path)


@pytest.mark.parametrize(
    ("way", "kind"),
    [("without_a_value", "float16"), ("without_a_value", "bfloat16"), ("bounded", "bfloat16"),
     ("by_width", "float16"), ("by_width", "bfloat16"), ("by_width", "float64")],
)  # fmt: skip
def test_what_compares_or_looks_at_other_numbers_is_refused(way: str, kind: str, tmp_path: Path) -> None:
    why = f"types of the dataset: forward gets x as float32, not {kind}, and looks at the type, or compares with num"
    with pytest.raises(CaptureError, match=why):
        build(load_config(words(way, kind)), tmp_path)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("scaled", "int16"),
        ("rounded", "float16"),
        ("by_limit", "int64"),
        ("looked_up", "int32"),
        ("scaled", "uint16"),
        ("without_a_value", "float32"),
        ("below", "float16"),
        ("squared", "float64"),
        ("without_a_value", "float64"),
        ("in_halves", "float16"),
        ("in_halves", "bfloat16"),
    ],
)
def test_what_computes_the_same_is_built(way: str, kind: str, tmp_path: Path) -> None:
    assert build(load_config(words(way, kind)), tmp_path).artifact.units


def halved(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """As audio libraries scale whole numbers."""
    return {"x": by_limit(sample["x"])}


def test_a_transform_gets_the_types_of_the_dataset() -> None:
    """But those for which torch has few operators."""
    for kind, most in (("int16", 32767), ("int8", 127), ("uint16", torch.iinfo(torch.int64).max)):
        config = load_config([*words("scaled", kind), f"data.transform._target_={__name__}.halved"])
        sample = open_source(config).dataset.sample(3)["x"]
        assert torch.allclose(sample, Sound("int64")[3]["x"].float() / most), kind


CALLS = 0


class Counting(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        global CALLS
        CALLS += 1
        loss, count = super().forward(x)
        return loss * CALLS, count


def test_a_model_that_counts_is_told_so_whatever_its_samples_are() -> None:
    config = load_config([w.replace(".Net", ".Counting") for w in words("scaled", "int32")])
    with pytest.raises(CaptureError) as refused:
        build(config, None)
    assert "types of the dataset" not in str(refused.value)


def test_samples_that_are_evaluated_have_types_too(tmp_path: Path) -> None:
    other = ["eval.every=5", f"eval.data._target_={__name__}.Sound"]
    build(load_config([*words("by_limit", "int64"), *other, "eval.data.stored=int64"]), tmp_path)
    with pytest.raises(CaptureError, match="forward gets x as int64, not int16"):
        build(load_config([*words("by_limit", "int64"), *other, "eval.data.stored=int16"]), tmp_path)
