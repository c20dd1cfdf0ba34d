"""The program: one functional ATen graph and the schema of everything attached to it.

Job: hold what is computed, and nothing of who computes it. A `Program` is treated as a value: a pass copies it,
changes the copy, and returns it. Node metadata is read and written only through the accessors of this file.

    graph:   p_weight, input_ids, labels -> embedding -> ... -> (loss sum, count, new running mean)
    sources: p_weight = Source(PARAM, "head.weight"), input_ids = Source(INPUT, "input_ids"), ...
    results: Result(LOSS), Result(COUNT), Result(BUFFER, "bn.running_mean")
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from elaswave_fx.errors import PassError


class Role(str, Enum):
    """Where a graph input comes from."""

    PARAM = "param"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    KEYS = "keys"
    STEP_KEYS = "step_keys"
    VALUE = "value"
    SAVED = "saved"
    TANGENT = "tangent"


class ResultKind(str, Enum):
    """What a graph output means."""

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
    """Where the samples lie: dimension `axis` has size batch * period, with the sample index outermost in it."""

    axis: int
    period: int


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
    """The update of one mutable buffer: `graph(old, *values) -> new`, applied once per granule in granule order."""

    buffer: str
    unit: int
    graph: fx.GraphModule
    num_values: int


@dataclass(frozen=True)
class Unit:
    """The smallest movable piece: a forward graph, where its inputs come from, what its outputs are.

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
class Program:
    """The captured model. `tensors` holds the data of constants; parameters and buffers are only described."""

    graph: fx.GraphModule
    results: tuple[Result, ...]
    params: Mapping[str, ParamSpec]
    buffers: Mapping[str, TensorSpec]
    tensors: Mapping[str, torch.Tensor]
    granule: int
    dynamic_batch: bool
    batch_coupled: tuple[str, ...] = ()
    num_units: int = 0
    folds: tuple[Fold, ...] = ()
    units: tuple[Unit, ...] = ()
    values: tuple[BorderValue, ...] = ()
    invariants: fx.GraphModule | None = None
    kinds: Mapping[str, Any] = field(default_factory=dict)

    def clone(self) -> Program:
        """The same program with a graph of its own, for a pass to change."""
        return replace(self, graph=copy_graph(self.graph))


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
    """Where a placeholder comes from."""
    return node.meta["elaswave_source"]


def set_source(node: fx.Node, source: Source) -> None:
    node.meta["elaswave_source"] = source


def value_of(node: fx.Node) -> Any:
    """The fake tensor, symbolic number, or tuple of them that a node produces."""
    return node.meta.get("val")


def module_of(node: fx.Node) -> str:
    """The path of the module that a node was captured from; for messages."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple) and entry[0]]
    return entries[-1] if entries else "the model"


def unit_of(node: fx.Node) -> int | None:
    """The unit that a node belongs to; None for what every unit makes for itself."""
    return node.meta.get("elaswave_unit")


def set_unit(node: fx.Node, unit: int | None) -> None:
    node.meta["elaswave_unit"] = unit


def flops_of(node: fx.Node) -> float:
    """Floating-point operations per sample (set by estimate_cost)."""
    return node.meta.get("elaswave_flops", 0.0)


def set_flops(node: fx.Node, flops: float) -> None:
    node.meta["elaswave_flops"] = flops


def statistics_of(node: fx.Node) -> tuple[str, str] | None:
    """The running mean and variance that stand in for batch statistics in evaluation."""
    return node.meta.get("elaswave_statistics")


def set_statistics(node: fx.Node, names: tuple[str, str]) -> None:
    node.meta["elaswave_statistics"] = names


# --- reading graphs ---------------------------------------------------------------------------------------------


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def output_nodes(graph: fx.Graph) -> list[fx.Node | None]:
    """The flat list of returned nodes."""
    returned = output_node(graph).args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def is_aten(node: fx.Node, *names: str) -> bool:
    """True for a call of one of these operators, written as `aten.mm` or `aten.add.Tensor`."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    full = str(node.target)
    return any(full == name or full.rsplit(".", 1)[0] == name for name in names)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a node's value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def emit(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Add a call at the insertion point and work out its value from those of its arguments.

    `like` gives the new node the module path of another one, for messages.
    """
    node = graph.call_function(target, args, kwargs)
    modes = [t.fake_mode for t in _fakes(args)]
    real_args, real_kwargs = fx.map_arg((args, kwargs), value_of)
    if modes:
        with modes[0]:
            node.meta["val"] = target(*real_args, **real_kwargs)
    else:
        node.meta["val"] = target(*real_args, **real_kwargs)
    if like is not None and "nn_module_stack" in like.meta:
        node.meta["nn_module_stack"] = like.meta["nn_module_stack"]
    return node


def _fakes(args: Any) -> list[Any]:
    found: list[Any] = []
    fx.map_arg(args, lambda node: found.extend(t for t in tensors_in(value_of(node)) if hasattr(t, "fake_mode")))
    return found


def verify(program: Program, after: str) -> None:
    """Check what holds for every program between passes.

    Raises PassError naming the pass after which the rule was broken.
    """
    try:
        program.graph.graph.lint()
    except RuntimeError as error:
        raise PassError(f"{after}: the graph is malformed: {error}") from error
    outputs = output_nodes(program.graph.graph)
    if len(outputs) != len(program.results):
        raise PassError(f"{after}: the graph returns {len(outputs)} values for {len(program.results)} results")
    for node in placeholders(program.graph.graph):
        source = source_of(node)
        known = {Role.PARAM: program.params, Role.BUFFER: program.buffers, Role.CONSTANT: program.tensors}
        if source.role in known and source.name not in known[source.role]:
            raise PassError(f"{after}: input {node.name} reads the unknown {source.role.value} '{source.name}'")
    for node in calls(program.graph.graph):
        if "val" not in node.meta:
            raise PassError(f"{after}: node {node.name} has no value; passes add calls through `emit`")
