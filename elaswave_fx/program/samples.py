"""Where samples lie in every value, and which operators couple the samples of a batch.

The symbolic batch size of the export marks the sample axis: a dimension of size `s0` or `12*s0`. An operator is
batch-coupled when one sample's result depends on another sample. Rules find the known ones by name; a numeric trial
(the whole batch against its parts) finds the rest, so that an unknown operator cannot slip through.

    view [s0*64, 256] -> SampleAxis(axis=0, period=64);  batch_norm -> "aten._native_batch_norm_legit in bn1"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.dependence import Nature, natures
from elaswave_fx.program.ir import (
    Program,
    ResultKind,
    Role,
    SampleAxis,
    calls,
    is_aten,
    module_of,
    output_nodes,
    placeholders,
    source_of,
    value_of,
)

_ALONG_DIM = (
    "aten.softmax",
    "aten._softmax",
    "aten.log_softmax",
    "aten._log_softmax",
    "aten._safe_softmax",
    "aten.cumsum",
    "aten.cumprod",
    "aten.sort",
    "aten.topk",
    "aten.flip",
    "aten.roll",
    "aten.logcumsumexp",
)
_BATCH_STATISTICS = ("aten._native_batch_norm_legit", "aten.native_batch_norm", "aten._native_batch_norm_legit.no_stats")
_TOLERANCE = 2e-3


def batch_symbol(program: Program) -> sympy.Symbol | None:
    """The symbol of the batch size; None when the program was captured at a fixed size."""
    for node in placeholders(program.graph.graph):
        if source_of(node).role == Role.INPUT and isinstance(value_of(node), torch.Tensor):
            size = value_of(node).shape[0]
            if isinstance(size, torch.SymInt):
                return size.node.expr
    return None


def sample_dims(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> list[int]:
    """The dimensions whose size depends on the batch size."""
    return [
        dim
        for dim, size in enumerate(tensor.shape)
        if symbol is not None and isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols
    ]


def sample_axis(tensor: torch.Tensor, symbol: sympy.Symbol | None) -> SampleAxis | None:
    """Where samples lie in a value; None when it holds none, or cannot be cut along samples."""
    dims = sample_dims(tensor, symbol)
    if len(dims) != 1:
        return None
    period = sympy.simplify(tensor.shape[dims[0]].node.expr / symbol)
    return SampleAxis(dims[0], int(period)) if period.is_Integer else None


def per_sample_shape(tensor: torch.Tensor, axis: SampleAxis | None) -> tuple[int, ...]:
    """The shape of one sample's part; the sample axis holds its period."""
    if axis is None:
        return tuple(int(size) for size in tensor.shape)
    return tuple(axis.period if dim == axis.axis else int(size) for dim, size in enumerate(tensor.shape))


def coupled_by_rule(program: Program) -> tuple[str, ...]:
    """Batch-coupled operators that shapes and names give away."""
    symbol = batch_symbol(program)
    if symbol is None:
        return ("the model exports at one fixed batch size only",)
    return tuple(_describe(node) for node in calls(program.graph.graph) if _couples(node, symbol))


def _describe(node: fx.Node) -> str:
    return f"{node.target} in {module_of(node)}"


def _couples(node: fx.Node, symbol: sympy.Symbol) -> bool:
    if is_aten(node, *_BATCH_STATISTICS):
        return bool(node.args[-3])
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return False
    dims = sample_dims(value, symbol)
    if len(dims) > 1:
        return True
    if not is_aten(node, *_ALONG_DIM):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(value_of(source), torch.Tensor):
        return False
    along = node.args[1] if len(node.args) > 1 else -1
    along = node.args[2] if is_aten(node, "aten.topk") and len(node.args) > 2 else along
    axes = along if isinstance(along, (tuple, list)) else [along]
    rank = value_of(source).dim()
    mixed = {int(axis) % rank for axis in axes if isinstance(axis, int)} if rank else set()
    return bool(mixed & set(sample_dims(value_of(source), symbol)))


