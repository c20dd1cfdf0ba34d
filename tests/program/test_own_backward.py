"""The backward of a model's own autograd.Function is compared with the derivative of its forward."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function

from elaswave_fx.errors import CaptureError
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program.capture import capture
from elaswave_fx.program.check_gradients import check_gradients
from elaswave_fx.program.own_backward import own_functions, recorded_calls, refuse_other_backward
from tests.passes.models import WIDTH, Classifier, vectors


class Swish(Function):
    """The memory-efficient one: its backward is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class Scaled(Function):
    """With the newer form, a number, an argument without a gradient, and two results."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, by: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return by * x @ weight, x.detach().argmax(dim=1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.by = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        _, weight = ctx.saved_tensors
        return ctx.by * grad @ weight.t(), None, None


class Doubled(Function):
    """Writes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


class TruncatedExp(Function):
    """That of radiance fields."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * torch.exp(x.clamp(max=15))


class LowerBound(Function):
    """That of learned compression: gradients that would raise what is too low pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=-20.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * ((x >= -20.0) | (grad < 0))


class ClippedGradient(Function):
    """No gradient above a thousand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e3, 1e3)


class CrossEntropy(Function):
    """The memory-efficient one: its backward is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor, ignored: int) -> Tensor:  # type: ignore[override]
        counts = (labels != ignored).to(x.dtype)[:, None]
        ctx.save_for_backward(x.softmax(dim=1), labels, counts)
        return -(x.log_softmax(dim=1).gather(1, labels.clamp(min=0)[:, None]) * counts).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        chances, labels, counts = ctx.saved_tensors
        right = nn.functional.one_hot(labels.clamp(min=0), chances.shape[1]).to(chances.dtype)
        return grad * (chances - right) * counts, None, None


class OfAllLabels(CrossEntropy):
    """Its backward forgets the label that does not count."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        chances, labels, _ = ctx.saved_tensors
        return grad * (chances - nn.functional.one_hot(labels.clamp(min=0), chances.shape[1])), None, None


class Permuted(Function):
    """As tokens are by their experts: the places of one argument are those of the other, backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, width: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad[ctx.saved_tensors[0]], None, None, None


ORDER = torch.tensor([2, 0, 3, 1])
LABELS = torch.tensor([0, 2, 1, 4])


def tried(function: type[Function], *others: object) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2)).requires_grad_()
    call = function.apply  # the name by which it usually goes

    def loss() -> Tensor:
        found = call(x * 1, *others)
        through = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=True)
        return (found[0] if isinstance(found, tuple) else found).sum() + through.sum()

    functions = own_functions(loss())
    assert functions == [function], "torch's own are none of them"
    with recorded_calls(functions) as calls:
        loss()
    assert len(calls) == 1
    refuse_other_backward([*calls.values()])


@pytest.mark.parametrize(
    ("function", "others"),
    [
        (Swish, ()),
        (Scaled, (torch.ones(5, 3), 0.5)),
        (Doubled, ()),
        (CrossEntropy, (LABELS, -100)),
        (Permuted, (ORDER, ORDER.argsort(), 2)),
    ],
    ids=lambda each: "",
)
def test_a_derivative_is_none_to_refuse(function: type[Function], others: tuple[object, ...]) -> None:
    tried(function, *others)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_a_backward_that_forgets_the_label_of_what_does_not_count_is_refused(ignored: int) -> None:
    """No label of the first samples is ignored."""
    with pytest.raises(CaptureError, match=f"derivative of its forward, tried with labels of {ignored}"):
        tried(OfAllLabels, LABELS, ignored)


@pytest.mark.parametrize("function", [TruncatedExp, LowerBound, ClippedGradient])
def test_a_backward_that_differs_far_away_is_refused(function: type[Function]) -> None:
    with pytest.raises(
        CaptureError, match=f"the backward of {function.__name__} is not the derivative of its forward, "
    ):
        tried(function)


class Without(Function):
    """Autograd is off in forward anyway; published code says so once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return Swish.backward(ctx, grad)


class Recomputed(Function):
    """An activation checkpoint of one's own around a layer."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(x)
        return None, *torch.autograd.grad(result, [x, *ctx.layer.parameters()], grad)


class Checkpointed(Function):
    """That of guided diffusion: parameters are given for their gradients alone."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: int, *args: Tensor) -> Tensor:  # type: ignore[override]
        ctx.run, ctx.inputs, ctx.weights = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            result = ctx.run(*[x.view_as(x) for x in inputs])
        return None, None, *torch.autograd.grad(result, [*inputs, *ctx.weights], grad, allow_unused=True)


class Halved(Recomputed):
    """Half of its weights' gradients."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        nothing, of_x, *others = Recomputed.backward(ctx, grad)
        return nothing, of_x, *(0.5 * each for each in others)


without = Without.apply


class Published(Classifier):
    def __init__(self, recomputed: type[Function]) -> None:
        super().__init__(layers=1)
        self.recomputed = recomputed
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        features = without(super().features(x))
        with torch.no_grad():
            still = without(features).mean(dim=-1, keepdim=True)
        given = (1, features) if self.recomputed is Checkpointed else (features,)
        return self.recomputed.apply(self.layer, *given, *self.layer.parameters()) + still


@pytest.mark.parametrize("recomputed", [Recomputed, Checkpointed])
def test_a_grad_mode_inside_forward_ends_with_it(recomputed: type[Function]) -> None:
    model, batch = Published(recomputed), vectors(4, 3)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    program = Normalize().apply(capture(model, (vectors(4, 1), vectors(6, 2)), granule=2))
    check_gradients(model, program, batch, batch)
    assert any(node.target is torch.ops.aten.detach.default for node in program.graph.graph.nodes)
    after = model.state_dict()
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before)


def test_gradients_of_parameters_that_a_layer_holds_are_compared_too() -> None:
    model, batch = Published(Halved), vectors(4, 3)
    program = Normalize().apply(capture(model, (vectors(4, 1), vectors(6, 2)), granule=2))
    with pytest.raises(CaptureError, match="the backward of Halved or Without is not"):
        check_gradients(model, program, batch, batch)


class Clamped(Function):
    """Straight through a clamp by a number in a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: Tensor) -> Tensor:  # type: ignore[override]
        return torch.minimum(x, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Forgetful(Function):
    """Its backward forgets the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.square() * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad, None


class Applied(Classifier):
    def __init__(self, call: Any) -> None:
        super().__init__(layers=1)
        self.call = call
        self.register_buffer("most", torch.tensor([1e9, 30.0]))

    def features(self, x: Tensor) -> Tensor:
        return self.call(super().features(x), self.most)


@pytest.mark.parametrize(
    "call",
    [
        lambda h, most: torch.utils.checkpoint.checkpoint(Clamped.apply, h, most[1], use_reentrant=True),
        lambda h, most: Clamped.apply(Clamped.apply(h, most[0]), most[1]),
        lambda h, most: Forgetful.apply(h, (h.detach() < 1e9).float()),
        lambda h, most: Forgetful.apply(h, h.detach() < 1e9),
    ],
    ids=["in a checkpoint", "a second number", "a mask of ones", "a mask that is true"],
)
def test_a_backward_that_differs_with_other_arguments_is_refused(call: Any) -> None:
    model, batch = Applied(call), vectors(4, 3)
    program = Normalize().apply(capture(model, (vectors(4, 1), vectors(6, 2)), granule=2))
    with pytest.raises(
        CaptureError, match="the backward of (Clamped|Forgetful) is not the derivative of its forward, "
    ):
        check_gradients(model, program, batch, batch)
