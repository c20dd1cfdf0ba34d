"""Whether loss, count and gradients of the parts of a batch add up to those of the whole, as a step requires.

a backward pass that looks around  -> "the gradient of embed.weight over a batch is not the sum over its parts"
loss = mean over the batch         -> CaptureError
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elaswave_fx.errors import CaptureError
from elaswave_fx.program.batch_run import (
    Batch,
    BatchRun,
    State,
    count_samples,
    cut_batch,
    executed,
    precisely,
    trial_keys,
)
from elaswave_fx.program.coupling_rules import describe
from elaswave_fx.program.ir import Program, ResultKind, calls, is_foreign
from elaswave_fx.program.sums import not_summed, sum_holds
from elaswave_fx.program.totals import sum_nodes
from elaswave_fx.program.trial_values import told_apart

_Gradients = dict[str, torch.Tensor]


def additivity(program: Program, state: State, batch: Batch, more: Batch | None = None) -> tuple[str, ...]:
    """Reasons why loss, count or gradients of two parts of a batch do not add up to those of the whole; empty if they
    do. The whole is the batch, other samples, and its first granule again: it has different samples and equal ones."""
    more = more or {name: tensor[:0] for name, tensor in batch.items()}
    batch, more = told_apart(batch, 1), told_apart(more, 1 + count_samples(batch))
    whole = {name: torch.cat([tensor, more[name], tensor[: program.granule]]) for name, tensor in batch.items()}
    keys = trial_keys(count_samples(batch) + count_samples(more))
    keys = torch.cat([keys, keys[: program.granule]])

    def compare(double: bool) -> tuple[str, ...]:
        runs = cut_batch(program, state, whole, keys, count_samples(batch), double)
        sums, gradients = zip(*(_sums_and_gradients(program, run) for run in runs), strict=True)
        return _not_sums(program, sums, 1e-7 if double else 1e-3) or _not_gradients(program, gradients, double)

    return precisely(compare)


def _not_sums(program: Program, sums: tuple[list[float], ...], tolerance: float) -> tuple[str, ...]:
    return tuple(
        f"{describe(node)}: the {kind.value} of a batch is not the sum over its parts"
        for (kind, node), whole, head, tail in zip(sum_nodes(program), *sums, strict=True)
        if not sum_holds(whole, head, tail, tolerance)
    )


def _not_gradients(program: Program, gradients: tuple[_Gradients, ...], double: bool) -> tuple[str, ...]:
    found = not_summed(gradients, *((1e-7, 1e-6) if double else (1e-3, 1e-2)))
    if not found:
        return ()
    foreign = dict.fromkeys(describe(node) for node in calls(program.graph.graph) if is_foreign(node))
    among = f"; the model calls {', '.join(list(foreign)[:3])}" if foreign else ""
    # The last parameter is nearest to the loss, and so to the operator.
    return (f"the gradient of {found[-1]} over a batch is not the sum over its parts{among}",)


def _sums_and_gradients(program: Program, run: BatchRun) -> tuple[list[float], _Gradients]:
    for _ in executed(program, (run,), differentiable=True):
        pass
    values = {kind: run.value(node) for kind, node in sum_nodes(program)}
    loss = values[ResultKind.LOSS]
    wanted = list(run.trained.values())
    try:
        found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
    except RuntimeError:
        if run.double:
            raise  # an operator may support single precision only
        found = [None] * len(wanted)  # `differentiate` refuses an operator without a derivative by name
    gradients = {name: torch.zeros_like(tensor) if gradient is None else gradient
                 for (name, tensor), gradient in zip(run.trained.items(), found, strict=True)}  # fmt: skip
    run.known.clear()  # frees parameters in double precision: one set at a time is enough
    run.trained.clear()
    return [float(value.detach()) for value in values.values()], gradients


def _sums(program: Program, run: BatchRun) -> list[float]:
    for _ in executed(program, (run,)):
        pass
    return [float(run.value(node)) for _, node in sum_nodes(program)]


def doubled(program: Program, state: State, batch: Batch) -> dict[ResultKind, tuple[float, float]]:
    """Loss and count of a batch, and of the same samples given twice."""
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    keys = trial_keys(count_samples(batch))

    def sums(double: bool) -> tuple[list[float], list[float]]:
        one = BatchRun(program, state, batch, keys, double)
        return _sums(program, one), _sums(program, BatchRun(program, state, twice, torch.cat([keys, keys]), double))

    pairs = zip(*precisely(sums), strict=True)
    return {kind: pair for (kind, _), pair in zip(sum_nodes(program), pairs, strict=True)}


_LEAST_SUM = 1e-5
"""A loss nearer to zero is rounding: 1 - correlation, of two samples."""


def refuse_mean(sums: Mapping[ResultKind, tuple[float, float]], coupled: bool, granule: int) -> None:
    """Refuse a loss or a count that stays the same when the same samples come twice.

    The mean of a granule with the count one is a sum over granules, and fine where samples belong together: operators
    couple them, or a granule is asked for. With a count that grows it is not.
    """
    same = {kind: _equal(one, two) and abs(one) > _LEAST_SUM for kind, (one, two) in sums.items()}
    if coupled and not (same[ResultKind.LOSS] and not same[ResultKind.COUNT]):
        return
    if granule > 1 and all(same.values()) and abs(sums[ResultKind.COUNT][0] - 1) < _LEAST_SUM:
        return
    for kind, (one, two) in sums.items():
        if same[kind]:
            raise CaptureError(
                f"model: the same samples given twice change the {kind.value} from {one:.6g} to {two:.6g} instead of "
                "doubling it; a model returns (loss sum, count), not a mean: sum over samples (reduction='sum') and "
                "count what is summed; or, for a loss of all samples of a step together, return the count 1 with "
                "parallel.granule=the samples of a step"
            )


def _equal(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3 * max(abs(a), abs(b))
