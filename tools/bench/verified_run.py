"""A run by the command line and what `verify` takes to hold it against its data, configuration and seed.

verified_run(("recipe=gpt_stdlib", "steps=400"))  ->  VerifiedRun(train_s=61.2, verify_s=3.4)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.processes import BenchFailed


@dataclass(frozen=True)
class VerifiedRun:
    """Seconds of both commands, by the wall clock, their start included."""

    train_s: float
    verify_s: float


def verified_run(words: Sequence[str]) -> VerifiedRun:
    """Train with exact=true, then verify. Raises BenchFailed if either fails."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train_s = _seconds(["elaswave_fx.train", "exact=true", f"hydra.run.dir={run}", *words])
        return VerifiedRun(train_s, _seconds(["elaswave_fx.verify", str(run)]))


def _seconds(words: Sequence[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchFailed(f"exact: {' '.join(words)} failed: {' '.join(last)}")
    return time.perf_counter() - began
