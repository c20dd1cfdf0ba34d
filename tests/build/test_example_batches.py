"""A model is tried on samples that differ in what masks, paddings and labels are told from."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from elaswave_fx.build import example_batches as example_batches_module
from elaswave_fx.build.example_batches import example_batches
from elaswave_fx.config.compose import load_config
from elaswave_fx.data import load_batch, open_source

RARE = 13
"""The one sample that is different."""
LARGE = 1 << 20
"""Numbers of a sample of which few are examined."""


class Rare:
    """Samples of which one is different in something."""

    def __init__(self, of: str, samples: int = 16, numbers: int = 4) -> None:
        self.of, self.samples, self.numbers = of, samples, numbers

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rare = index == RARE
        x = torch.randn(self.numbers, generator=torch.Generator().manual_seed(index))
        y = torch.full((4,), 3)
        if rare and self.of == "ignored labels":
            y[2:] = -100
        if rare and self.of == "padding":
            y[1] = 2
        if rare and self.of == "class":
            y[:] = 1
        weight = torch.tensor(0.0 if rare and self.of == "weight" else 1.0)
        if rare and self.of == "missing number":
            x[2] = torch.nan
        mask = torch.tensor([True, True, True, not (rare and self.of == "mask")])
        return {"x": x, "y": y, "weight": weight, "mask": mask, "index": torch.tensor(float(index + 1))}


@pytest.mark.parametrize("of", ["ignored labels", "padding", "class", "weight", "mask", "missing number"])
@pytest.mark.parametrize("granule", [1, 2])
def test_the_different_one_is_among_the_first(of: str, granule: int) -> None:
    config = load_config([
        "data._target_=tests.build.test_example_batches.Rare", f"+data.of={of}", "global_batch=4",
        f"parallel.granule={granule}", "model._target_=torch.nn.Identity", "seed=3",
    ])  # fmt: skip
    first, second = example_batches(config, open_source(config))
    assert [len(batch["x"]) for batch in (first, second)] == [2 * granule, 3 * granule]
    indices = torch.cat([first["index"], second["index"]])
    assert len(indices.unique()) == 5 * granule
    assert RARE + 1 in first["index"]


@pytest.mark.parametrize("of", ["class", "weight", "mask"])
def test_one_of_two_hundred_is_found(of: str) -> None:
    config = load_config([
        "data._target_=tests.build.test_example_batches.Rare", f"+data.of={of}", "+data.samples=200", "global_batch=4",
        "model._target_=torch.nn.Identity",
    ])  # fmt: skip
    first, _ = example_batches(config, open_source(config))
    assert RARE + 1 in first["index"]


def test_of_large_samples_few_are_read() -> None:
    config = load_config([
        "data._target_=tests.build.test_example_batches.Rare", "+data.of=class", "+data.samples=200",
        f"+data.numbers={LARGE}", "global_batch=4", "model._target_=torch.nn.Identity",
    ])  # fmt: skip
    source = open_source(config)
    with mock.patch.object(example_batches_module, "load_batch", wraps=load_batch) as read:
        example_batches(config, source)
    assert [call.args[3] for call in read.call_args_list] == [16]
