"""Use of sums over samples on their way to loss and count: only linear operations keep them sums.

    l.sum() * 0.5 + 0.1 * kl.sum()              ->  nothing
    w.sum().clamp(min=1) as the count           ->  "aten.clamp.default in the model: the count is no sum over samples"
    kl.mean(0).clamp(min=0.3).sum()             ->  the same of the loss, though no sample of a trial reaches the limit

This is a rule, as a trial sees only one side of a limit.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from elaswave_fx.program.dependence import values_read
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    Role,
    argument,
    calls,
    is_aten,
    is_foreign,
    is_getitem,
    module_of,
    output_nodes,
    placeholders,
    source_of,
    tensors_in,
    value_of,
)

_OF_SAMPLES = (Role.INPUT, Role.KEYS)  # with a row for each sample; a sample's draws are made from its key
_LINEAR = (
    "aten.add", "aten.alias", "aten.as_strided", "aten.cat", "aten.clone", "aten.contiguous", "aten.detach",
    "aten.diagonal", "aten.diff", "aten.expand", "aten.flatten", "aten.flip", "aten.lift_fresh_copy", "aten.mean",
    "aten.neg", "aten.permute", "aten.positive", "aten.repeat", "aten.reshape", "aten.roll", "aten.rsub", "aten.select",
    "aten.slice", "aten.split", "aten.split_with_sizes", "aten.squeeze", "aten.stack", "aten.sub", "aten.sum", "aten.t",
    "aten.to", "aten.trace", "aten.transpose", "aten.tril", "aten.triu", "aten.unbind", "aten.unsqueeze", "aten.view",
    "aten._to_copy", "aten._unsafe_view", "aten.cumsum",
)  # fmt: skip
_LINEAR_IN_EACH = (
    "aten.addmm", "aten.bmm", "aten.dot", "aten.einsum", "aten.inner", "aten.linear", "aten.matmul", "aten.mm",
    "aten.mul", "aten.mv", "aten.outer",
)  # fmt: skip
"""Linear while only one argument is made of samples."""
_FILLED = ("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor")
_SUMS = (
    *_LINEAR_IN_EACH, "aten.addbmm", "aten.bincount", "aten.count_nonzero", "aten.histc", "aten.nansum", "aten.sum",
    "aten.tensordot", "aten.vdot",
)  # fmt: skip
"""Sums over samples where the result has none."""
_BY_GROUPS_ADDED = ("aten.index_add", "aten.scatter_add")
_BY_GROUPS = ("aten.index_reduce", "aten.scatter_reduce", "aten.segment_reduce")
_LABELLED = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss2d", "aten.nll_loss_nd")
_MEAN, _SUM = 1, 2
_LINEAR_IN_FIRST = ("aten.div", "aten.gather", "aten.index", "aten.index_select", "aten.true_divide")


def bent_totals(program: Program) -> tuple[str, ...]:
    """Calls on the way to loss or count that turn a sum over samples into something else."""
    totals = _totals(program)
    found: dict[str, None] = {}
    for kind, output in sum_nodes(program):
        seen: set[fx.Node] = set()
        stack = [output]
        while stack:
            node = stack.pop()
            if node in seen or node not in totals:
                continue
            seen.add(node)
            stack += node.all_input_nodes
            if not _is_linear(node, totals):
                place = f"{node.target} in {module_of(node)}"
                found[f"{place}: the {kind.value} is no sum over samples{_cure(kind, node)}"] = None
    return tuple(found)


def sum_nodes(program: Program) -> list[tuple[ResultKind, fx.Node]]:
    outputs = zip(output_nodes(program.graph.graph), program.results, strict=True)
    kinds = (ResultKind.LOSS, ResultKind.COUNT)
    return [(result.kind, node) for node, result in outputs if result.kind in kinds and node is not None]


def _totals(program: Program) -> set[fx.Node]:
    """Calls made of samples, or of their number, whose result sizes do not depend on that."""
    made = {node for node in placeholders(program.graph.graph) if source_of(node).role in _OF_SAMPLES}
    totals: set[fx.Node] = set()
    for node in calls(program.graph.graph):
        has_samples = _has_samples(node)
        if has_samples or _is_number(node) or not made.isdisjoint(values_read(node)):
            made.add(node)
            if not has_samples and tensors_in(value_of(node)):
                totals.add(node)
    return totals


def _is_number(node: fx.Node) -> bool:
    """Whether a value is computed from the number of samples in Python."""
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat))


def _is_linear(node: fx.Node, totals: set[fx.Node]) -> bool:
    """Whether a call is linear in the totals that it reads, if any."""
    read = totals.intersection(node.all_input_nodes)
    if not read and any(_is_number(source) for source in node.all_input_nodes):
        return is_aten(node, *_LINEAR, *_LINEAR_IN_EACH, *_FILLED)
    if not read:
        return not _is_weighted_mean(node) and (
            _kind_of(node) is not None or _is_sum_by_groups(node) or is_foreign(node)
        )
    if is_getitem(node):
        return True
    if any(value.dtype == torch.bool for value in tensors_in(value_of(node))):
        return False
    if is_aten(node, *_LINEAR_IN_EACH):
        return sum(each in totals for each in _flat(node)) == 1
    if is_aten(node, *_LINEAR_IN_FIRST):
        rounds = node.kwargs.get("rounding_mode") is not None
        return not rounds and totals.isdisjoint(_flat(node)[1:])
    return is_aten(node, *_LINEAR)


def _is_sum_by_groups(node: fx.Node) -> bool:
    if is_aten(node, "aten.index_put"):
        return bool(argument(node, "accumulate", False))
    return is_aten(node, *_BY_GROUPS_ADDED) or (is_aten(node, *_BY_GROUPS) and argument(node, "reduce") == "sum")


def _is_weighted_mean(node: fx.Node) -> bool:
    """Whether a loss is a mean over counted labels, of which a part of a batch may have more."""
    return is_aten(node, *_LABELLED) and argument(node, "reduction", _MEAN) == _MEAN


class Term(Enum):
    """What a value is that loss or count is linear in."""

    SUM = "a sum over samples"
    MEAN = "a mean over samples"
    COMMON = "a value of no sample"


def terms(program: Program) -> dict[fx.Node, Term]:
    """Values that loss or count is linear in, computed from them by nothing but totals: reductions that make floats of
    a whole batch from those of its samples, and what parameters, buffers and draws alone give, which training moves."""
    totals, common = _totals(program), _common(program)
    found: dict[fx.Node, Term] = {}
    seen: set[fx.Node] = set()
    stack = [node for _, node in sum_nodes(program)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in common:
            if _is_float(node) or _is_bool(node):
                found[node] = Term.COMMON
        elif not totals.isdisjoint(node.all_input_nodes) or node not in totals:
            stack += [source for source in values_read(node) if source in totals or not _has_samples(source)]
        elif _is_float(node) and (kind := _kind_of(node)) is not None:
            found[node] = kind
    return found


def _common(program: Program) -> set[fx.Node]:
    """Values that training moves and that neither samples nor their number enter."""
    updates = set(program.updated_buffers())
    moved: set[fx.Node] = set()
    of_batch: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            source = source_of(node)
            if source.role in _OF_SAMPLES:
                of_batch.add(node)
            elif source.role != Role.CONSTANT and (source.role != Role.BUFFER or source.name in updates):
                moved.add(node)
        elif node.op == "call_function":
            read = set(values_read(node))
            if not of_batch.isdisjoint(read):
                of_batch.add(node)
            elif not moved.isdisjoint(read):
                moved.add(node)
    return moved


def _has_samples(node: fx.Node) -> bool:
    return any(isinstance(size, torch.SymInt) for value in tensors_in(value_of(node)) for size in value.shape)


def _is_float(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_bool(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _kind_of(node: fx.Node) -> Term | None:
    reduction = _reduction(node)
    if is_aten(node, *_SUMS) or reduction == _SUM:
        return Term.SUM
    return Term.MEAN if is_aten(node, "aten.mean") or reduction == _MEAN else None


def _reduction(node: fx.Node) -> int | None:
    """How a loss reduces, None for other calls."""
    schema = getattr(node.target, "_schema", None)
    defaults = [each.default_value for each in schema.arguments if each.name == "reduction"] if schema else []
    return argument(node, "reduction", defaults[0]) if defaults else None


def _flat(node: fx.Node) -> list[fx.Node]:
    """Nodes among a call's arguments, each as often as it occurs."""
    return [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]


def _cure(kind: ResultKind, node: fx.Node) -> str:
    """Remedy. A count is often clamped away from 0, as a division by it would need."""
    if _is_weighted_mean(node):
        return ": it is a mean over the labels that count, and reduction='sum' is the sum"
    if is_aten(node, "aten.mul"):
        return (
            ": it is a product of two numbers of a whole batch, such as a mean times its count; return the sum itself"
        )
    if any("norm" in str(source.target) for source in (node, *node.all_input_nodes)):
        return ": a norm over the batch is none; h.pow(2).sum() is one"
    bounds = kind == ResultKind.COUNT and is_aten(node, "aten.clamp", "aten.clamp_min", "aten.maximum")
    return ", and needs no lower bound: a step in which nothing counts is told" if bounds else ""
