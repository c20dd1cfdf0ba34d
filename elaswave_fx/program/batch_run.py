"""Execution of a captured graph call by call, for a whole batch and its parts side by side.

whole, head, tail = cut_batch(program, state, batch, trial_keys(5), 2, double=True)
for node in executed(program, (whole, head, tail)):     # values are kept until their last use
    whole.known[node], head.known[node], tail.known[node]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map_only

from elaswave_fx.program.ir import Program, Role, calls, output_nodes, source_of
from elaswave_fx.program.trial_values import perturbed

State = Mapping[str, torch.Tensor]
Batch = Mapping[str, torch.Tensor]

_LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
_T = TypeVar("_T")


class BatchRun:
    """One batch's execution of the graph, call by call; in double precision if `double`."""

    def __init__(self, program: Program, state: State, batch: Batch, keys: torch.Tensor, double: bool) -> None:
        self.program = program
        self.state = state
        self.batch = batch
        self.keys = keys
        self.double = double
        self.known: dict[fx.Node, Any] = {}
        self.trained: dict[str, torch.Tensor] = {}
        """Trainable parameters read so far, as leaves of the gradient."""

    def call(self, node: fx.Node) -> Any:
        """The value of a call whose arguments are known."""
        self.known[node] = self.result_of(node, self.value)
        return self.known[node]

    def result_of(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
        """The value that a call would have for arguments of these values."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        if self.double:
            args, kwargs = map_aggregate((args, kwargs), _widened)  # type: ignore[misc]
        found = node.target(*args, **kwargs)  # type: ignore[operator]
        # Made without a dtype, as by arange(1.0, 9.0), a tensor is in single precision.
        return tree_map_only(torch.Tensor, _in_double, found) if self.double else found

    def value(self, node: fx.Node) -> Any:
        if node not in self.known:
            assert node.op == "placeholder", f"{node} was forgotten before its last use"
            self.known[node] = self._input(node)
        return self.known[node]

    def forget(self, node: fx.Node) -> None:
        self.known.pop(node, None)

    def _input(self, node: fx.Node) -> torch.Tensor:
        source, tensor = source_of(node), graph_input(self.program, self.state, self.batch, self.keys, node)
        if self.double and tensor.is_floating_point():
            tensor = perturbed(tensor.double(), node.name) if source.role == Role.PARAM else tensor.double()
        if source.role == Role.PARAM and self.program.params[source.name].trainable:
            tensor = self.trained[source.name] = tensor.detach().requires_grad_()
        return tensor


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype in _LOW_PRECISION else tensor


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW_PRECISION else value


def graph_input(program: Program, state: State, batch: Batch, keys: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """Value of a program's placeholder for one batch; `keys` int64 [samples]."""
    source = source_of(node)
    if source.role == Role.INPUT:
        return batch[source.name]
    if source.role == Role.KEYS:
        return keys
    if source.role == Role.STEP_KEYS:
        return torch.zeros(1, dtype=torch.int64)
    return program.tensors[source.name] if source.role == Role.CONSTANT else state[source.name]


def count_samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def trial_keys(samples: int) -> torch.Tensor:
    return torch.arange(1, samples + 1, dtype=torch.int64) * 0x1E3779B97F4A7C15 % (1 << 62)


def precisely(attempt: Callable[[bool], _T]) -> _T:
    """`attempt(True)`, in double precision, which separates rounding from coupling; `attempt(False)`, in the program's
    own precision, if an operator supports no other."""
    try:
        return attempt(True)
    except RuntimeError:
        return attempt(False)


def cut_batch(
    program: Program, state: State, batch: Batch, keys: torch.Tensor, cut: int, double: bool
) -> tuple[BatchRun, BatchRun, BatchRun]:
    head = {name: tensor[:cut] for name, tensor in batch.items()}
    tail = {name: tensor[cut:] for name, tensor in batch.items()}
    return (
        BatchRun(program, state, batch, keys, double),
        BatchRun(program, state, head, keys[:cut], double),
        BatchRun(program, state, tail, keys[cut:], double),
    )


def executed(
    program: Program,
    runs: tuple[BatchRun, ...],
    differentiable: bool = False,
    only: Collection[fx.Node] | None = None,
    given: Mapping[fx.Node, Sequence[torch.Tensor]] = MappingProxyType({}),
) -> Iterator[fx.Node]:
    """Yield every call after it ran in all of `runs`; values are kept until their last use.

    Args:
        only: the calls to run; None: all of them.
        given: values of calls, which do not run, and of placeholders, one for each of `runs`.
    """
    for node, values in given.items():
        for run, value in zip(runs, values, strict=True):
            run.known[node] = value
    kept = set(output_nodes(program.graph.graph))
    last: dict[fx.Node, fx.Node] = {}
    nodes = [node for node in calls(program.graph.graph) if only is None or node in only]
    for node in nodes:
        last.update(dict.fromkeys(node.all_input_nodes, node))
    spent: dict[fx.Node, list[fx.Node]] = {}
    for source, user in last.items():
        if source not in kept:
            spent.setdefault(user, []).append(source)
    for node in nodes:
        with torch.set_grad_enabled(differentiable):
            for run in runs if node not in given else ():
                run.call(node)
        yield node
        for source in spent.get(node, ()):
            for run in runs:
                run.forget(source)


def is_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not a.numel():
        return True
    a, b = a.double(), b.double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return False
    if not finite.all():
        a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    return bool((a - b).abs().max().item() <= tolerance * b.abs().max().item() + 1e-300)
