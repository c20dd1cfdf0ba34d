"""A model is tried on samples that differ in what masks, paddings and labels are told from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elaswave_fx.build.example_batches import example_batches
from elaswave_fx.config.compose import load_config
from elaswave_fx.data import open_source

RARE = 13
"""The one sample that is different."""


class Rare:
    """Sixteen samples of which one is different in something."""

    def __init__(self, of: str) -> None:
        self.of = of

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rare = index == RARE
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
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
