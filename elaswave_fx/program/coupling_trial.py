"""Trial of a whole batch against two parts, call by call, in double precision. It finds calls whose parts do not join
to the whole, and values that decide for all samples together.

    center(x), an operator of one's own    -> "mine.center.default in the model"
    rows sorted by expert, and back        -> nothing, but no unit ends between the two: `Couplings.shuffled`
    torch.where((x > 2).any(), 2 * h, h)   -> "aten.where.self in the model", though no sample of the trial is above 2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from elaswave_fx.program.batch_run import (
    Batch,
    BatchRun,
    State,
    count_samples,
    cut_batch,
    executed,
    is_close,
    precisely,
    trial_keys,
)
from elaswave_fx.program.coupling_rules import describe, sorts_samples
from elaswave_fx.program.dependence import Nature, natures, values_read
from elaswave_fx.program.ir import (
    Program,
    calls,
    is_aten,
    is_foreign,
    is_getitem,
    output_nodes,
    placeholders,
    value_of,
)
from elaswave_fx.program.other_values import joins_for_other_values, parts_join
from elaswave_fx.program.positions import READS_ROWS, Positions, is_of_integers, rows_written
from elaswave_fx.program.samples import SampleAxes, locate_samples

_GROUPED = "grouped_mm"
"""Part of the names of products of each expert's rows, which begin at an offset: torch's and transformers'."""
_INTEGER_ARITHMETIC = (
    "aten.add", "aten.clamp", "aten.div", "aten.floor_divide", "aten.maximum", "aten.minimum", "aten.mul",
    "aten.remainder", "aten.rsub", "aten.sub", "aten.where",
)  # fmt: skip

_SEARCHES = ("aten.searchsorted", "aten.bucketize")


@dataclass(frozen=True)
class Couplings:
    """`reasons`: why the program has to run granule by granule; empty when samples are independent. `shuffled`: values
    whose row order depends on the whole batch, until the inverse order undoes it."""

    reasons: tuple[str, ...] = ()
    shuffled: frozenset[fx.Node] = frozenset()


def coupled_by_trial(program: Program, state: State, batch: Batch) -> Couplings:
    """Run a batch whole and in two parts, call by call, and name the first operators whose parts do not join to the
    whole.

    Where samples are sorted, other batches are tried too, as any order has to be undone. Parameters are near those of
    `state`, not equal to them; see `perturbed`.
    """
    axes = locate_samples(program)
    if axes.symbol is None or count_samples(batch) < 2:
        return Couplings()
    try:
        found = _try_parts(program, axes, state, batch)
    except RuntimeError as error:
        return Couplings((f"the program fails for a part of a batch: {str(error).splitlines()[0]}",))
    for other in _others_like(batch) if _sorts(program, axes) else ():
        with contextlib.suppress(RuntimeError, IndexError):  # a program need not accept values outside the data
            more = _try_parts(program, axes, state, other)
            found = Couplings(found.reasons or more.reasons, found.shuffled | more.shuffled)
    return found


def _sorts(program: Program, axes: SampleAxes) -> bool:
    return any(sorts_samples(node, axes) for node in calls(program.graph.graph))


def _others_like(batch: Batch) -> Iterator[Batch]:
    """Batches of the same values in other combinations: permuted, and with one value throughout a sample, so that a
    router sends all of it one way."""
    yield {name: tensor.roll(1, 1) if tensor.dim() > 1 else tensor for name, tensor in batch.items()}
    yield {name: tensor.flatten(1)[:, :1].expand_as(tensor.flatten(1)).reshape(tensor.shape).contiguous()
           if tensor.dim() > 1 else tensor for name, tensor in batch.items()}  # fmt: skip


def _try_parts(program: Program, axes: SampleAxes, state: State, batch: Batch) -> Couplings:
    return precisely(lambda double: _compare_parts(program, axes, _parts(program, state, batch, double), double))


def _parts(program: Program, state: State, batch: Batch, double: bool) -> tuple[BatchRun, BatchRun, BatchRun]:
    """Runs of a batch, of its first granule, and of the rest."""
    samples = count_samples(batch)
    first = program.granule if program.granule < samples else samples // 2
    return cut_batch(program, state, batch, trial_keys(samples), first, double)


