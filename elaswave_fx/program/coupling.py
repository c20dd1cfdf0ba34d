"""Which operators couple the samples of a batch, and whether the loss is a sum over samples.

An operator is batch-coupled when one sample's result, or its share of a gradient, depends on another sample. Rules
find the known ones by name and shape. A trial in double precision, the whole batch against its parts, finds the rest,
so that an unknown operator cannot slip through. A program with any of them runs granule by granule.

    batch_norm over [B, 16, 8, 8]      -> "aten._native_batch_norm_legit.no_stats in stem_norm"
    logits = a @ b.t(), [B, B]         -> "aten.matmul.default in the model"
    rows sorted by expert, and back    -> nothing, but no unit ends between the two: `Couplings.shuffled`
    a backward pass that looks around  -> "the gradient of embed.weight over a batch is not the sum over its parts"
    loss = mean over the batch         -> CaptureError
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.dependence import Nature, natures
from elaswave_fx.program.fixed_size import SIZES_TRIED
from elaswave_fx.program.ir import (
    UNSET,
    Program,
    ResultKind,
    Role,
    argument,
    calls,
    is_aten,
    is_foreign,
    module_of,
    output_nodes,
    source_of,
    value_of,
)
from elaswave_fx.program.samples import SampleAxes, locate_samples, sample_dims, split_samples
from elaswave_fx.program.state_kept import perturbed
from elaswave_fx.program.totals import bent_totals, sum_nodes

State = Mapping[str, torch.Tensor]
Batch = Mapping[str, torch.Tensor]

_ALONG_DIM = (
    "aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten._safe_softmax", "aten.cumsum",
    "aten.cumprod", "aten.logcumsumexp", "aten.topk", "aten.kthvalue", "aten.cummax", "aten.cummin",
)  # fmt: skip
_SORTS = ("aten.sort", "aten.argsort")
_EMBEDDINGS = ("aten.embedding", "aten.embedding_bag", "aten._embedding_bag")
_ALONG_DIMS = ("aten.flip", "aten.roll")
_COMPARISONS = ("aten.gt", "aten.ge", "aten.lt", "aten.le", "aten.eq", "aten.ne", "aten._to_copy")
_BATCH_STATISTICS = ("aten._native_batch_norm_legit", "aten.native_batch_norm", "aten.batch_norm")
_LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
_T = TypeVar("_T")
_Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Couplings:
    """`reasons`: why the program has to run granule by granule; empty when every sample stands for itself. `shuffled`:
    values whose rows stand in an order that depends on the whole batch, until the inverse order undoes it."""

    reasons: tuple[str, ...] = ()
    shuffled: frozenset[fx.Node] = frozenset()


def find_couplings(program: Program, state: State, batch: Batch, more: Batch | None = None) -> Couplings:
    """What couples the samples of a program.

    Args:
        state: parameters and buffers by name.
        batch: at least two granules.
        more: other granules, whose sums and gradients are compared with those of `batch`: a mean over labels, or over
            what a router chose, is a sum where all parts have equally many.

    Raises:
        CaptureError: the loss is a mean, not a sum: a model returns (loss sum, count).
    """
    by_rule = coupled_by_rule(program)
    found = Couplings(by_rule) if by_rule else coupled_by_trial(program, state, batch)
    if locate_samples(program).symbol is None:
        return found
    not_additive = () if found.reasons else additivity(program, state, batch, more)
    if found.reasons or not_additive:
        _refuse_mean(_doubled(program, state, batch), coupled=bool(found.reasons))
    return replace(found, reasons=found.reasons or not_additive or bent_totals(program))


# --- rules ------------------------------------------------------------------------------------------------------------


def coupled_by_rule(program: Program) -> tuple[str, ...]:
    """Batch-coupled operators that shapes and names give away, and updates of buffers."""
    axes = locate_samples(program)
    if axes.symbol is None:
        place = f": {program.fixed_by}" if program.fixed_by else ""
        return (f"the model exports at one fixed batch size only{place}",)
    operators = [_describe(node) for node in calls(program.graph.graph) if _couples(node, axes)]
    operators += [f"{_describe(node)}, of the number of samples" for node in calls(program.graph.graph)
                  if _steps_with_size(node, axes.symbol, program.granule)]  # fmt: skip
    updates = [f"buffer {fold.buffer} is updated by every batch" for fold in program.folds if not fold.per_step]
    return tuple(dict.fromkeys(operators or updates))


def _describe(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.name
    by_frequency = ", which divides gradients by frequency (scale_grad_by_freq)" if _divides_by_frequency(node) else ""
    return f"{node.target} in {module_of(node)}{by_frequency}"


def _divides_by_frequency(node: fx.Node) -> bool:
    """True for an embedding whose gradient of a row is divided by how often the batch has the row."""
    return is_aten(node, *_EMBEDDINGS) and bool(argument(node, "scale_grad_by_freq", False))


def _couples(node: fx.Node, axes: SampleAxes) -> bool:
    if axes.mixed(node) and not axes.data_dependent(node):
        return not any(axes.mixed(source) for source in node.all_input_nodes)  # only the first one is worth a name
    if is_aten(node, *_BATCH_STATISTICS):
        return bool(argument(node, "training", True)) and 1 not in _dims(node.args[0], axes.symbol)
    if _divides_by_frequency(node):
        return True
    if is_aten(node, *_ALONG_DIM):
        along = [argument(node, "dim", -1)]
    elif is_aten(node, *_ALONG_DIMS):
        along = list(argument(node, "dims", ())) or list(range(value_of(node).dim()))
    else:
        return False
    return _along_samples(node, along, axes)


def _steps_with_size(node: fx.Node, symbol: sympy.Symbol, granule: int) -> bool:
    """Whether a call makes of the batch size a number that goes by steps, as x.shape[0] // 8 does: the batches of a
    trial see one step. What is smooth is left to the trial."""
    value = value_of(node)
    if not isinstance(value, (torch.SymInt, torch.SymFloat)) or value.node.expr.is_rational_function(symbol):
        return False
    of = [value.node.expr.subs(symbol, granules * granule) for granules in SIZES_TRIED]
    return any(found not in (of[0], granules * of[0]) for granules, found in zip(SIZES_TRIED, of, strict=True))


def _sorts_samples(node: fx.Node, axes: SampleAxes) -> bool:
    """True for a sort along the samples. No rule: an order that is undone, as of rows by experts, couples nothing."""
    return is_aten(node, *_SORTS) and _along_samples(node, [argument(node, "dim", -1)], axes)


def _along_samples(node: fx.Node, along: list[Any], axes: SampleAxes) -> bool:
    """True when one of the dimensions `along` of a call's first argument holds samples."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or not value_of(source).dim():
        return False
    rank = value_of(source).dim()
    return bool({int(dim) % rank for dim in along if isinstance(dim, int)} & _dims(source, axes.symbol))


