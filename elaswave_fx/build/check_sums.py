"""Do loss, count and gradients of a cached program add up over the samples of this run? It was tried on others.

weights that are divided by their mean, and were all 1 when it was captured   ->  False

At capture `program/additivity.py` asks the same of the graph, in double precision, and can say which operator it is;
what a program from the cache has are its units. What does not add up here is captured again, to be judged there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from elaswave_fx.build.unit_sequence import SequenceStep, UnitSequence
from elaswave_fx.program.artifact import Artifact
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
    held = {info.name: state[info.name].detach().to(info.torch_dtype) for info in artifact.tensors}
    units = UnitSequence(artifact, constants, held.__getitem__, halves=artifact.is_split)
    samples = [len(next(iter(batch.values()))) for batch in batches]
    head, tail = told_apart(batches[0], 1), told_apart(batches[1], 1 + samples[0])
    whole = {name: torch.cat([head[name], tail[name]]) for name in head}
    keys = torch.arange(1, sum(samples) + 1, dtype=torch.int64)
    one = units.step(whole, keys)
    parts = units.step(head, keys[: samples[0]]), units.step(tail, keys[samples[0] :])
    tolerance = max(_TOLERANCE.get(info.torch_dtype, 0.0) for info in artifact.params)
    return _sums_add_up(one, parts, tolerance) and _gradients_add_up(one, parts, tolerance)


def _sums_add_up(whole: SequenceStep, parts: tuple[SequenceStep, SequenceStep], tolerance: float) -> bool:
    return all(
        _is_near(float(all_), float(head) + float(tail), max(abs(float(head)), abs(float(tail))), tolerance)
        for all_, head, tail in (
            (whole.loss, parts[0].loss, parts[1].loss),
            (whole.count, parts[0].count, parts[1].count),
        )
    )


def _is_near(whole: float, parts: float, largest: float, tolerance: float) -> bool:
    if not (math.isfinite(whole) and math.isfinite(parts)):
        return math.isfinite(whole) == math.isfinite(parts)
    return abs(parts - whole) <= tolerance * max(abs(whole), largest)


def _gradients_add_up(whole: SequenceStep, parts: tuple[SequenceStep, SequenceStep], tolerance: float) -> bool:
    least = _LEAST * max((float(each.norm()) for each in whole.gradients.values()), default=0.0)
    for name, gradient in whole.gradients.items():
        head, tail = (part.gradients.get(name, torch.zeros(())) for part in parts)
        scale = max(float(gradient.norm()), float(head.norm()), float(tail.norm()), least)
        if float((head.double() + tail.double() - gradient.double()).norm()) > tolerance * scale:
            return False
    return True