def _compare_parts(
    program: Program, axes: SampleAxes, runs: tuple[BatchRun, BatchRun, BatchRun], double: bool
) -> Couplings:
    tolerance = 1e-8 if double else 2e-3
    kinds = natures(program)
    reasons: list[str] = []
    broken: set[fx.Node] = set()
    shuffled: set[fx.Node] = set()
    shared: set[fx.Node] = set()
    counted: set[fx.Node] = set()
    positions = Positions(program, axes)
    ranks: set[fx.Node] = set()
    of_samples = {node for node in placeholders(program.graph.graph) if axes.of(node) is not None}
    for node in executed(program, runs):
        weighs = _weighs(node, counted)
        if (
            _is_shared(node, axes, runs, shared, of_samples, tolerance)
            or _decides(node, counted)
            or (weighs and axes.of(node) is None)
        ):
            shared.add(node)
        elif _is_counted(node, axes, runs, counted | shared, of_samples) or _is_spread(node, axes, counted, of_samples):
            counted.add(node)
        if any(source in of_samples and isinstance(value_of(source), torch.Tensor) for source in values_read(node)):
            of_samples.add(node)
        ranked = _reads_rank(node, axes, ranks, of_samples, positions)
        if (ranked and _may_be_ranks(node)) or _ranks_samples(node, axes, shuffled):
            ranks.add(node)
            ranked = False
        touched = axes.of(node) is not None and (weighs or not shared.isdisjoint(values_read(node)))
        disordered = sorts_samples(node, axes) or not shuffled.isdisjoint(node.all_input_nodes)
        if kinds[node] != Nature.MAIN and not disordered and not touched and not ranked:
            # Positions in the batch and the like matter only where they reach the samples' values.
            positions.see(node, joins=_joins_always(node, axes, runs, tolerance))
            continue
        touched |= positions.decide(node)
        if not broken.isdisjoint(node.all_input_nodes):
            broken.add(node)
        elif ranked:
            broken.add(node)
            reasons.append(f"{describe(node)}, by the ranks of samples in their batch")
        elif disordered and (axes.of(node) is None or not _joins(node, axes, runs, tolerance)):
            shuffled.add(node)
        elif touched or not (disordered or _joins_always(node, axes, runs, tolerance)):
            broken.add(node)
            reasons.append(describe(node))
    if not shuffled.isdisjoint(output_nodes(program.graph.graph)):  # type: ignore[arg-type]
        reasons += [f"{describe(node)}, whose order is not undone" for node in shuffled if sorts_samples(node, axes)]
    return Couplings(tuple(reasons), frozenset(shuffled))


def _is_shared(
    node: fx.Node,
    axes: SampleAxes,
    runs: tuple[BatchRun, BatchRun, BatchRun],
    shared: set[fx.Node],
    of_samples: set[fx.Node],
    tolerance: float,
) -> bool:
    """Whether a value is common to all samples and made of theirs, such as a norm over the batch, or of such values, as
    is a threshold of it. Its effect on other samples may exceed that in the trial, and it may be 0 there: a sum over
    samples of a rare class.

    Integers pass, see `_is_counted`.
    """
    value = runs[0].known.get(node)
    if axes.of(node) is not None or not isinstance(value, torch.Tensor):
        return False
    if not shared.isdisjoint(values_read(node)):
        return value.is_floating_point() or value.dtype == torch.bool
    is_float = value.is_floating_point() or value.is_complex()
    if (is_float or value.dtype == torch.bool) and _brings_together(node, axes, of_samples):
        return True
    parts = [run.known[node] for run in runs[1:]]
    differs = any(part.shape != value.shape or not is_close(part, value, tolerance) for part in parts)
    return is_float and differs


def _is_counted(
    node: fx.Node,
    axes: SampleAxes,
    runs: tuple[BatchRun, BatchRun, BatchRun],
    common: set[fx.Node],
    of_samples: set[fx.Node],
) -> bool:
    """Whether a value is a count over all samples, or is made of values `common` to all. Offsets by counts, such as an
    expert's first row, couple nothing; a decision, a factor or an index by a count does (`_decides`, `_weighs`)."""
    value = runs[0].known.get(node)
    if axes.of(node) is not None or not isinstance(value, torch.Tensor):
        return False
    if not is_of_integers(value):
        return False
    parts = [run.known[node] for run in runs[1:]]
    if any(part.shape != value.shape for part in parts):
        return False  # rows of the samples in another order
    if _brings_together(node, axes, of_samples) or not common.isdisjoint(node.all_input_nodes):
        return True
    return not all(torch.equal(part, value) for part in parts)