def _dims(node: Any, symbol: sympy.Symbol | None) -> set[int]:
    value = value_of(node)
    return set(sample_dims(value, symbol)) if isinstance(value, torch.Tensor) else set()


# --- the trial --------------------------------------------------------------------------------------------------------


class _Run:
    """One batch on its way through the graph, call by call, in double precision where `double` says so."""

    def __init__(self, program: Program, state: State, batch: Batch, keys: torch.Tensor, double: bool) -> None:
        self.program = program
        self.state = state
        self.batch = batch
        self.keys = keys
        self.double = double
        self.known: dict[fx.Node, Any] = {}
        self.trained: dict[str, torch.Tensor] = {}
        """Trainable parameters that were read, as leaves of the gradient."""

    def call(self, node: fx.Node) -> Any:
        """The value of a call whose arguments are known."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        if self.double:
            args, kwargs = map_aggregate((args, kwargs), _widened)  # type: ignore[misc]
        self.known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[node]

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


def _widened(value: Any) -> Any:
    return torch.float64 if value in _LOW_PRECISION and isinstance(value, torch.dtype) else value


def graph_input(program: Program, state: State, batch: Batch, keys: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """What a placeholder of a program holds for one batch; `keys` int64 [samples]."""
    source = source_of(node)
    if source.role == Role.INPUT:
        return batch[source.name]
    if source.role == Role.KEYS:
        return keys
    if source.role == Role.STEP_KEYS:
        return torch.zeros(1, dtype=torch.int64)
    return program.tensors[source.name] if source.role == Role.CONSTANT else state[source.name]


def _samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _keys(samples: int) -> torch.Tensor:
    return torch.arange(1, samples + 1, dtype=torch.int64) * 0x1E3779B97F4A7C15 % (1 << 62)


def coupled_by_trial(program: Program, state: State, batch: Batch) -> Couplings:
    """Run a batch whole and in two parts, call by call; name the first operators whose parts do not join to the whole.

    Where samples are sorted, other batches are tried too: the order is to be undone whatever it is. Parameters are near
    those of `state`, not equal to them; see `perturbed`.
    """
    axes = locate_samples(program)
    if axes.symbol is None or _samples(batch) < 2:
        return Couplings()
    try:
        found = _try_parts(program, axes, state, batch)
    except RuntimeError as error:
        return Couplings((f"the program fails for a part of a batch: {str(error).splitlines()[0]}",))
    for other in _others_like(batch) if _sorts(program, axes) else ():
        with contextlib.suppress(RuntimeError, IndexError):  # No program has to take what no data holds.
            more = _try_parts(program, axes, state, other)
            found = Couplings(found.reasons or more.reasons, found.shuffled | more.shuffled)
    return found


def _sorts(program: Program, axes: SampleAxes) -> bool:
    return any(_sorts_samples(node, axes) for node in calls(program.graph.graph))


def _others_like(batch: Batch) -> Iterator[Batch]:
    """Batches of the same values that meet in other ways: in another order, and one value throughout a sample, so that
    all of it wants to go one way."""
    yield {name: tensor.roll(1, 1) if tensor.dim() > 1 else tensor for name, tensor in batch.items()}
    yield {name: tensor.flatten(1)[:, :1].expand_as(tensor.flatten(1)).reshape(tensor.shape).contiguous()
           if tensor.dim() > 1 else tensor for name, tensor in batch.items()}  # fmt: skip


def _try_parts(program: Program, axes: SampleAxes, state: State, batch: Batch) -> Couplings:
    return _precisely(lambda double: _compare_parts(program, axes, _parts(program, state, batch, double), double))


def _precisely(attempt: Callable[[bool], _T]) -> _T:
    """`attempt(True)`, in double precision, so that rounding cannot be mistaken for coupling, or coupling for rounding;
    `attempt(False)`, in the program's own, where an operator knows no other."""
    try:
        return attempt(True)
    except RuntimeError:
        return attempt(False)