class _Recorder(fx.Interpreter):
    """Runs the graph and keeps every call's value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function":
            self.values[n.name] = value
        return value


def graph_inputs(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], keys: torch.Tensor
) -> list[torch.Tensor]:
    """The placeholder values of a program for one batch; `keys` int64 [samples]."""
    values = []
    for node in placeholders(program.graph.graph):
        source = source_of(node)
        if source.role == Role.INPUT:
            values.append(batch[source.name])
        elif source.role == Role.KEYS:
            values.append(keys)
        elif source.role == Role.STEP_KEYS:
            values.append(torch.zeros(1, dtype=torch.int64))
        elif source.role == Role.CONSTANT:
            values.append(program.tensors[source.name])
        else:
            values.append(state[source.name])
    return values


def coupled_by_trial(
    program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Run a batch whole and in two parts; name the first operators whose parts do not join to the whole.

    Also checks that loss and count of the parts add up to those of the whole: what the step relies on.
    """
    symbol = batch_symbol(program)
    samples = len(next(iter(batch.values())))
    if symbol is None or samples < 2:
        return ()
    cut = samples // 2
    keys = torch.arange(1, samples + 1, dtype=torch.int64) * 0x9E3779B97F4A7C15 % (1 << 62)
    with torch.no_grad():
        whole = _record(program, state, batch, keys)
        head = _record(program, state, {k: v[:cut] for k, v in batch.items()}, keys[:cut])
        tail = _record(program, state, {k: v[cut:] for k, v in batch.items()}, keys[cut:])
    reasons = []
    broken: set[fx.Node] = set()
    kinds = natures(program)
    for node in calls(program.graph.graph):
        if kinds[node] != Nature.MAIN:
            continue  # positions in the batch and the like: they matter only where they reach the samples' values
        if any(source in broken for source in node.all_input_nodes):
            broken.add(node)
        elif not _joins(node, symbol, whole, head, tail):
            broken.add(node)
            reasons.append(_describe(node))
    return tuple(reasons) or _not_additive(program, whole, head, tail)


def _record(program: Program, state: Any, batch: Any, keys: torch.Tensor) -> dict[str, Any]:
    recorder = _Recorder(program.graph)
    recorder.run(*graph_inputs(program, state, batch, keys))
    return recorder.values


def _joins(node: fx.Node, symbol: sympy.Symbol, whole: Any, head: Any, tail: Any) -> bool:
    value = value_of(node)
    axis = sample_axis(value, symbol) if isinstance(value, torch.Tensor) else None
    if axis is None:
        return True
    joined = torch.cat([head[node.name], tail[node.name]], dim=axis.axis)
    return joined.shape == whole[node.name].shape and _close(joined, whole[node.name])


def _not_additive(program: Program, whole: Any, head: Any, tail: Any) -> tuple[str, ...]:
    reasons = []
    for node, result in zip(output_nodes(program.graph.graph), program.results, strict=True):
        if result.kind in (ResultKind.LOSS, ResultKind.COUNT) and node is not None and node.name in whole:
            parts = head[node.name].double() + tail[node.name].double()
            if not _close(parts, whole[node.name].double()):
                reasons.append(f"{_describe(node)}: the {result.kind.value} of a batch is not the sum over its parts")
    return tuple(reasons)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return False
    scale = b[finite].abs().max().item() if finite.any() else 0.0
    return bool((a[finite] - b[finite]).abs().max().item() <= _TOLERANCE * scale + 1e-12) if finite.any() else True


def refuse_mean_loss(program: Program, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose loss is an average: the same samples twice must double both loss and count.

    Raises CaptureError naming the rule.
    """
    if batch_symbol(program) is None or program.batch_coupled:
        return
    keys = torch.arange(1, len(next(iter(batch.values()))) + 1, dtype=torch.int64)
    doubled = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    with torch.no_grad():
        once = program.graph(*graph_inputs(program, state, batch, keys))
        twice = program.graph(*graph_inputs(program, state, doubled, torch.cat([keys, keys])))
    for result, one, two in zip(program.results, once, twice, strict=True):
        if result.kind in (ResultKind.LOSS, ResultKind.COUNT) and not _close(2 * one.double(), two.double()):
            raise CaptureError(
                f"model: the same samples given twice change the {result.kind.value} from {float(one):.6g} to "
                f"{float(two):.6g} instead of doubling it; a model returns (loss sum, count), not a mean"
            )
