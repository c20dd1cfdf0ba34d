"""gradient hooks: one that would change a gradient is refused by name, one that only looks is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elaswave_fx.errors import CaptureError
from elaswave_fx.passes.normalize import Normalize
from elaswave_fx.program.capture import capture
from elaswave_fx.program.check_gradients import check_gradients
from elaswave_fx.program.gradient_hooks import note_of_hooks_on_saved_tensors, refuse_changing_hooks
from tests.passes.models import WIDTH, Classifier, vectors


class Hooked(Classifier):
    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        super().__init__(layers=1)
        self.hook = hook

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if features.requires_grad:
            features.register_hook(self.hook)
        return features


def of_a_parameter(hook: Callable[[Tensor], Any]) -> nn.Module:
    model = Classifier(layers=1)
    model.head.weight.register_hook(hook)
    return model


def of_a_module(hook: Callable[[Any, Any, Any], Any]) -> nn.Module:
    model = Classifier(layers=1)
    model.head.register_full_backward_hook(hook)
    return model


def test_hooks_on_saved_tensors_are_named() -> None:
    class Halved(Classifier):
        def features(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda saved: saved.float()):
                return super().features(x)

    class Moved(Classifier):
        def features(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().features(x)

    (line,) = note_of_hooks_on_saved_tensors(Halved(layers=1), vectors(2, 0))
    assert "is not applied: saved tensors stay unchanged" in line and "test_gradient_hooks.py, line" in line
    model = Moved(layers=1)
    assert note_of_hooks_on_saved_tensors(model, vectors(2, 0)) == ()
    assert model(**vectors(2, 0))[0].isfinite()


class OnNode(Hooked):
    """A hook on a node of autograd's graph, after (`register_hook`) or before it; `far`: on one before that."""

    def __init__(self, name: str, hook: Callable[..., Any], far: bool = False) -> None:
        super().__init__(hook)
        self.name, self.far = name, far

    def features(self, x: Tensor) -> Tensor:
        features = Classifier.features(self, x)
        node: Any = features.grad_fn
        if node is not None:
            getattr(node.next_functions[0][0] if self.far else node, self.name)(self.hook)
        return features


def clamp_first(*gradients: Any) -> Any:
    return tuple(each if each is None else each.clamp(-1e3, 1e3) for each in gradients[0])


def clamp(gradient: Tensor) -> Tensor:
    """Too wide for any gradient here."""
    return gradient.clamp(-1e3, 1e3)


def in_place(gradient: Tensor) -> None:
    gradient.mul_(1.0)


def look(*_: Any) -> None:
    pass


def run(model: nn.Module) -> None:
    with refuse_changing_hooks(model):
        torch.autograd.grad(model(**vectors(2, 1))[0], list(model.parameters()))


@pytest.mark.parametrize(
    "model",
    [
        Hooked(clamp),
        of_a_parameter(clamp),
        of_a_parameter(in_place),
        of_a_module(lambda m, i, o: (2 * i[0],)),
        OnNode("register_prehook", clamp_first),
        OnNode("register_hook", clamp_first),
        OnNode("register_hook", clamp_first, far=True),
    ],
    ids=["tensor", "parameter", "in place", "module", "before a node", "after a node", "a node further on"],
)
def test_a_hook_that_changes_gradients_is_refused(model: nn.Module) -> None:
    with pytest.raises(
        CaptureError, match=r"the hook .*(clamp|in_place|lambda).* \(test_gradient_hooks.py, line \d+\)"
    ):
        run(model)


class OnSeveral(Hooked):
    """A hook on gradients of several tensors, which cannot change them but in place."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if features.requires_grad:
            halves = features.chunk(2, dim=1)
            torch.autograd.graph.register_multi_grad_hook(halves, self.hook)
            return torch.cat(halves, dim=1)
        return features


@pytest.mark.parametrize(
    "model",
    [
        Hooked(look),
        Hooked(lambda g: g),
        of_a_parameter(look),
        of_a_module(look),
        OnNode("register_hook", look),
        OnSeveral(look),
    ],
    ids=range(6),
)
def test_a_hook_that_looks_is_not(model: nn.Module) -> None:
    run(model)
    assert all(hook in (look, clamp) for hook in (model.head._backward_hooks or {}).values()), "they are put back"


def test_a_hook_on_several_gradients_that_changes_them_is_refused() -> None:
    def scale(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(1.0)

    with pytest.raises(CaptureError, match="the hook .* changes gradients on their way"):
        run(OnSeveral(scale))


class Walker(Classifier):
    """Looks at the whole graph, each node once: there are 2^40 ways to its end."""

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        for _ in range(40):
            features = 0.5 * features + 0.5 * features
        seen, waiting = set(), [features.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [source for source, _ in node.next_functions]
        return features


def test_a_walk_through_the_graph_ends() -> None:
    model, batch = Walker(layers=1), vectors(4, 1)
    check_gradients(model, Normalize().apply(capture(model, (batch, vectors(3, 2)), granule=1)), batch, batch)


class Adversary(Classifier):
    """Its head judges in one term, and learns nothing from it."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x, y)
        self.head.requires_grad_(False)
        judged = self.head(self.features(x)).square().sum()
        self.head.requires_grad_(True)
        return loss + judged, count


