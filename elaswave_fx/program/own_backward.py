"""Check that the backward of a user's autograd.Function is the derivative of its forward, also far from the first
samples.

The backward pass is derived from the calls of forward. A Function may differ from it only for large inputs or
gradients, like the truncated exponential of radiance fields, so it is tried on scaled inputs.

    exp(x), with a gradient of exp(min(x, 15))  ->  CaptureError: the backward of TruncExp is not the derivative …
    x, with its gradient between -1 and 1       ->  CaptureError
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.state_kept import SEED

WAY_OUT = "write it with tensor operators and detach(), or as a torch.library.custom_op with register_autograd"
_FACTORS = (1.0, -1.0, 1e-3, 4.0, -4.0, 16.0, -16.0, 64.0, -64.0, 1e3, -1e3)
"""Factors of inputs."""
_TANGENTS = (1.0, 1e-4, 1e4)
_IGNORED = -100
"""The label of what does not count, by PyTorch's default."""
_TOLERANCE, _TOLERANCE_ROUNDED = 1e-4, 1e-2
"""Tolerances in double precision, and in the call's own precision."""
_MOST_CALLS = 128
_LABELS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Call:
    """A call of a Function: its arguments, and which of them are differentiated."""

    function: type[Function]
    args: tuple[Any, ...]
    differentiated: tuple[int, ...]

    @property
    def key(self) -> str:
        """Key of equivalent calls, which are tried once."""
        args = [repr(arg) if self._is_option(i, arg) else f"{arg.dtype}{tuple(arg.shape)}"
                for i, arg in enumerate(self.args)]  # fmt: skip
        return f"{self.function.__qualname__}{args}{self.differentiated}"

    def labels_ignored(self) -> list[int]:
        """Numbers that, as a label, may say that something does not count: that of PyTorch, and integer arguments."""
        if not any(_is_labels(arg) for arg in self.args):
            return []
        if not _agrees(self, _Trial(exchanged=True)):
            return []  # of places that belong together, such as an order and its inverse
        return [_IGNORED, *(arg for arg in self.args if isinstance(arg, int) and not isinstance(arg, bool))]

    def _is_option(self, place: int, arg: Any) -> bool:
        """Whether an argument decides what the call computes by its value: a number, also in a tensor."""
        return not isinstance(arg, Tensor) or (arg.numel() == 1 and place not in self.differentiated)


@dataclass(frozen=True)
class _Trial:
    """Other numbers for a call: factors of its inputs and of the gradients of its results, and a label for half of what
    it has labels of, or labels of others for all."""

    factor: float = 1.0
    tangent: float = 1.0
    label: int | None = None
    exchanged: bool = False

    def __str__(self) -> str:
        if self.label is not None:
            return f", tried with labels of {self.label}"
        if self.factor == self.tangent == 1:
            return ""
        return f", tried on {self.factor:g} times the inputs and with gradients of about {self.tangent:g}"


def own_functions(loss: Tensor) -> list[type[Function]]:
    """The autograd.Functions on the backward path of a loss, without those of torch itself."""
    found: dict[type[Function], None] = {}
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch."):
            found[function] = None
        stack.extend(source for source, _ in node.next_functions)
    return list(found)


@contextlib.contextmanager
def recorded_calls(functions: Sequence[type[Function]]) -> Iterator[dict[str, Call]]:
    """Record calls of these functions. Forward records them, as `apply` may be aliased."""
    found: dict[str, Call] = {}
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(mock.patch.object(function, "forward", staticmethod(_recording(function, found))))
        yield found


def _recording(function: type[Function], found: dict[str, Call]) -> Any:
    forward = function.forward

    def record(*given: Any, **named: Any) -> Any:
        args = given if _sets_up_apart(function) else given[1:]
        if not named and len(found) < _MOST_CALLS:
            kept = tuple(arg.detach().clone() if _is_computed(arg) else arg for arg in args)
            asked = tuple(i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad)
            call = Call(function, kept, asked)
            found.setdefault(call.key, call)
        return forward(*given, **named)

    return record


def _is_computed(arg: Any) -> bool:
    """Whether an argument is a tensor but no parameter, which forward may read otherwise too: of a layer that it is
    given."""
    return isinstance(arg, Tensor) and not isinstance(arg, nn.Parameter)


def refuse_other_backward(calls: Sequence[Call]) -> None:
    """Raise CaptureError for a Function whose backward differs from the derivative of its forward somewhere."""
    for call in calls:
        scaled = [_Trial(factor, tangent) for factor in _FACTORS for tangent in _TANGENTS]
        for trial in (*scaled, *(_Trial(label=label) for label in call.labels_ignored())):
            if not _agrees(call, trial):
                raise CaptureError(
                    f"model: the backward of {call.function.__name__} is not the derivative of its forward{trial}: "
                    f"{WAY_OUT}"
                )


def _agrees(call: Call, trial: _Trial) -> bool:
    """Whether both ways agree wherever both are finite; True if one of them fails."""
    for dtype in (torch.float64, None):
        try:
            ours = _gradients(call, trial, dtype, by_forward=True)
            theirs = _gradients(call, trial, dtype, by_forward=False)
        except Exception:  # noqa: BLE001 - a Function may refuse such numbers, or their dtype, in any way
            continue
        rounds = dtype is None
        return all(_is_close(a, b, rounds) for a, b in zip(ours, theirs, strict=True))
    return True


