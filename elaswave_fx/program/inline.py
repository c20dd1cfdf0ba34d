"""Inlining: the higher-order wrappers that an export leaves around parts of the forward pass.

A body keeps what its wrapper meant:

    before: wrap_with_set_grad_enabled(False, body, x);  after: y = detach(body's calls on x)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.ir import calls, emit, module_of, value_of

_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")


def inline_wrappers(module: fx.GraphModule) -> None:
    """Replace wrap_with_set_grad_enabled and its like by their bodies; results of a no-grad body are detached.

    This is done on the captured graph while it still owns the bodies, before anything is copied.
    """
    for node in list(calls(module.graph)):
        name = getattr(node.target, "__name__", "")
        if name not in _WRAPPERS:
            continue
        position = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        body_node = node.args[position]
        assert isinstance(body_node, fx.Node)
        body = getattr(module, str(body_node.target))
        detach = name == "wrap_with_set_grad_enabled" and not node.args[0]
        with module.graph.inserting_before(node):
            outputs = _copy_body(module.graph, body, node.args[position + 1 :], detach)
        for user in list(node.users):
            user.replace_all_uses_with(outputs[int(user.args[1])])  # type: ignore[arg-type]
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        module.graph.erase_node(body_node)
    module.recompile()


def _copy_body(graph: fx.Graph, body: fx.GraphModule, args: tuple[Any, ...], detach: bool) -> list[Any]:
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    mapping: dict[fx.Node, Any] = dict(zip(inputs, args, strict=True))
    outputs = graph.graph_copy(body.graph, mapping)
    for old, new in mapping.items():
        if isinstance(new, fx.Node) and old.op == "call_function":
            new.meta = dict(old.meta)
    results = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    return [emit(graph, torch.ops.aten.detach.default, out) if detach and _is_float(out) else out for out in results]


def _is_float(node: Any) -> bool:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def refuse_control_flow(graph: fx.Graph) -> None:
    """Raise CaptureError for what cannot be inlined: a branch or a loop that the data decides on."""
    for node in calls(graph):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"model: {node.target} in {module_of(node)} is a control-flow operator; it cannot be cut; a way out is "
                "to compute both branches and choose with torch.where"
            )
