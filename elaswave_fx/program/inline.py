"""Inlining of the higher-order wrappers that an export leaves around parts of the forward pass.

A body keeps the effect of its wrapper:

    before: wrap_with_set_grad_enabled(False, body, x);  after: y = body's calls on detach(x)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import calls, emit, module_of, placeholders, value_of

_GRAD_MODE, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def inline_grad_modes(module: fx.GraphModule) -> None:
    """Replace torch.no_grad() and similar modes by calls on detached arguments. This comes before decompositions, which
    lose the mode around a body that changes a buffer."""
    for node in [node for node in calls(module.graph) if _name(node) in (_GRAD_MODE, _AUTOCAST)]:
        body = _body(module, node)
        for taken, given in zip(placeholders(body.graph), node.args[_position(node) + 1 :], strict=True):
            taken.meta["val"] = value_of(given) if isinstance(given, fx.Node) else given
        inline_grad_modes(body)
        if _name(node) == _GRAD_MODE:
            _inline(module, node, body, detach=not node.args[0])
    module.recompile()


def inline_autocast(module: fx.GraphModule) -> None:
    """Replace wrap_with_autocast by its body, in which casts are calls since the decompositions. This works on the
    captured graph while it still owns the bodies, before any copy."""
    for node in [node for node in calls(module.graph) if _name(node) == _AUTOCAST]:
        body = _body(module, node)
        inline_autocast(body)
        _inline(module, node, body, detach=False)
    module.recompile()


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _position(node: fx.Node) -> int:
    return next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    return getattr(module, str(node.args[_position(node)].target))  # type: ignore[union-attr]


def _inline(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, detach: bool) -> None:
    position = _position(node)
    body_node = node.args[position]
    assert isinstance(body_node, fx.Node)
    with module.graph.inserting_before(node):
        outputs = _copy_body(module, body, node.args[position + 1 :], detach)
    for user in list(node.users):
        user.replace_all_uses_with(outputs[int(user.args[1])])  # type: ignore[arg-type]
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not body_node.users:
        module.graph.erase_node(body_node)


def _copy_body(module: fx.GraphModule, body: fx.GraphModule, args: tuple[Any, ...], detach: bool) -> list[Any]:
    graph = module.graph
    given = [emit(graph, torch.ops.aten.detach.default, arg) if detach and _is_float(arg) else arg for arg in args]
    mapping: dict[fx.Node, Any] = dict(zip(placeholders(body.graph), given, strict=True))
    outputs = graph.graph_copy(body.graph, mapping)
    for old, new in mapping.items():
        if isinstance(new, fx.Node) and old.op == "call_function":
            new.meta = dict(old.meta)
        elif isinstance(new, fx.Node) and old.op == "get_attr":  # The body of a wrapper in this one.
            new.target = f"inlined_{new.name}"
            module.add_submodule(new.target, getattr(body, str(old.target)))
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _is_float(node: Any) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def refuse_control_flow(graph: fx.Graph) -> None:
    """Raise CaptureError for control flow that cannot be inlined: branches and loops that depend on data."""
    for node in calls(graph):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} is a control-flow operator; it cannot be cut; a way out is "
                "to compute both branches and choose with torch.where"
            )
