"""Hooks on gradients: a captured program has none, so hooks that would change something are refused by name.

weight.register_post_accumulate_grad_hook(step_at_once)     -> CaptureError, it would never be called
h.register_hook(lambda g: g.clamp(-1, 1))                   -> CaptureError, also where no gradient is that large
h.register_hook(norms.append)                               -> nothing: it only looks
h.grad_fn.register_prehook(...)                             -> as those of tensors
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.modules.module as module_hooks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.forward_code import is_part_of_torch_or_python
from elaswave_fx.program.held_state import try_forward
from elaswave_fx.program.own_backward import WAY_OUT


def refuse_hooks_after_accumulation(model: nn.Module) -> None:
    """Raise CaptureError for a hook that torch would call when a parameter's gradient is complete."""
    for hook in (*module_hooks._global_backward_hooks.values(), *module_hooks._global_backward_pre_hooks.values()):
        raise CaptureError(
            f"model: the hook {_words(hook)} is registered for all modules, and the captured graph has none; a way out "
            "is not to register it"
        )
    for name, parameter in model.named_parameters():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
            raise CaptureError(
                f"model: {name} has the hook {_words(hook)} by register_post_accumulate_grad_hook, which would never "
                "be called: gradients are summed over micro-batches and ranks; a way out is clip_norm, or an optimizer "
                "of your own (optimizer._target_)"
            )


@contextlib.contextmanager
def refuse_changing_hooks(model: nn.Module) -> Iterator[None]:
    """Raise CaptureError on exit if a hook that ran inside has changed a gradient, however little."""
    changing: list[Callable[..., Any]] = []

    def watched(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            versions = [tensor._version for tensor in given]
            result = hook(*args, **kwargs)
            made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
            kept = all(any(value is tensor for tensor in given) for value in made)
            if not kept or [tensor._version for tensor in given] != versions:
                changing.append(hook)
            return result

        return call

    register = torch.Tensor.register_hook
    get_node: Any = torch.Tensor.grad_fn.__get__  # type: ignore[attr-defined]

    class Nodes(TorchFunctionMode):
        """Hands watched nodes to forward where it reads a tensor's grad_fn."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return _WatchedNode(found, watched) if func == get_node and found is not None else found

    node_of = torch.autograd.graph._get_grad_fn_or_grad_acc

    def own_node(tensor: Any) -> Any:
        """For register_multi_grad_hook, which asks the engine; its hooks are watched as those of tensors."""
        node = node_of(tensor)
        asks_engine = sys._getframe(1).f_code is torch.autograd.graph.register_multi_grad_hook.__code__
        return node._node if asks_engine and isinstance(node, _WatchedNode) else node

    with contextlib.ExitStack() as stack:
        for hooks in _hooks_of(model):
            stack.callback(hooks.update, dict(hooks))
            hooks.update({key: watched(hook) for key, hook in hooks.items()})
        stack.enter_context(
            mock.patch.object(torch.Tensor, "register_hook", lambda tensor, hook: register(tensor, watched(hook)))
        )
        stack.enter_context(mock.patch.object(torch.autograd.graph, "_get_grad_fn_or_grad_acc", own_node))
        stack.enter_context(Nodes())
        yield
    if changing:
        raise CaptureError(
            f"model: the hook {_words(changing[0])} changes gradients on their way, but they are derived from the "
            f"captured graph, which has no hooks; a way out is to {WAY_OUT}; clip_norm bounds gradients"
        )


def note_of_hooks_on_saved_tensors(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """A line on hooks of the model's own on what autograd saves, such as a compression: a program saves as it is."""
    found: list[str] = []
    enter = saved_tensors_hooks.__enter__

    def record(hooks: saved_tensors_hooks) -> None:
        code = getattr(hooks.pack_hook, "__code__", None)
        if code is None or not is_part_of_torch_or_python(Path(code.co_filename), hooks.pack_hook.__globals__):
            found.append(_words(hooks.pack_hook))
        enter(hooks)

    try_forward(model, batch, mock.patch.object(saved_tensors_hooks, "__enter__", record))
    return (f"model: saved_tensors_hooks {found[0]} is not applied: saved tensors stay unchanged",) if found else ()


class _WatchedNode:
    """A node of autograd's graph whose hooks are watched."""

    def __init__(self, node: Any, watched: Callable[..., Any]) -> None:
        self._node = node
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node == (other._node if isinstance(other, _WatchedNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)  # a walk of the graph meets a node again

    @property
    def next_functions(self) -> Any:
        found = self._node.next_functions
        return tuple((node and _WatchedNode(node, self._watched), number) for node, number in found)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        return self._node.register_hook(self._watched(hook))

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        return self._node.register_prehook(self._watched(hook))


def _hooks_of(model: nn.Module) -> Iterator[MutableMapping[int, Callable[..., Any]]]:
    for module in model.modules():
        yield from (module._backward_hooks, module._backward_pre_hooks)
    for parameter in model.parameters():
        if parameter._backward_hooks:
            yield parameter._backward_hooks


def _words(hook: Any) -> str:
    """A function's name and its location."""
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code is not None else name
