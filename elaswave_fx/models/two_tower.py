"""Two towers of unequal depth over two inputs, joined before the head.

The model exercises features that a chain of equal blocks lacks: several inputs that enter at different units, a value
that skips the whole second tower, and units of unequal cost.

Input: `left` float (batch, left_size), `right` float (batch, right_size), `label` int64 (batch,).
Output: `(loss sum, count)`.
"""

import torch
from torch import Tensor, nn

from elaswave_fx.models.losses import token_loss_sum


class Layer(nn.Module):
    """A residual layer of a tower: `x + linear(dropout(gelu(linear(norm(x)))))`; (batch, width) to the same shape."""

    def __init__(self, width: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, expansion * width)
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(expansion * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(nn.functional.gelu(self.widen(self.norm(x)), approximate="tanh")))


class TwoTower(nn.Module):
    """`left_layers` and `right_layers` layers of `width`; layer i of a tower is 1 + i % 4 widths wide inside."""

    def __init__(
        self,
        left_size: int = 32,
        right_size: int = 32,
        classes: int = 10,
        width: int = 64,
        left_layers: int = 2,
        right_layers: int = 5,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.left = self._tower(left_size, width, left_layers, dropout)
        self.right = self._tower(right_size, width, right_layers, dropout)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(approximate="tanh"), nn.Linear(width, classes))

    @staticmethod
    def _tower(size: int, width: int, layers: int, dropout: float) -> nn.Sequential:
        return nn.Sequential(nn.Linear(size, width), *(Layer(width, 1 + i % 4, dropout) for i in range(layers)))

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, left_size), (batch, right_size), (batch,) int64, to (loss sum fp32, count int64)."""
        joined = torch.cat((self.left(left), self.right(right)), dim=1)
        return token_loss_sum(self.head(joined), label)