def _is_close(ours: Tensor, theirs: Tensor, rounds: bool) -> bool:
    ours, theirs = ours.double(), theirs.double()
    known = ours.isfinite() & theirs.isfinite()
    ours, theirs = torch.where(known, ours, 0.0), torch.where(known, theirs, 0.0)
    largest = torch.maximum(ours.abs(), theirs.abs())
    relative, floor = (_TOLERANCE_ROUNDED, 1e-3) if rounds else (_TOLERANCE, 1e-9)
    allowed = relative * largest + floor * (float(largest.max()) if largest.numel() else 0.0)
    return bool(((ours - theirs).abs() <= allowed).all())


def _gradients(call: Call, trial: _Trial, dtype: torch.dtype | None, *, by_forward: bool) -> list[Tensor]:
    parameters = {arg: arg.data for arg in call.args if isinstance(arg, nn.Parameter)}
    try:
        return _gradients_near(call, trial, dtype, by_forward)
    finally:
        for parameter, data in parameters.items():
            parameter.data = data


def _gradients_near(call: Call, trial: _Trial, dtype: torch.dtype | None, by_forward: bool) -> list[Tensor]:
    """Gradients at the arguments of a trial. Of parameters the data changes, which other readers see too."""
    generator = torch.Generator().manual_seed(SEED)
    leaves: dict[int, Tensor] = {}
    args = list(call.args)
    for i, arg in enumerate(call.args):
        if _is_labels(arg):
            args[i] = _other_labels(arg, trial, generator)
        if not isinstance(arg, Tensor) or not (arg.is_floating_point() or arg.dtype == torch.bool):
            continue
        value = arg.detach()
        if trial.factor != 1 and i not in call.differentiated and _is_mask(arg):
            value = (torch.rand(arg.shape, generator=generator) < 0.5).to(arg.dtype)  # it may be of ones at first
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        if i in call.differentiated:
            near = 0.01 * torch.randn(arg.shape, generator=generator, dtype=torch.float64)  # away from kinks at 0
            value = trial.factor * (value + near.to(value.dtype))
        if isinstance(arg, nn.Parameter):
            arg.data = value
        else:
            args[i] = value.requires_grad_(i in call.differentiated)
        if i in call.differentiated:
            leaves[i] = args[i]
            args[i] = args[i] if isinstance(arg, nn.Parameter) else value.clone()  # a Function may write its argument
    torch.manual_seed(SEED)
    with torch.enable_grad():
        found = _forward(call.function, args) if by_forward else call.function.apply(*args)
        outputs = [each for each in (found if isinstance(found, tuple) else (found,)) if isinstance(each, Tensor)]
        tangents = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in outputs]
        pairs = [
            (each, (trial.tangent * t).to(each.dtype))
            for each, t in zip(outputs, tangents, strict=True)
            if each.requires_grad
        ]
        if not pairs:
            return [torch.zeros_like(leaf) for leaf in leaves.values()]
        grads = torch.autograd.grad(
            [each for each, _ in pairs], list(leaves.values()), [t for _, t in pairs], allow_unused=True
        )
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), grads, strict=True)]


def _is_labels(arg: Any) -> bool:
    """Whether an argument is a tensor of integers, which no gradient reaches."""
    return isinstance(arg, Tensor) and arg.numel() > 1 and arg.dtype in _LABELS


def _other_labels(labels: Tensor, trial: _Trial, generator: torch.Generator) -> Tensor:
    if trial.exchanged:
        return labels.flatten()[torch.randperm(labels.numel(), generator=generator)].view(labels.shape)
    if trial.label is None:
        return labels
    return torch.where(torch.rand(labels.shape, generator=generator) < 0.5, trial.label, labels)


def _is_mask(arg: Tensor) -> bool:
    return arg.numel() > 1 and not isinstance(arg, nn.Parameter) and bool(((arg == 0) | (arg == 1)).all())


def _forward(function: type[Function], args: Sequence[Any]) -> Any:
    """Forward's calls, recorded by autograd like any other code. A no_grad() among them says what `apply` does anyway,
    and is passed over."""
    with mock.patch.object(torch._C, "_set_grad_enabled", lambda _: None):
        return function.forward(*args) if _sets_up_apart(function) else function.forward(_Context(len(args)), *args)


def _sets_up_apart(function: type[Function]) -> bool:
    """Whether forward gets no `ctx`."""
    return function.setup_context is not Function.setup_context


class _Context:
    """Replacement of a forward's `ctx` whose backward is never called."""

    def __init__(self, arguments: int) -> None:
        self.needs_input_grad = (True,) * arguments

    def save_for_backward(self, *_: Any) -> None: ...

    def save_for_forward(self, *_: Any) -> None: ...

    def mark_dirty(self, *_: Any) -> None: ...

    def mark_non_differentiable(self, *_: Any) -> None: ...

    def set_materialize_grads(self, _: bool) -> None: ...
