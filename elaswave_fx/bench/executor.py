"""executor: forward and backward of transformer blocks, the native unit programs against eager autograd.

One thread, same weights and inputs, dropout 0; both compute the gradients of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from elaswave_fx.bench.results import Options, Outcome, compare
from elaswave_fx.models.gpt import Block
from elaswave_fx.program.capture import capture
from elaswave_fx.runtime.chain import Chain
from passes.lower import lower
from passes.pipeline import back_passes, front_passes, run_passes

_LAYERS = 4
_HEADS = 4
_CASES = ((64, 32, 60), (64, 256, 40), (512, 256, 8))
"""Width, tokens, runs."""


class Stack(nn.Module):
    """Blocks under a sum: (1, tokens, width) to (loss sum, count)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, _HEADS, 0.0, 0.0, True) for _ in range(_LAYERS)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks(x).sum(), torch.ones_like(x).sum()


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All cases; `progress` is told what is being measured."""
    torch.set_num_threads(1)
    entries = []
    for width, tokens, runs in _CASES:
        progress(f"width {width}, {tokens} tokens")
        torch.manual_seed(0)
        model = Stack(width).train()
        x = torch.randn(1, tokens, width)
        entries.append(compare(f"width {width}, {tokens} tokens", _native_step(model, x), _eager_step(model, x), runs))
    return Outcome(entries)


def _eager_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    params = list(model.parameters())

    def step() -> None:
        loss, _ = model(x)
        torch.autograd.grad(loss, params)

    return step


def _native_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """The same work as a chain of unit programs."""
    batches = ({"x": torch.randn(2, *x.shape[1:])}, {"x": torch.randn(3, *x.shape[1:])})
    program, _ = run_passes(capture(model, batches, 1), front_passes())
    program, _ = run_passes(program, back_passes("none"))
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    chain = Chain(lower(program, lambda name, spec: 0, True), program.tensors, params.__getitem__)
    keys = torch.ones(1, dtype=torch.int64)

    def step() -> None:
        chain.step({"x": x}, keys)

    return step
