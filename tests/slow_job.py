"""A job that takes its time until a test has seen what it waits for, so that it lasts longer than whatever that is.

config = slow_config(folder / "hurry", (2, 1), "steps=500");  …;  (folder / "hurry").touch()
"""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor

from elaswave_fx.config.types import Config
from tests.recovery.harness import job_config

SAMPLE_S = 0.02
"""Of a sample, until then."""


class Slowly:
    """A transform that takes its time while a file is not there."""

    def __init__(self, until: str, sample_s: float = SAMPLE_S) -> None:
        self._until, self._sample_s = Path(until), sample_s

    def __call__(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._until.exists():
            time.sleep(self._sample_s)
        return sample


def slow_config(hurry: Path, layout: tuple[int, int], *words: str, recipe: str = "gpt_stdlib") -> Config:
    """Of an exact job on dp x pp ranks that is slow until there is the file `hurry`."""
    slow = f"data.transform._target_={__name__}.Slowly", f"data.transform.until={hurry}"
    return job_config(layout, *slow, *words, recipe=recipe)
