"""Numbers and sizes that depend on values of tensors, such as how many are positive: no unit can give them to another,
and no derivative goes through them.

    number_of_values(graph, "…")   ->  "model: aten.nonzero.default in body makes a number or a size of …"
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from elaswave_fx.program.ir import calls, is_aten, module_of, value_of

_WAYS_OUT = {
    "aten.item": "to keep it a tensor: table.index_select(0, index.reshape(1)) for table[index]",
    "aten._local_scalar_dense": "to keep it a tensor: table.index_select(0, index.reshape(1)) for table[index]",
    "aten.bincount": "one_hot(index, number).sum(0)",
    **dict.fromkeys(
        ("aten.index", "aten.nonzero", "aten.where", "aten.masked_select"),
        "to multiply by the mask, torch.where, or -100 as the label of what does not count",
    ),
}
"""Replacements for operators whose result, or its size, is a number of values."""


def number_of_values(graph: fx.Graph, trouble: str) -> str | None:
    """The refusal of the first such number in a graph, if there is any. `trouble`: why it is refused."""
    found = next((n for n in calls(graph) if free_unbacked_symbols(value_of(n)) or _is_sized_by_values(n)), None)
    if found is None:
        return None
    way_out = next((way for name, way in _WAYS_OUT.items() if is_aten(found, name)), "to pad to a fixed size")
    return (
        f"model: {found.target} in {module_of(found)} makes a number or a size of a tensor's values; it {trouble}; "
        f"a way out is {way_out}"
    )


def _is_sized_by_values(node: fx.Node) -> bool:
    """Whether the result's shape follows from values; with whole numbers as indices it does not."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    indices = node.all_input_nodes[1:]
    return not is_aten(node, "aten.index") or any(value_of(each).dtype in (torch.bool, torch.uint8) for each in indices)