def _parts(program: Program, state: State, batch: Batch, double: bool) -> tuple[_Run, _Run, _Run]:
    """Runs of a batch, of its first granule, and of the rest."""
    samples = _samples(batch)
    return _cut(program, state, batch, _keys(samples), program.granule if program.granule < samples else samples // 2,
                double)  # fmt: skip


def _cut(
    program: Program, state: State, batch: Batch, keys: torch.Tensor, cut: int, double: bool
) -> tuple[_Run, _Run, _Run]:
    head = {name: tensor[:cut] for name, tensor in batch.items()}
    tail = {name: tensor[cut:] for name, tensor in batch.items()}
    return (
        _Run(program, state, batch, keys, double),
        _Run(program, state, head, keys[:cut], double),
        _Run(program, state, tail, keys[cut:], double),
    )


def _compare_parts(program: Program, axes: SampleAxes, runs: tuple[_Run, _Run, _Run], double: bool) -> Couplings:
    tolerance = 1e-8 if double else 2e-3
    kinds = natures(program)
    reasons: list[str] = []
    broken: set[fx.Node] = set()
    shuffled: set[fx.Node] = set()
    shared: set[fx.Node] = set()
    counted: set[fx.Node] = set()
    placed: set[fx.Node] = set()
    for node in _executed(program, runs):
        if _is_shared(node, axes, runs, shared, tolerance) or _decides(node, counted):
            shared.add(node)
        elif _is_counted(node, axes, runs, counted):
            counted.add(node)
        touched = axes.of(node) is not None and not shared.isdisjoint(node.all_input_nodes)
        disordered = _sorts_samples(node, axes) or not shuffled.isdisjoint(node.all_input_nodes)
        if is_aten(node, *UNSET):
            continue
        if kinds[node] != Nature.MAIN and not disordered and not touched:
            # Positions in the batch and the like matter only where they reach the samples' values.
            if _is_placed(node, placed) or not _joins(node, axes, runs, tolerance):
                placed.add(node)
            continue
        touched |= any(_is_decision(source, placed) for source in node.all_input_nodes)
        if not broken.isdisjoint(node.all_input_nodes):
            broken.add(node)
        elif disordered and (axes.of(node) is None or not _joins(node, axes, runs, tolerance)):
            shuffled.add(node)
        elif touched or not _joins(node, axes, runs, tolerance):
            broken.add(node)
            reasons.append(_describe(node))
    if not shuffled.isdisjoint(output_nodes(program.graph.graph)):  # type: ignore[arg-type]
        reasons += [f"{_describe(node)}, whose order is not undone" for node in shuffled if _sorts_samples(node, axes)]
    return Couplings(tuple(reasons), frozenset(shuffled))


