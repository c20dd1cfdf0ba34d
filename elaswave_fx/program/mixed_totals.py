"""Terms of loss or count that are no sums over samples, whatever they are in a trial.

    l.sum() + relu(abs(h) - 3).mean()        ->  "aten.mean.default in the model, a mean over samples in the loss, …"
    l.sum() + relu(-self.k)                  ->  "aten.relu.default in the model, a value of no sample in the loss, …"
    l.sum() + beta(self.steps) * kl.mean()   ->  the mean, whatever beta is at first
    l.sum() + h.mean() * h.shape[0]          ->  nothing

A penalty that none of the examples has is 0 there, and so is its effect on `additivity`. What loss and count are linear
in, see `totals.py`, is therefore replaced: by sums that add up, by equal means, by equal values of no sample.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from elaswave_fx.program.batch_run import Batch, State, count_samples, cut_batch, executed, precisely, trial_keys
from elaswave_fx.program.coupling_rules import describe
from elaswave_fx.program.ir import Program, ResultKind, value_of
from elaswave_fx.program.sums import sum_holds
from elaswave_fx.program.totals import Term, sum_nodes, terms


def means_among_sums(program: Program, state: State, batch: Batch) -> tuple[str, ...]:
    """Reasons why loss and count are no sums over samples; empty if they are."""
    kinds = terms(program)
    if not kinds:
        return ()
    needed = _needed(program, kinds)

    def unlike(among: Collection[fx.Node]) -> list[ResultKind]:
        """Which of loss and count are no sums if these terms alone are not 0."""

        def compare(double: bool) -> list[ResultKind]:
            runs = cut_batch(program, state, batch, trial_keys(count_samples(batch)), program.granule, double)
            draws = torch.Generator().manual_seed(0)
            given = {node: _values(node, kind if node in among else None, draws, double)
                     for node, kind in kinds.items()}  # fmt: skip
            for _ in executed(program, runs, only=needed, given=given):
                pass
            tolerance = 1e-7 if double else 1e-3
            return [kind for kind, node in sum_nodes(program)
                    if not sum_holds(*(float(run.value(node)) for run in runs), tolerance=tolerance)]  # fmt: skip

        return precisely(compare)

    found = unlike(kinds)
    if not found:
        return ()
    common = [node for node, kind in kinds.items() if kind == Term.COMMON]
    added = [node for node in common if unlike([node])]
    factors = [node for node in common if node not in added]
    means = [node for node, kind in kinds.items() if kind == Term.MEAN and unlike([node, *factors])]
    of = found[0].value
    reasons = (f"{describe(node)}, {kinds[node].value} in the {of}, which is their sum{_cure(kinds[node])}"
               for node in (*means, *added))  # fmt: skip
    return tuple(reasons) or (f"the {of} of a batch is not the sum over its parts",)


def _cure(kind: Term) -> str:
    return ": times x.shape[0] it is one" if kind == Term.COMMON else ""


def _needed(program: Program, replaced: Collection[fx.Node]) -> set[fx.Node]:
    """The calls that loss and count take, besides those that only replaced ones need."""
    found: set[fx.Node] = set()
    stack = [node for _, node in sum_nodes(program)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [] if node in replaced else node.all_input_nodes
    return found


def _values(node: fx.Node, kind: Term | None, draws: torch.Generator, double: bool) -> tuple[torch.Tensor, ...]:
    """Values for the batch and its parts: whole numbers, which a cast to integers keeps."""
    value = value_of(node)
    shape, dtype = tuple(value.shape), torch.float64 if double and value.is_floating_point() else value.dtype
    if kind is None:
        return (torch.zeros(shape, dtype=dtype),) * 3
    head, tail = (torch.randint(100, 120, shape, generator=draws).to(dtype) for _ in range(2))
    return (head + tail, head, tail) if kind == Term.SUM else (head, head, head)
