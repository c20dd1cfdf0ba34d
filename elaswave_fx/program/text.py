"""Stable text of graphs and programs: no addresses, no set order, names by position.

A call per line, its type at the end:

    %3 = aten.linear(%2, param blocks.0.fc.weight)                       float32 [B, 64, 512]
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from elaswave_fx.program.ir import Program, output_nodes, placeholders, source_of, value_of

_SYMBOL = re.compile(r"\bs\d+\b")


def shape_text(value: Any) -> str:
    """dtype and shape of a value; the batch size is written B."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(_SYMBOL.sub("B", str(size)) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(shape_text(item) for item in value) + ")"
    return "int" if isinstance(value, (int, torch.SymInt)) else type(value).__name__


def graph_text(module: fx.GraphModule) -> str:
    """One line per call: number, operator, arguments, type."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in placeholders(module.graph):
        source = node.meta.get("elaswave_source")
        names[node] = f"{source.role.value} {source.name}".strip() if source else node.name
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        names[node] = f"%{len(names)}"
        call = f"{names[node]} = {_target(node)}({_arguments(node, names)})"
        lines.append(f"  {call:<96} {shape_text(value_of(node))}".rstrip())
    returned = ", ".join("none" if node is None else names[node] for node in output_nodes(module.graph))
    return "\n".join([*lines, f"  return {returned}"]) + "\n"


def _target(node: fx.Node) -> str:
    target: Any = node.target
    return str(target).removesuffix(".default") if isinstance(target, torch._ops.OpOverload) else target.__name__


def _arguments(node: fx.Node, names: dict[fx.Node, str]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(text, value)) + "]"
        return str(value)

    return ", ".join([*map(text, node.args), *(f"{key}={text(value)}" for key, value in sorted(node.kwargs.items()))])


def program_text(program: Program) -> str:
    """Units in order: their inputs and outputs, and the graph of every distinct kind once."""
    kinds = {unit.kind for unit in program.units}
    lines = [f"program: {len(program.units)} units of {len(kinds)} kinds, granule {program.granule}"]
    if program.batch_coupled:
        lines.append("batch-coupled: " + "; ".join(program.batch_coupled))
    seen: dict[str, int] = {}
    for unit in program.units:
        lines.append(f"\nunit {unit.index}")
        lines.append(
            "  reads  "
            + ", ".join(f"{s.role.value} {s.name}".strip() for s in map(source_of, placeholders(unit.graph.graph)))
        )
        lines.append("  gives  " + ", ".join(f"{r.kind.value} {r.name}".strip() for r in unit.results))
        if unit.kind in seen:
            lines.append(f"  same kind as unit {seen[unit.kind]}")
            continue
        seen[unit.kind] = unit.index
        lines.append(graph_text(unit.graph).rstrip())
    for value in program.values:
        axis = "whole micro-batch" if value.sample_axis is None else f"samples on axis {value.sample_axis.axis}"
        dtype = str(value.dtype).removeprefix("torch.")
        lines.append(
            f"value {value.name}: unit {value.producer} -> {list(value.consumers)}, {dtype} {list(value.shape)}, {axis}"
        )
    return "\n".join(lines) + "\n"
