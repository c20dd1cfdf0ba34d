"""A small residual network with BatchNorm for small images (He et al. 2016, basic blocks).

BatchNorm couples the samples of a batch, so this model exercises granules and running statistics.

Input: `image` float (batch, channels, height, width) and `label` int64 (batch,). Output: `(loss sum, count)`.

    ResNet()(torch.rand(32, 1, 8, 8), torch.randint(10, (32,))) -> (tensor(75.1), tensor(32))
"""

from torch import Tensor, nn

from elaswave_fx.models.losses import token_loss_sum


class ResidualBlock(nn.Module):
    """`relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))`; `stride` divides height and width."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.shortcut(x) + self.norm2(self.conv2(y))).relu()


class ResNet(nn.Module):
    """`widths` are the channels of the groups of blocks; each group after the first halves height and width."""

    def __init__(
        self, channels: int = 1, classes: int = 10, widths: tuple[int, ...] = (16, 32), blocks_per_group: int = 2
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        blocks: list[nn.Module] = []
        incoming = widths[0]
        for group, width in enumerate(widths):
            for index in range(blocks_per_group):
                stride = 2 if group > 0 and index == 0 else 1
                blocks.append(ResidualBlock(incoming, width, stride))
                incoming = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(incoming, classes)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """`image` (batch, channels, height, width), `label` (batch,) int64, to (loss sum fp32, count int64)."""
        x = self.blocks(self.stem_norm(self.stem(image)).relu())
        return token_loss_sum(self.head(x.mean(dim=(2, 3))), label)
