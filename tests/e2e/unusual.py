"""Models and data that are unusual in one way each, for test_any_model.py. The command can build them by `_target_`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaswave_fx.models.gpt import GPT
from elaswave_fx.models.losses import IGNORED_LABEL, token_loss_sum

WIDTH = 32
CLASSES = 10
VOCABULARY = 64


class PaddedTokens:
    """Sequences of 3 to `seq_len` tokens, counting up by 1 to 3; padded on the right with `filler`, without labels."""

    def __init__(self, samples: int = 256, seq_len: int = 16, filler: int = 0) -> None:
        self.samples = samples
        self.seq_len = seq_len
        self.filler = filler

    def __len__(self) -> int:
        return self.samples

    def length(self, index: int) -> int:
        return 3 + index * 7 % (self.seq_len - 2)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index * 5 + torch.arange(self.seq_len + 1) * (1 + index % 3)) % (VOCABULARY - 1)
        real = torch.arange(self.seq_len) < self.length(index)
        return {
            "input_ids": tokens[:-1].where(real, torch.tensor(self.filler)),
            "attention_mask": real.long(),
            "labels": tokens[1:].where(real, torch.tensor(IGNORED_LABEL)),
        }


class HalfFrozen(GPT):
    """The embeddings and the first `frozen` blocks are not trained, nor a bias in the middle of what is."""

    def __init__(self, vocab_size: int, seq_len: int, frozen: int = 2, **options: Any) -> None:
        super().__init__(vocab_size, seq_len, tied=False, **options)
        for part in (self.token_embedding, self.position_embedding, *self.blocks[:frozen]):
            part.requires_grad_(False)
        self.blocks[-1].attention.qkv.bias.requires_grad_(False)


class Swish(torch.autograd.Function):
    """x * sigmoid(x), keeping x alone; its backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grads[0] * (gate + x * gate * (1 - gate))


class RoundStraightThrough(torch.autograd.Function):
    """Rounds forward and passes gradients unchanged: no derivative of its forward (Bengio et al. 2013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@torch.library.custom_op("elaswave_unusual::cube_root", mutates_args=())
def cube_root(x: Tensor) -> Tensor:
    """Cube root of 1 + x^2."""
    return (1 + x * x).pow(1 / 3)


cube_root.register_fake(torch.empty_like)
cube_root.register_autograd(
    lambda ctx, grad: grad * (2 / 3) * ctx.saved_tensors[0] * (1 + ctx.saved_tensors[0].square()).pow(-2 / 3),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("elaswave_unusual::no_derivative", mutates_args=())
def no_derivative(x: Tensor) -> Tensor:
    """An operator that nobody can differentiate."""
    return x.sin()


no_derivative.register_fake(torch.empty_like)


class Layered(nn.Module):
    """Residual layers over flat images; subclasses say what `activate` is."""

    def __init__(self, size: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(size, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def activate(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(image)
        for layer in self.layers:
            x = x + self.activate(layer(x))
        return token_loss_sum(self.leave(x), label)


class OwnFunction(Layered):
    def activate(self, x: Tensor) -> Tensor:
        return Swish.apply(x)


class Rounded(Layered):
    def activate(self, x: Tensor) -> Tensor:
        return RoundStraightThrough.apply(x)


class RoundedByDetach(Layered):
    """What `Rounded` means, in a form that every capture sees."""

    def activate(self, x: Tensor) -> Tensor:
        return x + ((4 * x).round() / 4 - x).detach()


class OwnOperator(Layered):
    def activate(self, x: Tensor) -> Tensor:
        return cube_root(x)


class Underivable(Layered):
    def activate(self, x: Tensor) -> Tensor:
        return no_derivative(x)


class Hooked(Layered):
    """A hook changes the gradient behind the back of the graph."""

    def activate(self, x: Tensor) -> Tensor:
        if x.requires_grad and not torch.compiler.is_compiling():
            x.register_hook(lambda grad: grad / math.pi)
        return F.silu(x)


class Numbered(Layered):
    """A tensor becomes a Python number."""

    def activate(self, x: Tensor) -> Tensor:
        return x * x.detach().abs().max().item()


class Infinite(Layered):
    """The first loss is no number."""

    def activate(self, x: Tensor) -> Tensor:
        return x.log()


class Unfitting(Layered):
    """The images have another size."""

    def __init__(self) -> None:
        super().__init__(size=63)


class Renamed(Layered):
    """The data has no field `picture`."""

    def forward(self, picture: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(picture, label)


class Branching(Layered):
    """The way through the model depends on the data."""

    def activate(self, x: Tensor) -> Tensor:
        return x.sin() if x.sum() > 0 else x.cos()
