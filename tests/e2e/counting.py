"""Models that miscount what they have learned from."""

from torch import Tensor

from elaswave_fx.models.two_tower import TwoTower


class Uncounted(TwoTower):
    """No target counts."""

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(left, right, label)
        return loss, count * 0


class Negative(TwoTower):
    """Less than none does."""

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(left, right, label)
        return loss, -count


class Flat(TwoTower):
    """Nothing that the parameters do changes the loss."""

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(left, right, label)
        return loss * 0.0 + count, count