def _is_spread(node: fx.Node, axes: SampleAxes, counted: set[fx.Node], of_samples: set[fx.Node]) -> bool:
    """Whether a value is a count over all samples given to each of them, or is computed from it and the sample."""
    value = value_of(node)
    if axes.of(node) is None or not isinstance(value, torch.Tensor) or value.is_floating_point():
        return False
    made_of = [source for source in values_read(node) if isinstance(value_of(source), torch.Tensor)]
    if counted.isdisjoint(made_of):
        return False
    return is_aten(node, *_INTEGER_ARITHMETIC) or all(each in counted or each not in of_samples for each in made_of)


def _brings_together(node: fx.Node, axes: SampleAxes, of_samples: set[fx.Node]) -> bool:
    """Whether a call combines the samples' values into one."""
    sources = (source for source in values_read(node) if source in of_samples)
    return not axes.mixed(node) and any(axes.of(source) is not None for source in sources)


def _ranks_samples(node: fx.Node, axes: SampleAxes, shuffled: set[fx.Node]) -> bool:
    """Whether a call gives the samples' order: the indices of a sort, or places among sorted values."""
    if is_getitem(node):
        return node.args[1] == 1 and sorts_samples(node.args[0], axes)  # type: ignore[arg-type]
    if is_aten(node, *_SEARCHES):
        return axes.of(node) is not None and not shuffled.isdisjoint(node.all_input_nodes)
    return is_aten(node, "aten.argsort") and sorts_samples(node, axes)


def _reads_rank(
    node: fx.Node, axes: SampleAxes, ranks: set[fx.Node], of_samples: set[fx.Node], positions: Positions
) -> bool:
    """Whether a call computes with ranks of samples in their batch.

    Rows of the samples that are taken, or written, in an order couple nothing once it is undone. What has no rows of
    the samples, such as a table of weights by rank, is not in an order.
    """
    if ranks.isdisjoint(values_read(node)):
        return False
    if is_foreign(node):
        return of_samples.isdisjoint(set(values_read(node)) - ranks)  # else the trial tells whether rows come back
    rows = node.args[0] if is_aten(node, *READS_ROWS) else rows_written(node)
    if not isinstance(rows, fx.Node) or rows in ranks:
        return True
    return rows not in of_samples and (axes.of(rows) is None or rows in positions.placed)


def _may_be_ranks(node: fx.Node) -> bool:
    """Whether a value is made of integers, or is what a sort returns."""
    value = value_of(node)
    return not isinstance(value, torch.Tensor) or is_of_integers(value)


def _decides(node: fx.Node, counted: set[fx.Node]) -> bool:
    """Whether a call asks something of a count over all samples."""
    value = value_of(node)
    asks = isinstance(value, torch.Tensor) and value.dtype == torch.bool
    return asks and not counted.isdisjoint(values_read(node))


def _weighs(node: fx.Node, counted: set[fx.Node]) -> bool:
    """Whether a call computes with a count over all samples, or indexes with it: (n - 6).clamp(min=0) may be 0
    throughout the trial, and y.max() the same class in every trial batch."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or _GROUPED in str(node.target):
        return False
    if value.is_floating_point() or value.is_complex():
        return not counted.isdisjoint(values_read(node))
    return is_aten(node, *READS_ROWS) and not counted.isdisjoint(node.all_input_nodes[1:])


def _joins(node: fx.Node, axes: SampleAxes, runs: tuple[BatchRun, BatchRun, BatchRun], tolerance: float) -> bool:
    axis = axes.of(node)
    return axis is None or parts_join([run.known[node] for run in runs], axis, tolerance)


def _joins_always(node: fx.Node, axes: SampleAxes, runs: tuple[BatchRun, BatchRun, BatchRun], tolerance: float) -> bool:
    return _joins(node, axes, runs, tolerance) and joins_for_other_values(node, axes, runs, tolerance)
