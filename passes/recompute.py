"""recompute: split every joint graph into a forward and a backward program, and choose the values kept between them.

    none   keep every forward result that the backward pass reads
    light  keep results of products, attention and normalization; make elementwise results again
    full   keep only the unit's inputs; run its forward pass again

Views, keyed draws and casts of parameters are always recomputed: they cost nothing, or less than the memory that would
hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from elaswave_fx.passes.differentiate import Joint, joints_of
from elaswave_fx.passes.estimate_cost import VIEWS, view_base
from elaswave_fx.program.ir import Program, calls, is_aten, is_getitem, output_nodes, placeholders, value_of
from elaswave_fx.program.keyed_draws import DRAWS

_HEAVY = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "aten.native_layer_norm",
    "aten._native_batch_norm_legit", "aten.native_group_norm", "aten.embedding",
    "aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._log_softmax", "aten.max_pool2d_with_indices",
)  # fmt: skip
Policy = Literal["none", "light", "full"]


@dataclass(frozen=True)
class Halves:
    """A backward program in two, by the pass `split_backward`.

    inputs: (saved..., tangents...) -> (gradient per unit input or None, held...), of values alone;
    weights: (held...) -> gradient per unit input or None, of parameters alone; None if the unit trains none.
    `weights_share`: of the operations of both.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule | None
    num_held: int
    weights_share: float


@dataclass(frozen=True)
class Derivative:
    """One kind of unit, split.

    forward: unit inputs -> (results, saved...); backward: (saved..., tangents...) -> gradient or None per unit input.
    `num_saved` counts tensors and integers alike. `halves`: of the backward program, once it was split in its turn.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_saved: int
    halves: Halves | None = None


@dataclass(frozen=True)
class Recompute:
    """Trade memory against time between forward and backward."""

    name: ClassVar[str] = "recompute"
    policy: Policy = "none"

    def apply(self, program: Program) -> Program:
        joints = joints_of(program, self.name)
        return replace(program, kinds={kind: split(joint, self.policy) for kind, joint in joints.items()})


def split(joint: Joint, policy: Policy) -> Derivative:
    """Forward and backward graphs of a joint graph under a policy."""
    graph = joint.graph.graph
    inputs = placeholders(graph)
    outputs = output_nodes(graph)
    results, gradients = outputs[: joint.num_results], outputs[joint.num_results :]
    if all(gradient is None for gradient in gradients):
        return Derivative(extract(graph, inputs[: joint.num_inputs], results), None, 0)
    late = _after(inputs[joint.num_inputs :])
    saved = _saved(joint, [g for g in gradients if g is not None], late, policy)
    forward = extract(graph, inputs[: joint.num_inputs], [*results, *saved])
    backward = extract(graph, [*saved, *inputs[joint.num_inputs :]], gradients)
    return Derivative(forward, backward, len(saved))


def _after(tangents: list[fx.Node]) -> set[fx.Node]:
    found, stack = set(tangents), list(tangents)
    while stack:
        for user in stack.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _saved(joint: Joint, gradients: list[fx.Node], late: set[fx.Node], policy: Policy) -> list[fx.Node]:
    """Forward values that the backward graph starts from, in graph order."""
    ordered = placeholders(joint.graph.graph)[: joint.num_inputs]
    inputs, lasting = set(ordered), {node for node, lasts in zip(ordered, joint.lasting, strict=True) if lasts}
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = list(gradients)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in inputs or (node not in late and _keep(node, policy) and not _is_cast_of(node, lasting)):
            saved.add(node)
        else:
            stack.extend(node.all_input_nodes)
    tangents = set(placeholders(joint.graph.graph)[joint.num_inputs :])
    return [node for node in joint.graph.graph.nodes if node in saved and node not in tangents]


def _is_cast_of(node: fx.Node, lasting: set[fx.Node]) -> bool:
    return is_aten(node, "aten._to_copy") and view_base(node.args[0]) in lasting  # type: ignore[arg-type]


def _keep(node: fx.Node, policy: Policy) -> bool:
    """Whether a forward value is worth its memory between forward and backward."""
    value = value_of(node)
    if policy == "full" or isinstance(value, (tuple, list)):
        return False
    if not isinstance(value, torch.Tensor):
        return True  # a size takes negligible memory
    maker = node.args[0] if is_getitem(node) else node
    assert isinstance(maker, fx.Node)
    if is_aten(maker, *DRAWS, *VIEWS):
        return False
    return policy == "none" or is_aten(maker, *_HEAVY)


def extract(graph: fx.Graph, inputs: list[fx.Node], outputs: list[Any]) -> fx.GraphModule:
    """The calls that lead from `inputs` to `outputs`, in their order."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        mapping[node] = new.placeholder(node.name)
        mapping[node].meta["val"] = node.meta.get("val")
    needed: set[fx.Node] = set()
    stack = [node for node in outputs if node is not None]
    while stack:
        node = stack.pop()
        if node not in mapping and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in calls(graph):
        if node in needed:
            mapping[node] = new.node_copy(node, lambda n: mapping[n])
    new.output(tuple(mapping[node] if node is not None else None for node in outputs))
    return fx.GraphModule(torch.nn.Module(), new)
