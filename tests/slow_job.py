"""A job that takes its time until a test has seen what it waits for, so that it lasts longer than whatever that is.

config = slow_config(folder / "hurry", (2, 1), "steps=500");  …;  (folder / "hurry").touch()
"""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor

from elaswave_fx.config.keys import Config
from tests.recovery.harness import job_config

SAMPLE_S, LATE_S = 0.02, 0.2
"""Of a sample, until then; and once the job has taken three quarters of its steps, so that it does not end before."""


class Slowly:
    """A transform that takes its time while a file is not there. `steps`: of the job, whose run directory is beside the
    file or has it; 0: it may end."""

    def __init__(self, until: str, sample_s: float = SAMPLE_S, steps: int = 0) -> None:
        self._until, self._sample_s, self._steps = Path(until), sample_s, steps

    def __call__(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._until.exists():
            time.sleep(LATE_S if self._is_late() else self._sample_s)
        return sample

    def _is_late(self) -> bool:
        folder = self._until.parent
        files = (folder / "metrics.jsonl", folder / "run" / "metrics.jsonl") if self._steps else ()
        taken = sum(path.read_bytes().count(b"\n") for path in files if path.exists())
        return 4 * taken > 3 * self._steps


def slow_config(
    hurry: Path, layout: tuple[int, int], *words: str, recipe: str = "gpt_stdlib", may_end: bool = False
) -> Config:
    """Of an exact job on dp x pp ranks that is slow until there is the file `hurry`; and that does not end before, but
    for one that `may_end`. Its run directory is beside that file, or has it."""
    slow = f"data.transform._target_={__name__}.Slowly", f"data.transform.until={hurry}"
    lasts = () if may_end else ("data.transform.steps=${steps}",)
    return job_config(layout, *slow, *lasts, *words, recipe=recipe)
