"""simplify: views that undo each other go, the operands of every kernel stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from elaswave_fx.errors import PassError
from elaswave_fx.passes.differentiate import differentiate_unit
from elaswave_fx.passes.simplify import Simplify, simplified
from elaswave_fx.program.ir import calls, is_aten, placeholders, value_of
from tests.passes.compiled import Compiled, calls_of, compile_model
from tests.passes.models import Classifier, vectors


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_model(Classifier(), vectors)


def graph_of(function: object, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[arg-type]


X = torch.randn(4, 6, 8)
RESHAPED = ["aten.reshape", "aten.add.Tensor"]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.transpose(0, 1).transpose(1, 0) + 1, ["aten.add.Tensor"]),
        (lambda x: x.permute(1, 2, 0).permute(2, 0, 1) + 1, ["aten.add.Tensor"]),
        (lambda x: x.permute(1, 2, 0).permute(1, 2, 0) + 1, ["aten.permute"] * 2 + ["aten.add.Tensor"]),
        (lambda x: x.reshape(24, 8).reshape(4, 48).reshape(4, 6, 8) + 1, ["aten.add.Tensor"]),
        (lambda x: x.reshape(24, 8).reshape(4, 48) + 1, RESHAPED),
        (lambda x: x.sum([0], keepdim=True).reshape(6, 8) + 1, ["aten.sum.dim_IntList", "aten.add.Tensor"]),
        (lambda x: x.sum([0], keepdim=True).reshape(48) + 1, ["aten.sum.dim_IntList", *RESHAPED]),
    ],
    ids=["transposed", "permuted", "not undone", "shape of before", "last shape", "dropped axis", "other shape"],
)  # fmt: skip
def test_rules(function: object, left: list[str]) -> None:
    module = graph_of(function, X)
    for node in calls(module.graph):
        if is_aten(node, "aten.view"):
            node.target = torch.ops.aten.reshape.default
    after = simplified(module)
    assert calls_of(after) == left
    assert torch.equal(after(X), module(X))


def test_a_copy_that_others_read_is_made_once() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.transpose(0, 1).reshape(6, 32)
        return copy + 1, copy.reshape(192) + 2

    module = graph_of(function, X)
    after = simplified(module)
    assert calls_of(after).count("aten.clone") == calls_of(module).count("aten.clone")
    for mine, other in zip(after(X), module(X), strict=True):
        assert torch.equal(mine, other)


def test_derivatives_are_the_same_to_the_bit(compiled: Compiled) -> None:
    torch.manual_seed(3)
    fewer = 0
    for unit in compiled.program.units:
        before = differentiate_unit(unit).graph
        after = simplified(before)
        inputs = [sample_of(value_of(node)) for node in placeholders(before.graph)]
        for mine, other in zip(after(*inputs), before(*inputs), strict=True):
            assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))
        fewer += len(calls_of(before)) - len(calls_of(after))
    assert fewer > 0


def sample_of(value: Tensor) -> Tensor:
    shape = [3 if isinstance(size, torch.SymInt) else size for size in value.shape]
    return torch.randn(shape) if value.is_floating_point() else torch.ones(shape, dtype=value.dtype)


def test_undifferentiated_programs_are_refused(compiled: Compiled) -> None:
    with pytest.raises(PassError, match="simplify: the program is not differentiated"):
        Simplify().apply(compiled.program)
