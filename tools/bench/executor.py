"""executor: forward and backward of transformer blocks, native unit programs against eager autograd and inductor.

One thread, same weights and inputs, dropout 0; all compute the gradients of all parameters. Inductor compiles the whole
model for its one shape (`torch.compile(fullgraph=True, dynamic=False)`), ours consists of unit programs as a step runs
them; what either takes to compile is not counted. What the calls take without the arithmetic is measured with the same
blocks over two tokens of width 8.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elaswave_fx.build.unit_sequence import UnitSequence
from elaswave_fx.models.gpt import Block
from elaswave_fx.passes.lower import lower
from elaswave_fx.passes.pipeline import STANDARD, run_passes
from elaswave_fx.program.capture import capture
from tools.bench.results import Entry, Options, Outcome, compare

_LAYERS = 4
_HEADS = 4


Model = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Input -> loss sum and count; eager or compiled."""


@dataclass(frozen=True)
class _Case:
    """A size, how often it is run, and the least ratios wanted against eager autograd and against inductor."""

    width: int
    tokens: int
    runs: int
    wanted: float | None
    of_inductor: float | None

    @property
    def name(self) -> str:
        return f"width {self.width}, {self.tokens} tokens"

    @property
    def product_flops(self) -> float:
        """Operations of the matrix products and of attention, forward and backward."""
        forward = 24 * self.tokens * self.width**2 + 4 * self.tokens**2 * self.width
        return 3.0 * _LAYERS * forward


_CASES = (
    _Case(64, 32, 200, 2.5, 1.0),
    _Case(64, 256, 60, 1.3, 1.0),
    _Case(256, 256, 30, None, None),
    _Case(512, 256, 12, 0.98, None),
)
_CALLS_ALONE = _Case(8, 2, 200, None, None)


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
    calls = _compare(_CALLS_ALONE, progress, options)
    rate = _product_rate()
    entries, notes = [], ["", "outside of kernels (the same calls with next to no arithmetic), and the products' limit"]
    for case in _CASES[: 1 if options.tiny else None]:
        entry = _compare(case, progress, options)
        entries += [entry, _compare(case, progress, options, inductor=True)]
        least_ms = 1e3 * case.product_flops / rate
        notes.append(
            f"  {case.name}: ours {calls.ours:.3f} ms, {calls.ours / entry.ours:.0%}; eager {calls.peer:.3f} ms, "
            f"{calls.peer / entry.peer:.0%}; products at least {least_ms:.3f} ms, {least_ms / entry.ours:.0%} of ours"
        )
    notes.append(f"One thread multiplies matrices of 256 x 512 by 512 x 512 at {rate / 1e9:.0f} GFLOP/s.")
    return Outcome(entries, notes)


def _compare(case: _Case, progress: Callable[[str], None], options: Options, inductor: bool = False) -> Entry:
    """Time the native programs against eager autograd, or against inductor, which compiles first."""
    name = f"{case.name}, inductor" if inductor else case.name
    progress(name)
    torch.manual_seed(0)
    model, x = Stack(case.width).train(), torch.randn(1, case.tokens, case.width)
    peer = torch.compile(model, fullgraph=True, dynamic=False) if inductor else model
    wanted = case.of_inductor if inductor else case.wanted
    runs, theirs = options.repeats or case.runs, _autograd_step(peer, list(model.parameters()), x)
    return compare(name, _native_step(model, x), theirs, runs, target=wanted)


def _product_rate() -> float:
    """Return the operations per second of a matrix product that stays in the cache: the best of some."""
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    best_s = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        torch.mm(a, b)
        best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * 256 * 512 * 512 / best_s


def _autograd_step(model: Model, params: list[nn.Parameter], x: Tensor) -> Callable[[], None]:
    def step() -> None:
        loss, _ = model(x)
        torch.autograd.grad(loss, params)

    return step


def _native_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Make the same work a chain of unit programs."""
    batches = ({"x": torch.randn(2, *x.shape[1:])}, {"x": torch.randn(3, *x.shape[1:])})
    program, _ = run_passes(capture(model, batches, 1), STANDARD.passes)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    units = UnitSequence(lower(program, lambda name, spec: 0, True), program.tensors, params.__getitem__)
    keys = torch.ones(1, dtype=torch.int64)

    def step() -> None:
        units.step({"x": x}, keys)

    return step
