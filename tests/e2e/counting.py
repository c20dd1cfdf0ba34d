"""Models that miscount what they have learned from."""

from torch import Tensor

from elaswave_fx.models.two_tower import TwoTower


class Short(TwoTower):
    """As small as it gets: every one of them is captured."""

    def __init__(self, **_: object) -> None:
        super().__init__(width=8, left_layers=0, right_layers=1)


class Uncounted(Short):
    """No target counts."""

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(left, right, label)
        return loss, count * 0


class Negative(Short):
    """Less than none does."""

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(left, right, label)
        return loss, -count


class Flat(Short):
    """Nothing that the parameters do changes the loss."""

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(left, right, label)
        return loss * 0.0 + count, count
