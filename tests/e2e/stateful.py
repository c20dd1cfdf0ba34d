"""Models with state that a step reads and updates, for test_state.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.e2e.unusual import CLASSES, WIDTH, Layered


class Gate(Layered):
    """A counter of steps opens a gate; a layer has spectral norm, whose power iteration goes on from step to step."""

    steps: Any

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.spectral_norm(self.enter)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def activate(self, x: Tensor) -> Tensor:
        return super().activate(x) * ((self.steps + 1) / 4).clamp(max=1.0)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        output = super().forward(image, label)
        self.steps += 1
        return output


class Memory(Layered):
    """Features are compared with those of the last batch, which are assigned after that."""

    memory: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        features = self.enter(image)
        near = (features @ self.memory.t()).softmax(dim=1) @ self.memory
        self.memory = torch.cat([features.detach(), self.memory])[:8]
        loss = nn.functional.cross_entropy(self.leave(self.activate(features + near)), label, reduction="sum")
        return loss, torch.ones_like(label).sum()


class Follower(Layered):
    """A frozen layer follows a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        for mine, theirs in zip(self.follower.parameters(), self.leave.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data
        scores = self.leave(self.activate(self.enter(image))) + self.follower(self.activate(self.enter(image)))
        return nn.functional.cross_entropy(scores, label, reduction="sum"), torch.ones_like(label).sum()
