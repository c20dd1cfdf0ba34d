"""Detection of operators that couple the samples of a batch, and of losses that are not sums over samples.

An operator is batch-coupled when one sample's result, or its share of a gradient, depends on another sample. Rules find
the known operators by name and shape. A trial in double precision, the whole batch against its parts, finds unknown
ones. A program with coupled operators runs granule by granule.

    batch_norm over [B, 16, 8, 8]      -> "aten._native_batch_norm_legit.no_stats in stem_norm"
    logits = a @ b.t(), [B, B]         -> "aten.matmul.default in the model"
    rows sorted by expert, and back    -> nothing, but no unit ends between the two: `Couplings.shuffled`
    a backward pass that looks around  -> "the gradient of embed.weight over a batch is not the sum over its parts"
    loss = mean over the batch         -> CaptureError
"""

from __future__ import annotations

import math
from dataclasses import replace

from elaswave_fx.program.additivity import additivity, doubled, refuse_mean
from elaswave_fx.program.batch_run import Batch, State
from elaswave_fx.program.coupling_rules import coupled_by_rule
from elaswave_fx.program.coupling_trial import Couplings, coupled_by_trial
from elaswave_fx.program.ir import Program
from elaswave_fx.program.later_buffers import later_states
from elaswave_fx.program.mixed_totals import means_among_sums
from elaswave_fx.program.samples import locate_samples
from elaswave_fx.program.totals import bent_totals


def find_couplings(program: Program, state: State, batch: Batch, more: Batch | None = None) -> Couplings:
    """The couplings between samples of a program.

    Args:
        state: parameters and buffers by name; what counters in buffers bring in later is tried too.
        batch: at least two granules.
        more: other granules, whose sums and gradients are compared with those of `batch`: a mean over labels, or over
            a router's choice, is a sum where all parts have equally many.

    Raises:
        CaptureError: the loss is a mean, not a sum: a model returns (loss sum, count).
    """
    found = _couplings_at(program, state, batch, more)
    for later in later_states(program, state):
        if not found.reasons and _runs(program, later, batch):
            then = _couplings_at(program, later, batch, more)
            found = Couplings(then.reasons, found.shuffled | then.shuffled)
    return found


def _runs(program: Program, state: State, batch: Batch) -> bool:
    """Whether the program runs there: a table may end before a later step."""
    try:
        sums = doubled(program, state, batch)
    except (RuntimeError, IndexError, ValueError):
        return False
    return all(math.isfinite(each) for pair in sums.values() for each in pair)


def _couplings_at(program: Program, state: State, batch: Batch, more: Batch | None) -> Couplings:
    by_rule = coupled_by_rule(program)
    found = Couplings(by_rule) if by_rule else coupled_by_trial(program, state, batch)
    if locate_samples(program).symbol is None:
        return found
    not_additive = () if found.reasons else additivity(program, state, batch, more)
    if found.reasons or not_additive:
        refuse_mean(doubled(program, state, batch), bool(found.reasons), program.granule)
    reasons = found.reasons or not_additive or bent_totals(program)
    return replace(found, reasons=reasons or means_among_sums(program, state, batch))
