"""choose_kernels: in joint graphs, replace calls for which the native library has a faster kernel.

    gelu(x, approximate="tanh")                   =>    elaswave.gelu_tanh(x)
    gelu_backward(dy, x, approximate="tanh")      =>    elaswave.gelu_tanh_backward(dy, x)

Only fp32 on the CPU: at width 64 torch's GELU was a tenth of the time of a transformer block, mostly in tanh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from elaswave_fx.passes.differentiate import rewrite_joints
from elaswave_fx.program import keyed_draws  # noqa: F401  registers torch.ops.elaswave
from elaswave_fx.program.ir import Program, argument, calls, copy_graph, emit, is_aten, value_of

_KERNELS: dict[str, tuple[Any, int]] = {
    "aten.gelu": (torch.ops.elaswave.gelu_tanh.default, 1),
    "aten.gelu_backward": (torch.ops.elaswave.gelu_tanh_backward.default, 2),
}
"""Operator with an argument `approximate` -> our kernel for "tanh", and its number of tensor inputs."""


@dataclass(frozen=True)
class ChooseKernels:
    """Call native kernels where they are faster; results agree to rounding."""

    name: ClassVar[str] = "choose_kernels"

    def apply(self, program: Program) -> Program:
        return rewrite_joints(program, self.name, with_own_kernels)


def with_own_kernels(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a functional graph that calls our kernels."""
    module = copy_graph(module)
    graph = module.graph
    for node in list(calls(graph)):
        name = next((name for name in _KERNELS if is_aten(node, name)), None)
        if name is None or value_of(node).dtype != torch.float32 or argument(node, "approximate", "none") != "tanh":
            continue
        kernel, reads = _KERNELS[name]
        with graph.inserting_before(node):
            ours = emit(graph, kernel, *node.args[:reads], like=node)
        node.replace_all_uses_with(ours)
        graph.erase_node(node)
    module.recompile()
    return module
