"""A wrapper that lets torch.export take any model, whatever its names and reassigned buffers.

    wrapped = Exportable(model, ("lambda", "x"))
    torch.export.export(wrapped, (tensor, tensor), ...)     # with `any_names()` around it
    own_name("model.layers.0.code")  ->  "layers.0.code"

torch.export copies parameters and modules onto a GraphModule, which has attributes of its own (code, graph, meta), and
writes code in which a name is `self.NAME`, so that it must not be a keyword. The single prefix `model` avoids the
clash; keywords are corrected where the code is written. Inputs are positional.
"""

from __future__ import annotations

import contextlib
import keyword
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from elaswave_fx.errors import CaptureError

_OWN = "model"


class Exportable(nn.Module):
    """`model` as its only submodule; the fields of a batch are positional arguments, in the order of `fields`."""

    def __init__(self, model: nn.Module, fields: Sequence[str]) -> None:
        super().__init__()
        self.add_module(_OWN, model)
        self._fields = tuple(fields)
        self._mode: TorchFunctionMode | None = None

    @contextlib.contextmanager
    def recorded(self, mode: TorchFunctionMode) -> Iterator[None]:
        """Record autograd as in training, with the model's calls under `mode`; an export disables gradients for its
        results."""
        self._mode = mode
        try:
            yield
        finally:
            self._mode = None

    def forward(self, *inputs: torch.Tensor) -> Any:
        first, *others = (tensor.shape[0] for tensor in inputs)
        for other in others:  # inputs that never meet would have separate batch sizes
            torch._check(other == first)
        model = self.get_submodule(_OWN)
        before = _buffers(model)
        named = dict(zip(self._fields, inputs, strict=True))
        if self._mode is not None:
            with torch.enable_grad(), self._mode:
                output = tree_map_only(torch.Tensor, torch.ops.aten.detach.default, model(**named))
        else:
            output = model(**named)
        _write_reassigned(model, before)
        return output


def own_name(name: str) -> str:
    """The model's own name of an `Exportable`'s parameter, buffer, constant or module; '' for the model itself."""
    return "" if name == _OWN else name.removeprefix(f"{_OWN}.")


def restore_module_names(graph: fx.Graph) -> None:
    """Restore the model's own module names on the nodes of an exported graph."""
    for node in graph.nodes:
        stack: Mapping[str, Any] | None = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {key: (own_name(name), kind) for key, (name, kind) in stack.items()}


@contextlib.contextmanager
def any_names() -> Iterator[None]:
    """Make torch.fx write valid code for any names of modules and parameters."""
    with mock.patch("torch.fx.graph._format_target", _format_target):
        yield


def _format_target(base: str, target: str) -> str:
    """Python text for a nested attribute; torch's own does not quote keywords."""
    for name in target.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
    return base


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
    return [(module, name, tensor) for module in model.modules() for name, tensor in module._buffers.items()]


def _write_reassigned(model: nn.Module, before: list[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
    """Turn `self.steps = self.steps + 1` into an update in place: an export drops plain assignments."""
    names = {id(module): name for name, module in model.named_modules()}
    for module, name, tensor in before:
        now = module._buffers.get(name)
        if tensor is None or now is None or now is tensor:
            continue
        if (now.shape, now.dtype) != (tensor.shape, tensor.dtype):
            full = f"{names[id(module)]}.{name}".removeprefix(".")
            raise CaptureError(
                f"model: forward makes the buffer '{full}' {_described(now)}, it was {_described(tensor)}; a buffer "
                "keeps its shape and dtype"
            )
        tensor.copy_(now)
        module._buffers[name] = tensor


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
