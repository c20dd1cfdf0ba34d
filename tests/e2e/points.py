"""Data of a user's own that takes its time, so that a start looks at few of its samples, and a model that fits it.

A process in whose environment `OTHER_POINT` names a sample has another target for it than all others have.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

OTHER_POINT = "TESTS_OTHER_POINT"
COUNT = 512
SAMPLE_S = 0.01


class Points:
    """`hurry`: a file; samples take no time once it is there. `noisy`: this sample is another one in each process."""

    def __init__(self, hurry: str, noisy: int = -1) -> None:
        self._hurry, self._noisy, self._other = Path(hurry), noisy, int(os.environ.get(OTHER_POINT, -1))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not self._hurry.exists():
            time.sleep(SAMPLE_S)
        x = torch.arange(3.0) * index / COUNT
        if index == self._noisy:
            x = x + os.getpid() / 1e6
        return {"x": x, "y": x.sum() + (index == self._other)}


class Net(nn.Module):
    """Some units."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        error = self.leave(torch.tanh(self.enter(x))).squeeze(-1) - y
        return error.square().sum(), torch.ones_like(y).sum()
