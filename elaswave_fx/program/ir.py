"""The program: one functional ATen graph and the schema of everything attached to it.

It holds what is computed, never where. A `Program` is treated as a value: a pass copies it, changes the copy, and
returns it. Node metadata is read and written only through the accessors of this file.

    graph:   p_weight, input_ids, labels -> embedding -> ... -> (loss sum, count, new running mean)
    sources: p_weight = Source(PARAM, "head.weight"), input_ids = Source(INPUT, "input_ids"), ...
    results: Result(LOSS), Result(COUNT), Result(BUFFER, "bn.running_mean")
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from elaswave_fx.errors import CaptureError


class Role(StrEnum):
    """Origin of a graph input."""

    PARAM = "param"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    KEYS = "keys"
    STEP_KEYS = "step_keys"
    VALUE = "value"


class ResultKind(StrEnum):
    """Meaning of a graph output."""

    LOSS = "loss"
    COUNT = "count"
    BUFFER = "buffer"
    FOLD = "fold"
    VALUE = "value"


@dataclass(frozen=True)
class Source:
    """A graph input: its role and the logical name of the tensor (empty for keys)."""

    role: Role
    name: str = ""


@dataclass(frozen=True)
class Result:
    """A graph output: its kind and the logical name; for FOLD the buffer and the number of the value."""

    kind: ResultKind
    name: str = ""
    number: int = 0


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a logical tensor (fixed sizes only)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class ParamSpec(TensorSpec):
    """A parameter as one logical tensor. `aliases` are the other names of a tied tensor."""

    trainable: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleAxis:
    """Position of the samples: dimension `axis` has size outer * batch * period, indices in this order.

    Mostly `outer` is 1, and a run of samples is one slice. It is more where dimensions before the samples were
    flattened into theirs, as in a view of [64, batch, 8] as [64 * batch, 8].
    """

    axis: int
    period: int = 1
    outer: int = 1


@dataclass(frozen=True)
class BorderValue:
    """An activation that crosses a unit border.

    `shape` is that of one sample: the sample axis holds its period. `sample_axis` is None for values of a whole
    micro-batch (only in batch-coupled programs).
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sample_axis: SampleAxis | None
    has_grad: bool

    @property
    def bytes_per_sample(self) -> int:
        return TensorSpec(self.shape, self.dtype).numel * self.dtype.itemsize


@dataclass(frozen=True)
class Fold:
    """The update of one mutable buffer: `graph(old, *values) -> new`, applied once per granule in granule order.

    If `per_step`, every granule yields the same values, and it is applied once per step.
    """

    buffer: str
    unit: int
    graph: fx.GraphModule
    num_values: int
    per_step: bool = False


@dataclass(frozen=True)
class Unit:
    """The smallest movable piece: a forward graph, bindings of its inputs, and its outputs.

    `kind` is the structural hash: units of one kind share derivative, lowered code and measured cost.
    """

    index: int
    graph: fx.GraphModule
    sources: tuple[Source, ...]
    results: tuple[Result, ...]
    grad_inputs: tuple[bool, ...]
    grad_results: tuple[bool, ...]
    kind: str


@dataclass(frozen=True)
class Example:
    """The capture's example, for analyses that run the program: parameters and buffers by their first names, inputs
    [samples, ...] by name, at least two granules of them, and granules of other samples."""

    state: Mapping[str, torch.Tensor]
    batch: Mapping[str, torch.Tensor]
    more: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class Program:
    """The captured model. `tensors` holds the data of constants; parameters and buffers are only described.

    `batch_coupled`: why granules are never split; `whole_batch`: why a granule has to be all samples of a step;
    `fixed_by`: the place that depends on the batch size in Python, where the program is of one size.
    """

    graph: fx.GraphModule
    results: tuple[Result, ...]
    params: Mapping[str, ParamSpec]
    buffers: Mapping[str, TensorSpec]
    tensors: Mapping[str, torch.Tensor]
    granule: int
    dynamic_batch: bool
    example: Example
    batch_coupled: tuple[str, ...] = ()
    whole_batch: tuple[str, ...] = ()
    num_units: int = 0
    folds: tuple[Fold, ...] = ()
    units: tuple[Unit, ...] = ()
    values: tuple[BorderValue, ...] = ()
    invariants: fx.GraphModule | None = None
    kinds: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Deviations from the computation that the model asks for, in words for its user."""
    fixed_by: str = ""

    def clone(self) -> Program:
        """The same program with its own graph, for a pass to change."""
        return replace(self, graph=copy_graph(self.graph))

    def as_read(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`state` in the dtypes in which the graph reads parameters and buffers."""
        specs: dict[str, TensorSpec] = {**self.params, **self.buffers}
        return {name: tensor.to(specs[name].dtype) if name in specs else tensor for name, tensor in state.items()}

    def updated_buffers(self) -> list[str]:
        """Buffers that forward updates."""
        by_results = [each.name for each in self.results if each.kind in (ResultKind.BUFFER, ResultKind.FOLD)]
        return list(dict.fromkeys((*by_results, *(fold.buffer for fold in self.folds))))

    def float_dtypes(self) -> set[torch.dtype]:
        values = (tensor for node in self.graph.graph.nodes for tensor in tensors_in(value_of(node)))
        return {value.dtype for value in values if value.is_floating_point()}


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that shares the metadata's values (fake tensors are not copied)."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping)
    for old, new in mapping.items():
        new.meta = copy.copy(old.meta)
    graph.output(output)
    return fx.GraphModule(torch.nn.Module(), graph)


# --- typed access to node metadata ------------------------------------------------------------------------------


