"""unit_program: fx graphs become plain data that the native executor takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from elaswave_fx import _native
from elaswave_fx.errors import CaptureError, PassError
from elaswave_fx.passes.unit_program import lower_graph

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def run(module: fx.GraphModule, *inputs: Any) -> list[Any]:
    return _native.Program(lower_graph("test", module)).run(list(inputs))


X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2.5 + 1, x / 4, 3 - x, x**2, x > 5),
        lambda x: (torch.div(x, 3, rounding_mode="floor"), x.floor_divide(2), x.clamp(min=2.0)),
        lambda x: (x.sum() / x.shape[0], x * (x.shape[0] / 8), x.new_zeros(x.shape[0] + 2, 4) + x.shape[0] % 2),
        lambda x: (x.reshape(-1, x.shape[0]), x.expand(2, -1, -1), torch.arange(x.shape[0]) - x.shape[0]),
        lambda x: (*x.split(1, dim=1), torch.cat(x.unbind(1)), torch.stack(x.chunk(2, dim=1))),
        lambda x: (x.to(torch.bfloat16), x.to(torch.int64), torch.full_like(x, float("-inf")), x.topk(2)[1]),
        lambda x: (x.numel() * x, torch.where(x > 3, x, -1.0), torch.maximum(x, x.mean()), x.detach()),
        lambda x: (torch.sym_min(x.shape[0], 2) * x, torch.sym_max(x.shape[0], 9) * x, x * torch.sym_float(x.shape[0])),
    ],
    ids=["arithmetic", "division", "sizes", "views", "lists", "types", "numbers", "limits"],
)
def test_the_executor_computes_the_graph(function: Callable[[torch.Tensor], Any]) -> None:
    module = traced(function, X)
    for x in (X, torch.arange(20.0).reshape(5, 4)):
        ours, theirs = run(module, x), function(x)
        assert len(ours) == len(theirs)
        for got, expected in zip(ours, theirs, strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_slots_are_freed_after_their_last_use() -> None:
    program = lower_graph("test", traced(lambda x: (x + 1).relu().sum(), X))
    frees = {slot for instruction in program["instructions"] for slot in instruction["frees"]}
    assert frees == set(range(program["num_slots"])) - set(program["outputs"])
    assert [instruction["frees"] for instruction in program["instructions"]] == [[0], [1], [2]]


def test_an_unused_result_is_freed_where_it_is_made() -> None:
    program = lower_graph("test", traced(lambda x: aten.max.dim(x, 1)[0], X))
    (instruction,) = program["instructions"]
    assert len(instruction["outs"]) == 2 and instruction["outs"][1] in instruction["frees"]


def test_none_is_slot_minus_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    graph.output((None, x))
    assert lower_graph("test", fx.GraphModule(torch.nn.Module(), graph))["outputs"] == [-1, 0]


def number_graph(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    node = build(graph, x)
    node.meta["val"] = X
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def where(graph: fx.Graph, condition: fx.Node, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.where.self, (condition, x, 0.5))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda g, x: g.call_function(aten.add.Tensor, (2.0, x)), 2.0 + X),
        (lambda g, x: g.call_function(aten.mul.Tensor, (x, 2)), X * 2),
        (lambda g, x: g.call_function(aten.floor_divide.default, (x, 2)), X.floor_divide(2)),
        (lambda g, x: where(g, g.call_function(aten.gt.Scalar, (x, 3)), x), X.where(X > 3, torch.tensor(0.5))),
    ],
    ids=["first", "second", "no overload name", "no scalar overload"],
)  # fmt: skip
def test_numbers_in_the_places_of_tensors(
    build: Callable[[fx.Graph, fx.Node], fx.Node], expected: torch.Tensor
) -> None:
    def with_values(graph: fx.Graph, x: fx.Node) -> fx.Node:
        node = build(graph, x)
        for other in graph.nodes:
            other.meta.setdefault("val", X)
        return node

    assert torch.equal(run(number_graph(with_values), X)[0], expected)


def test_a_call_without_a_native_form_is_refused() -> None:
    message = "model: .* computes by <built-in function xor>, which has no native form"
    with pytest.raises(CaptureError, match=message):
        lower_graph("test", number_graph(lambda graph, x: graph.call_function(operator.xor, (x, 2))))


def test_a_complex_number_is_refused_with_a_way_out() -> None:
    message = r"aten.mul.Scalar in .* takes the complex number 2j, .*such as torch.complex\(real, imaginary\)"
    with pytest.raises(CaptureError, match=message):
        lower_graph("test", number_graph(lambda graph, x: graph.call_function(aten.mul.Scalar, (x, 2j))))


def test_a_missing_argument_is_refused() -> None:
    with pytest.raises(PassError, match="lower: test: aten.mm.default lacks its argument 'mat2'"):
        lower_graph("test", number_graph(lambda graph, x: graph.call_function(aten.mm.default, (x,))))
