"""Do loss, count and gradients of a cached program add up over the samples of this run? It was tried on others.

weights that are divided by their mean, and were all 1 when it was captured   ->  False

At capture `program/additivity.py` asks the same of the graph, in double precision, and can say which operator it is;
what a program from the cache has are its units. What does not add up here is captured again, to be judged there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elaswave_fx.build.unit_sequence import UnitSequence
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.program.sums import not_summed, sum_holds
from elaswave_fx.program.trial_values import told_apart

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
_LEAST = 1e-2
"""Of the largest gradient: what is below it is rounding."""

Batch = Mapping[str, torch.Tensor]


def adds_up(
    artifact: Artifact,
    constants: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    batches: tuple[Batch, Batch],
) -> bool:
    """Whether two batches of whole granules give, together, the sums and gradients that they give one by one; not if
    they do not run.

    Args:
        state: parameters and buffers by name.
    """
    if artifact.batch_coupled:
        return True  # It runs granule by granule.
    try:
        return _adds_up(artifact, constants, state, batches)
    except RuntimeError:
        return False  # Labels out of range, say, of which the capture tells.


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