def source_of(node: fx.Node) -> Source:
    """The role and the logical name of a placeholder."""
    return node.meta["elaswave_source"]


def set_source(node: fx.Node, source: Source) -> None:
    node.meta["elaswave_source"] = source


def value_of(node: fx.Node) -> Any:
    """The fake tensor, symbolic number, or tuple of them that a node produces."""
    return node.meta.get("val")


def module_of(node: fx.Node) -> str:
    """Path of the module from which a node was captured; for messages."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple) and entry[0]]
    # Tracing gives a node outside of any module the name of a private function.
    return entries[-1] if entries and not entries[-1].startswith("_empty_nn_module_stack") else "the model"


def named_operator(message: str, graph: fx.Graph) -> str:
    """ " at OPERATOR in MODULE" for the first operator of a graph that an error's message names; else empty."""
    for node in calls(graph):
        if isinstance(node.target, torch._ops.OpOverload) and str(node.target).rsplit(".", 1)[0] in message:
            return f" at {node.target} in {module_of(node)}"
    return ""


def unit_of(node: fx.Node) -> int | None:
    """The unit of a node; None for nodes that every unit computes for itself."""
    return node.meta.get("elaswave_unit")


def set_unit(node: fx.Node, unit: int | None) -> None:
    node.meta["elaswave_unit"] = unit


def flops_of(node: fx.Node) -> float:
    """Floating-point operations per sample (set by estimate_cost)."""
    return node.meta.get("elaswave_flops", 0.0)


def set_flops(node: fx.Node, flops: float) -> None:
    node.meta["elaswave_flops"] = flops


def statistics_of(node: fx.Node) -> tuple[str, str] | None:
    """The running mean and variance that replace batch statistics in evaluation."""
    return node.meta.get("elaswave_statistics")


def set_statistics(node: fx.Node, names: tuple[str, str]) -> None:
    node.meta["elaswave_statistics"] = names


def mean_of(node: fx.Node) -> float | None:
    """The mean that replaces a random draw in evaluation; None for draws that evaluation keeps."""
    return node.meta.get("elaswave_mean")


def set_mean(node: fx.Node, mean: float) -> None:
    node.meta["elaswave_mean"] = mean


def is_shuffled(node: fx.Node) -> bool:
    """Whether the row order of a value depends on the whole batch (set by find_couplings)."""
    return node.meta.get("elaswave_shuffled", False)


def set_shuffled(node: fx.Node) -> None:
    node.meta["elaswave_shuffled"] = True


# --- reading graphs ---------------------------------------------------------------------------------------------


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def output_nodes(graph: fx.Graph) -> list[fx.Node | None]:
    """The flat list of returned nodes."""
    returned: Any = output_node(graph).args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


UNSET = (
    "aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_permuted", "aten.empty_strided",
    "aten.new_empty_strided",
)  # fmt: skip
"""Operators whose result is uninitialized memory."""


def is_aten(node: fx.Node, *names: str) -> bool:
    """Whether a node calls one of these operators, written as `aten.mm` or `aten.add.Tensor`."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    full = str(node.target)
    return any(full == name or full.rsplit(".", 1)[0] == name for name in names)


def is_getitem(node: fx.Node) -> bool:
    """Whether a call takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem


def may_be_view(node: fx.Node) -> bool:
    """Whether a call's result may share memory with one of its arguments."""
    maker = node.args[0] if is_getitem(node) else node
    schema = getattr(maker.target, "_schema", None) if isinstance(maker, fx.Node) else None
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument of an operator by its name in the schema, given by position or keyword; `default` if not given."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name) if name in names else len(node.args)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def is_foreign(node: fx.Node) -> bool:
    """Whether a call's operator comes from neither torch nor this library."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prim", "prims", "elaswave")


def draws_randomness(node: fx.Node) -> bool:
    """Whether a node draws from a hidden generator."""
    return isinstance(node.target, torch._ops.OpOverload) and call_draws(node.target, node.args, node.kwargs)


def call_draws(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws from a hidden generator."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    # Attention and recurrent layers carry the tag of randomness even when their dropout is zero.
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rates = [given.get(name, 0.0) for name in ("dropout_p", "dropout") if name in names]
    return not rates or rates[0] != 0.0


def fixed_size(size: Any) -> int:
    """A size that is the same for every batch. Raise CaptureError for any other: converting a symbolic size to a number
    would fix it for good."""
    if isinstance(size, torch.SymInt):
        raise CaptureError(f"model: a size depends on the number of samples ({size}) where it must not")
    return int(size)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a node's value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def emit(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Add a call at the insertion point and compute its value from those of its arguments.

    `like`: the node whose module path the new node gets, for messages.
    """
    node = graph.call_function(target, args, kwargs)
    real_args, real_kwargs = fx.map_arg((args, kwargs), value_of)
    with symbolic_sizes(_fake_mode(graph)):
        node.meta["val"] = target(*real_args, **real_kwargs)
    if like is not None and "nn_module_stack" in like.meta:
        node.meta["nn_module_stack"] = like.meta["nn_module_stack"]
    return node


@contextlib.contextmanager
def symbolic_sizes(mode: FakeTensorMode | None) -> Iterator[None]:
    """Keep symbolic sizes symbolic in calls on fake tensors of `mode`.

    Some of torch's composite operators, such as upsample_nearest2d.vec, are C++ that reads sizes as plain numbers and
    would fix the batch size for good; the Python dispatcher takes torch's Python versions of them.
    """
    with mode or contextlib.nullcontext(), enable_python_dispatcher():
        yield


def _fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode of the graph's values, for calls without tensor arguments."""
    for node in graph.nodes:
        for tensor in tensors_in(value_of(node)):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return None
