"""choose_kernels: our kernels stand in for the operators they compute, and for no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from elaswave_fx.errors import PassError
from elaswave_fx.passes.choose_kernels import ChooseKernels, with_own_kernels
from tests.passes.compiled import calls_of, compile_model
from tests.passes.models import vectors

aten, ours = torch.ops.aten, torch.ops.elaswave
X = 3.0 * torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
LAYOUTS = {"dense": X, "transposed": X.t(), "with gaps": X[:, ::2], "empty": X[:0]}


class Gelu(nn.Module):
    """Three layers; the loss is a sum over (B, 8) inputs."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(approximate)) for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x).square().sum(), torch.ones_like(y).sum()


def graph_of(approximate: str, x: Tensor) -> fx.GraphModule:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.gelu(x, approximate=approximate)
        return y, aten.gelu_backward(y, x, approximate=approximate)

    return make_fx(function, tracing_mode="fake")(x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gelu_is_computed_by_our_kernels(layout: str) -> None:
    x = LAYOUTS[layout]
    before = graph_of("tanh", x)
    after = with_own_kernels(before)
    assert calls_of(after) == ["elaswave.gelu_tanh", "elaswave.gelu_tanh_backward"]
    for mine, torchs in zip(after(x), before(x), strict=True):
        assert mine.stride() == torchs.stride()
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=2e-6)


def test_gradients_of_another_layout_than_the_input() -> None:
    dy = torch.randn(33, 5).t()
    torch.testing.assert_close(
        ours.gelu_tanh_backward(dy, X), aten.gelu_backward(dy, X, approximate="tanh"), rtol=1e-5, atol=5e-6
    )


@pytest.mark.parametrize(("approximate", "dtype"), [("none", torch.float32), ("tanh", torch.bfloat16)])
def test_other_forms_and_types_are_left_to_torch(approximate: str, dtype: torch.dtype) -> None:
    before = graph_of(approximate, X.to(dtype))
    assert calls_of(with_own_kernels(before)) == calls_of(before)


def test_a_model_is_lowered_to_them() -> None:
    compiled = compile_model(Gelu("tanh"), vectors)
    forward = [name for kind in compiled.program.kinds.values() for name in calls_of(kind.forward)]
    backward = [name for kind in compiled.program.kinds.values() for name in calls_of(kind.backward)]
    assert "elaswave.gelu_tanh" in forward and "elaswave.gelu_tanh_backward" in backward
    assert not any(name.startswith("aten.gelu") for name in (*forward, *backward))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="gelu_tanh: Double is not float32"):
        ours.gelu_tanh(X.double())
    with pytest.raises(RuntimeError, match=r"a gradient of \[33, 5\] for an x of \[5, 33\]"):
        ours.gelu_tanh_backward(X.t(), X)


def test_undifferentiated_programs_are_refused() -> None:
    program = compile_model(Gelu("none"), vectors).program
    with pytest.raises(PassError, match="choose_kernels: the program is not differentiated"):
        ChooseKernels().apply(program)