def _is_shared(
    node: fx.Node, axes: SampleAxes, runs: tuple[_Run, _Run, _Run], shared: set[fx.Node], tolerance: float
) -> bool:
    """Whether a value is one for all samples and another for other samples, or is made of such values, as a norm over
    the batch and a threshold of it are. Whatever it does to the samples of the trial, it may do more to others.

    Integers are let through, see `_is_counted`.
    """
    value = runs[0].known.get(node)
    if axes.of(node) is not None or not isinstance(value, torch.Tensor):
        return False
    if not shared.isdisjoint(node.all_input_nodes):
        return value.is_floating_point() or value.dtype == torch.bool
    if value.dtype == torch.bool:
        return _brings_together(node, axes)  # any() and all() seldom differ.
    parts = [run.known[node] for run in runs[1:]]
    differs = any(part.shape != value.shape or not _close(part, value, tolerance) for part in parts)
    return value.is_floating_point() and differs


def _is_counted(node: fx.Node, axes: SampleAxes, runs: tuple[_Run, _Run, _Run], counted: set[fx.Node]) -> bool:
    """Whether a value counts something in all samples, or is made of such counts. How many samples an expert has says
    where the next one's begin, and couples nothing; a decision by such a number does (`_decides`)."""
    value = runs[0].known.get(node)
    if axes.of(node) is not None or not isinstance(value, torch.Tensor):
        return False
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return False
    parts = [run.known[node] for run in runs[1:]]
    if any(part.shape != value.shape for part in parts):
        return False  # Rows of the samples in another order.
    if _brings_together(node, axes) or not counted.isdisjoint(node.all_input_nodes):
        return True
    return not all(torch.equal(part, value) for part in parts)


def _brings_together(node: fx.Node, axes: SampleAxes) -> bool:
    """Whether a call makes one value of those of the samples."""
    return not axes.mixed(node) and any(axes.of(source) is not None for source in node.all_input_nodes)


