"""samples, dependence: where samples lie in a value, and what a value depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elaswave_fx.errors import CaptureError
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program.batch_size import batch_symbol, fixed_shape, sized_axis
from elaswave_fx.program.dependence import Nature, gradient_nodes, natures
from elaswave_fx.program.ir import Program, SampleAxis, calls, fixed_size, is_aten, value_of
from elaswave_fx.program.samples import locate_samples, per_sample_shape, split_samples
from tests.passes.compiled import captured
from tests.passes.models import TOKENS, WIDTH, Frozen, vectors


class Shapes(nn.Module):
    """`last` is the value that the test looks at."""

    def __init__(self, shape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shape = shape

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.shape(x * self.scale)).sum(), y.sum()


def looked_at(shape: Callable[[Tensor], Tensor]) -> tuple[Program, torch.fx.Node]:
    program = Normalize().apply(captured(Shapes(shape), vectors, 1))
    return program, next(node for node in calls(program.graph.graph) if is_aten(node, "aten.tanh"))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda x: x, SampleAxis(0)),
        (lambda x: x.transpose(0, 1), SampleAxis(1)),
        (lambda x: x.reshape(-1, WIDTH), SampleAxis(0, period=TOKENS)),
        (lambda x: x.transpose(0, 1).reshape(-1, WIDTH), SampleAxis(0, outer=TOKENS)),
        (lambda x: x.view(-1, 2, TOKENS // 2, WIDTH).transpose(0, 1).reshape(-1, WIDTH), SampleAxis(0, 3, 2)),
        (lambda x: x.transpose(0, 1).reshape(-1, WIDTH).view(TOKENS, x.shape[0], WIDTH), SampleAxis(1)),
        (lambda x: x.transpose(0, 1).reshape(-1, WIDTH).t(), SampleAxis(1, outer=TOKENS)),
        (lambda x: torch.cat((x, x)), SampleAxis(0, outer=2)),
        (lambda x: torch.cat((x, x), dim=1), SampleAxis(0)),
        (lambda x: x.repeat(3, 1, 1), SampleAxis(0, outer=3)),
        (lambda x: x.repeat_interleave(3, dim=0), SampleAxis(0, period=3)),
        (lambda x: torch.stack((x, x)), SampleAxis(1)),
        (lambda x: x.expand(4, -1, -1, -1).reshape(-1, WIDTH), SampleAxis(0, period=TOKENS, outer=4)),
        (lambda x: x.split(2, dim=1)[0], SampleAxis(0)),
        (lambda x: x.repeat(2, 1, 1).repeat_interleave(3, dim=0), SampleAxis(0, period=3, outer=2)),
        (lambda x: x[:, 0].t().repeat_interleave(3), SampleAxis(0, period=3, outer=WIDTH)),
        (lambda x: x[0, 0].detach().mul(0).repeat_interleave(2 * x.shape[0]), SampleAxis(0, period=2, outer=WIDTH)),
        (lambda x: (torch.arange(2 * x.shape[0]) // x.shape[0]).float(), SampleAxis(0, outer=2)),
        (lambda x: (torch.arange(2 * x.shape[0]) < x.shape[0]).float().view(2, -1).view(-1), SampleAxis(0, outer=2)),
        (lambda x: torch.zeros(2 * x.shape[0]) + torch.cat((x, x))[:, 0, 0], SampleAxis(0, outer=2)),
        (lambda x: torch.zeros(2 * x.shape[0]) + x.view(-1, 2, TOKENS // 2, WIDTH)[:, :, 0, 0].reshape(-1),
         SampleAxis(0, period=2)),
        (lambda x: torch.zeros_like(torch.cat((x, x))[:, 0]), SampleAxis(0, outer=2)),
        (lambda x: torch.cat((torch.cat((x, x)), torch.zeros_like(torch.cat((x, x)))), dim=1), SampleAxis(0, outer=2)),
        (lambda x: torch.cat((torch.cat((x, x)), torch.zeros_like(torch.cat((x, x)))))[:, 0], SampleAxis(0, outer=4)),
        (lambda x: x.sum(dim=0), None),
    ],
    ids=[
        "inputs", "transposed", "flattened", "inner", "between", "unflattened", "turned", "joined", "wider", "repeated",
        "interleaved", "stacked", "expanded", "split", "repeated and interleaved", "interleaved flat",
        "entries for each sample", "halves by position", "halves by a mask", "zeros beside halves",
        "zeros beside pairs", "zeros like halves", "wider halves", "halves and zeros", "summed",
    ],
)  # fmt: skip
def test_where_samples_lie(shape: Callable[[Tensor], Tensor], expected: SampleAxis | None) -> None:
    """And the claim holds for numbers: the part of sample 1 is what a batch of sample 1 alone gives."""
    program, node = looked_at(shape)
    assert locate_samples(program).of(node) == expected
    if expected is None:
        return
    x = vectors(3, 5)["x"]
    together, alone = (split_samples(shape(part), expected) for part in (x, x[1:2]))
    assert torch.equal(together.select(expected.axis + 1, 1), alone.select(expected.axis + 1, 0))


def test_mixed_samples() -> None:
    program, node = looked_at(lambda x: x[:, 0] @ x[:, 0].t())
    axes = locate_samples(program)
    assert axes.mixed(node) and axes.of(node) is None
    program, node = looked_at(lambda x: torch.cat((x[:, 0], torch.zeros(1, WIDTH))))
    assert locate_samples(program).mixed(node)


def test_only_outermost_samples_can_be_sliced() -> None:
    program, node = looked_at(lambda x: x.transpose(0, 1).reshape(-1, WIDTH))
    assert locate_samples(program).sliceable(node) is None


def test_shapes_without_the_batch() -> None:
    program, node = looked_at(lambda x: x.reshape(-1, WIDTH))
    value, symbol = value_of(node), batch_symbol(program)
    assert sized_axis(value, symbol) == (0, TOKENS)
    assert fixed_shape(value, symbol, 5) == (5 * TOKENS, WIDTH)
    assert per_sample_shape(value, SampleAxis(0, TOKENS)) == (TOKENS, WIDTH)


def test_a_symbolic_size_is_not_asked_for_its_number() -> None:
    _, node = looked_at(lambda x: x)
    with pytest.raises(CaptureError, match="model: a size depends on the number of samples"):
        fixed_size(value_of(node).shape[0])
    assert fixed_size(value_of(node).shape[1]) == TOKENS


def test_natures() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("table", torch.ones(WIDTH))
            self.register_buffer("mean", torch.ones(WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            fixed, own, given = self.table.sin(), self.weight.cos(), x.square()
            drawn, old = given * fixed, self.mean.exp()
            self.mean.add_(1)
            return ((own + drawn).tanh() + 0 * old).sum(), y.sum()

    program = captured(Several(), vectors)
    found = {str(n.target).split(".")[1]: nature for n, nature in natures(program).items() if n.op == "call_function"}
    expected = {"sin": Nature.FIXED, "cos": Nature.PREPARED, "square": Nature.PREPARED, "tanh": Nature.MAIN}
    assert expected.items() <= found.items()
    assert found["exp"] == Nature.PREPARED, "a buffer that is updated is no constant"


def test_which_values_carry_gradients() -> None:
    program = captured(Frozen(), vectors)
    names = [node.name for node in gradient_nodes(program)]
    carried = [node.name in names for node in calls(program.graph.graph) if is_aten(node, "aten.linear")]
    assert carried == [False, False, True, True, True]
    read = {node.name for node in program.graph.graph.nodes if node.op == "placeholder"} & {*names}
    assert not [name for name in read if "layers_0" in name or "layers_1_up_bias" in name]
