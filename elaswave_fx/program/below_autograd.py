"""Export of a model that takes derivatives in forward, such as force fields, gradient penalties and equation solvers.

    with refuse_derivatives():
        torch.export.export(wrapped, ...)              raises DerivativeInForward
    export_below_autograd(wrapped, inputs, shapes)     the graph has the calls of the inner backward passes too

torch.export traces above autograd, where a call of autograd.grad or torch.func.grad has no operators. Tracing below it
sees all operators, but neither torch.no_grad() nor the origin of a detach: the engine itself detaches tensors saved for
a backward pass and reattaches them to the graph. The model's own detaches, and what enters a no_grad(), are therefore
traced as calls of a separate operator, and other detaches are removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._functorch import eager_transforms
from torch.export import ExportedProgram, _trace
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from elaswave_fx.program.eager_answers import in_own_function
from elaswave_fx.program.exportable import Exportable

_DETACH = torch.Tensor.detach
_GRAD = torch.autograd.grad
BACKWARD = "forward calls backward(), which leaves gradients in parameters"
if not hasattr(torch.ops.elaswave_fx_capture, "detach"):  # The operator survives a re-import of the module.
    torch.library.define("elaswave_fx_capture::detach", "(Tensor x) -> Tensor")
    torch.library.impl("elaswave_fx_capture::detach", "CompositeExplicitAutograd", torch.clone)
_MARKED = torch.ops.elaswave_fx_capture.detach.default


class DerivativeInForward(RuntimeError):
    """Raised where forward takes a derivative during an export above autograd."""


@contextlib.contextmanager
def refuse_derivatives() -> Iterator[None]:
    """Raise DerivativeInForward inside the context where forward takes one, by torch.autograd or torch.func."""
    with (
        mock.patch("torch.autograd.grad", _refuse),
        mock.patch.object(eager_transforms, "grad_increment_nesting", _refuse),
        mock.patch.object(eager_transforms, "jvp_increment_nesting", _refuse),
        mock.patch("torch.autograd.backward", _refuse_backward),
    ):
        yield


def export_below_autograd(wrapped: Exportable, inputs: Sequence[torch.Tensor], shapes: Any) -> ExportedProgram:
    """A functional graph like that of torch.export.export, with the calls that autograd makes."""
    with (
        wrapped.recorded(_SeesNoGrad()),
        mock.patch("torch.autograd.grad", _gradient),
        mock.patch("torch.autograd.backward", _refuse_backward),
        mock.patch.object(torch.Tensor, "detach", _detached),
        mock.patch("torch.detach", _detached),
    ):
        exported = _trace._export(wrapped, tuple(inputs), dynamic_shapes=shapes, strict=False, pre_dispatch=False)
    for node in list(exported.graph.nodes):
        if node.target == torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            exported.graph.erase_node(node)
        elif node.target == _MARKED:
            node.target = torch.ops.aten.detach.default
    return exported


class _SeesNoGrad(TorchFunctionMode):
    """Detaches the arguments of calls under no_grad(), but for those that a call writes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() or in_own_function():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        written = args[:1] if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else ()
        read, kwargs = tree_map_only(torch.Tensor, _detached_if_recorded, (args[len(written) :], kwargs))
        return func(*written, *read, **kwargs)


def _detached_if_recorded(tensor: torch.Tensor) -> torch.Tensor:
    return _detached(tensor) if tensor.requires_grad else tensor


def _refuse(*_: Any, **__: Any) -> Any:
    raise DerivativeInForward


def _refuse_backward(*_: Any, **__: Any) -> Any:
    raise RuntimeError(BACKWARD)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return _MARKED(_DETACH(tensor))


def _gradient(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    *more: Any, **options: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """torch.autograd.grad; without `create_graph` its result is detached."""
    found = _GRAD(outputs, inputs, grad_outputs, retain_graph, True, *more, **options)
    return found if create_graph else tuple(None if each is None else _detached(each) for each in found)