def _is_placed(node: fx.Node, placed: set[fx.Node]) -> bool:
    """Whether a value is made of positions in the batch. What they take from other values is not."""
    taken = is_aten(node, "aten.index", "aten.gather", "aten.index_select")
    return not placed.isdisjoint(node.all_input_nodes[:1] if taken else node.all_input_nodes)


def _is_decision(node: fx.Node, placed: set[fx.Node]) -> bool:
    """Whether a value is made of positions in the batch and is none: a mask by them may be another one for others."""
    value = value_of(node)
    return (
        node in placed and isinstance(value, torch.Tensor) and (value.is_floating_point() or value.dtype == torch.bool)
    )


def _decides(node: fx.Node, counted: set[fx.Node]) -> bool:
    """Whether a call answers a question about a count over all samples."""
    asks = is_aten(node, *_COMPARISONS) and value_of(node).dtype == torch.bool
    return asks and not counted.isdisjoint(node.all_input_nodes)


def _executed(program: Program, runs: tuple[_Run, ...], differentiable: bool = False) -> Iterator[fx.Node]:
    """Every call after it ran in all of `runs`; values are kept until their last use."""
    kept = set(output_nodes(program.graph.graph))
    last: dict[fx.Node, fx.Node] = {}
    for node in calls(program.graph.graph):
        last.update(dict.fromkeys(node.all_input_nodes, node))
    spent: dict[fx.Node, list[fx.Node]] = {}
    for source, user in last.items():
        if source not in kept:
            spent.setdefault(user, []).append(source)
    for node in calls(program.graph.graph):
        with torch.set_grad_enabled(differentiable):
            for run in runs:
                run.call(node)
        yield node
        for source in spent.get(node, ()):
            for run in runs:
                run.forget(source)


def _joins(node: fx.Node, axes: SampleAxes, runs: tuple[_Run, _Run, _Run], tolerance: float) -> bool:
    axis = axes.of(node)
    if axis is None:
        return True
    whole, head, tail = (split_samples(run.known[node], axis) for run in runs)
    joined = torch.cat([head, tail], dim=axis.axis + 1)
    return joined.shape == whole.shape and _close(joined, whole, tolerance)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return False
    if not finite.any():
        return True
    scale = b[finite].abs().max().item()
    return bool((a[finite] - b[finite]).abs().max().item() <= tolerance * scale + 1e-300)


# --- sums -------------------------------------------------------------------------------------------------------------


def additivity(program: Program, state: State, batch: Batch, more: Batch | None = None) -> tuple[str, ...]:
    """Check that loss, count and gradients of two parts of a batch add up to those of the whole: what the step relies
    on. The whole is the batch, other samples, and its first granule again, so that different ones meet, and equal
    ones do."""
    more = more or {name: tensor[:0] for name, tensor in batch.items()}
    whole = {name: torch.cat([tensor, more[name], tensor[: program.granule]]) for name, tensor in batch.items()}
    keys = _keys(_samples(batch) + _samples(more))
    keys = torch.cat([keys, keys[: program.granule]])

    def compare(double: bool) -> tuple[str, ...]:
        runs = _cut(program, state, whole, keys, _samples(batch), double)
        sums, gradients = zip(*(_sums_and_gradients(program, run) for run in runs), strict=True)
        return _not_sums(program, sums, 1e-7 if double else 1e-3) or _not_gradients(program, gradients, double)

    return _precisely(compare)


def _not_sums(program: Program, sums: tuple[list[float], ...], tolerance: float) -> tuple[str, ...]:
    return tuple(
        f"{_describe(node)}: the {kind.value} of a batch is not the sum over its parts"
        for (kind, node), whole, head, tail in zip(sum_nodes(program), *sums, strict=True)
        if not _adds_up(whole, head, tail, tolerance)
    )