def test_parameters_that_forward_switches_off_are_named() -> None:
    model, batch = Adversary(layers=1), vectors(4, 1)
    with pytest.raises(CaptureError, match="forward switches requires_grad, .*functional_call with detached"):
        check_gradients(model, Normalize().apply(capture(model, (batch, vectors(3, 2)), granule=1)), batch, batch)


class OnAccumulation(Classifier):
    """A hook on the node that adds up a parameter's gradient, as DDP has them; it bites for large gradients alone."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__(layers=1)
        weight = self.head.weight
        self.node: Any = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.node.register_prehook(hook)


@pytest.mark.parametrize("hook", [clamp_first, lambda grads: tuple(g * (g.abs() > 1e-5) for g in grads)])
def test_a_hook_that_nobody_sees_bites_at_another_size(hook: Callable[..., Any]) -> None:
    model = OnAccumulation(hook)
    batch = vectors(4, 1)
    program = Normalize().apply(capture(model, (batch, vectors(3, 2)), granule=1))
    with pytest.raises(CaptureError, match=r"times the gradient of head.weight: what goes backward .* clip_norm"):
        check_gradients(model, program, batch, batch)
    other = OnAccumulation(lambda grads: None)
    check_gradients(other, Normalize().apply(capture(other, (batch, vectors(3, 2)), granule=1)), batch, batch)


def test_a_hook_after_accumulation_is_refused() -> None:
    model = Classifier(layers=1)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(CaptureError, match=r"head.weight has the hook .* by register_post_accumulate_grad_hook"):
        capture(model, (vectors(2, 1), vectors(3, 2)), granule=1)


class Recording(Classifier):
    """Keeps something of its gradients, in the way of `write`; forward reads it."""

    seen: Tensor

    def __init__(self, write: Callable[[Recording, Tensor], object]) -> None:
        super().__init__(layers=1)
        self.register_buffer("seen", torch.zeros(()))

        def hook(gradient: Tensor) -> None:
            write(self, gradient)

        self.head.weight.register_hook(hook)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * (1 + self.seen)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda model, gradient: model.seen.copy_(gradient.norm()), "seen"),
        (lambda model, gradient: setattr(model, "seen", gradient.norm().detach()), "seen"),
        (lambda model, gradient: model.head.weight.data.clamp_(-0.1, 0.1), "head.weight"),
        (lambda model, gradient: model.layers[0].norm.bias.data.add_(0.1), "layers.0.norm.bias"),
    ],
    ids=["a buffer", "another buffer", "its weight", "another weight"],
)
def test_what_the_backward_pass_writes_is_refused(write: Callable[[Recording, Tensor], object], name: str) -> None:
    with pytest.raises(CaptureError, match=f"the backward pass of Recording writes {name}, by a hook or an autograd.F"):
        checked(Recording(write))


def checked(model: nn.Module) -> tuple[str, ...]:
    batch = vectors(4, 1)
    program = Normalize().apply(capture(model, (batch, vectors(6, 2)), granule=2))
    return check_gradients(model, program, batch, vectors(4, 2))


class Follows(nn.Module):
    """A moving average of what comes by."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1)
        return x


class Checkpointed(Classifier):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__(layers=1)
        self.inner, self.use_reentrant = inner, use_reentrant

    def features(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, super().features(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_updates_twice_is_told(use_reentrant: bool) -> None:
    (line,) = checked(Checkpointed(nn.BatchNorm1d(WIDTH), use_reentrant))
    assert line == "model: inner.running_mean is updated once a step, where a checkpoint in PyTorch updates it twice"
    with pytest.raises(CaptureError, match="runs what updates inner.0.mean once more in the backward pass; "):
        checked(Checkpointed(nn.Sequential(Follows(), nn.Tanh()), use_reentrant))
