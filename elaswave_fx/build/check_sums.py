"""Check that loss, count and gradients of a cached program add up over the samples of this run.

weights that are divided by their mean, and were all 1 when it was captured   ->  False

At capture `program/additivity.py` checks the graph in double precision, and can name the operator; a cached program has
only its units. A program that fails here is captured again, and judged there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elaswave_fx.build.unit_sequence import UnitSequence
from elaswave_fx.errors import ExecError
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.sums import not_summed, sum_holds
from elaswave_fx.program.trial_values import told_apart

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_LEAST = 1e-2
"""Fraction of the largest gradient, below which differences are rounding."""

Batch = Mapping[str, torch.Tensor]


def adds_up(
    artifact: Artifact,
    constants: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    batches: tuple[Batch, Batch],
) -> bool:
    """Whether two batches of whole granules together give the sums and gradients that they give separately. False if
    they do not run. `state`: parameters and buffers by name."""
    if artifact.batch_coupled:
        return True  # it runs granule by granule
    try:
        return _adds_up(artifact, constants, state, batches)
    except (RuntimeError, ExecError):
        return False  # labels out of range, for example, which the capture reports


def _adds_up(
    artifact: Artifact,
    constants: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    batches: tuple[Batch, Batch],
) -> bool:
    units = UnitSequence.of(artifact, constants, state)
    cut, more = (len(next(iter(batch.values()))) for batch in batches)
    first, second = told_apart(batches[0], 1), told_apart(batches[1], 1 + cut)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    keys = torch.arange(1, cut + more + 1, dtype=torch.int64)
    runs = [units.step(both, keys), units.step(first, keys[:cut]), units.step(second, keys[cut:])]
    tolerance = max(_TOLERANCE.get(info.torch_dtype, 0.0) for info in artifact.params)
    sums = (map(float, each) for each in zip(*((run.loss, run.count) for run in runs), strict=True))
    if not all(sum_holds(whole, head, tail, tolerance) for whole, head, tail in sums):
        return False
    return not not_summed([run.gradients for run in runs], tolerance, _LEAST)