def _adds_up(whole: float, head: float, tail: float, tolerance: float) -> bool:
    if not (math.isfinite(whole) and math.isfinite(head + tail)):
        return math.isfinite(whole) == math.isfinite(head + tail)  # A part may have nothing to divide by.
    return abs(head + tail - whole) <= tolerance * max(abs(whole), abs(head), abs(tail))


def _not_gradients(program: Program, gradients: tuple[_Gradients, ...], double: bool) -> tuple[str, ...]:
    """Parameters whose gradient over a batch is not the sum over its parts; what is below `least` is rounding."""
    tolerance, least = (1e-7, 1e-6) if double else (1e-3, 1e-2)
    largest = max((_largest(gradient) for each in gradients for gradient in each.values()), default=0.0)
    found = []
    for name in gradients[0]:
        whole, head, tail = (each[name] for each in gradients)
        scale = max(_largest(whole), _largest(head), _largest(tail), least * largest)
        finite = torch.equal(torch.isfinite(head + tail), torch.isfinite(whole))
        if not finite or _largest(head + tail - whole) > tolerance * scale:
            found.append(name)
    if not found:
        return ()
    foreign = dict.fromkeys(_describe(node) for node in calls(program.graph.graph) if is_foreign(node))
    among = f"; the model calls {', '.join(list(foreign)[:3])}" if foreign else ""
    # The last one is nearest to the loss, and so to the operator.
    return (f"the gradient of {found[-1]} over a batch is not the sum over its parts{among}",)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite element."""
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _sums_and_gradients(program: Program, run: _Run) -> tuple[list[float], _Gradients]:
    for _ in _executed(program, (run,), differentiable=True):
        pass
    values = {kind: run.value(node) for kind, node in sum_nodes(program)}
    loss = values[ResultKind.LOSS]
    wanted = list(run.trained.values())
    try:
        found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
    except RuntimeError:
        if run.double:
            raise  # It may know single precision alone.
        found = [None] * len(wanted)  # An operator has no derivative, which `differentiate` refuses by name.
    gradients = {name: torch.zeros_like(tensor) if gradient is None else gradient
                 for (name, tensor), gradient in zip(run.trained.items(), found, strict=True)}  # fmt: skip
    run.known.clear()  # Parameters in double precision, of which one set is enough at a time.
    run.trained.clear()
    return [float(value.detach()) for value in values.values()], gradients


def _sums(program: Program, run: _Run) -> list[float]:
    for _ in _executed(program, (run,)):
        pass
    return [float(run.value(node)) for _, node in sum_nodes(program)]


def _doubled(program: Program, state: State, batch: Batch) -> dict[ResultKind, tuple[float, float]]:
    """Loss and count of a batch, and of the same samples given twice."""
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    keys = _keys(_samples(batch))

    def sums(double: bool) -> tuple[list[float], list[float]]:
        one = _Run(program, state, batch, keys, double)
        return _sums(program, one), _sums(program, _Run(program, state, twice, torch.cat([keys, keys]), double))

    pairs = zip(*_precisely(sums), strict=True)
    return {kind: pair for (kind, _), pair in zip(sum_nodes(program), pairs, strict=True)}


def _refuse_mean(sums: Mapping[ResultKind, tuple[float, float]], coupled: bool) -> None:
    """Refuse a loss or a count that stays the same when the same samples come twice.

    Where operators couple samples, the mean of a granule with the count one is a sum over granules, and fine; with a
    count that grows it is not.
    """
    same = {kind: _equal(one, two) and one != 0.0 for kind, (one, two) in sums.items()}
    if coupled and not (same[ResultKind.LOSS] and not same[ResultKind.COUNT]):
        return
    for kind, (one, two) in sums.items():
        if same[kind]:
            raise CaptureError(
                f"model: the same samples given twice change the {kind.value} from {one:.6g} to {two:.6g} instead of "
                "doubling it; a model returns (loss sum, count), not a mean"
            )


def _equal(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b))
