"""The inputs of a rank's tile: loaded ahead of their step, and hashed as they are fed.

    feed = InputFeed(config, artifact, plan, rank, source, first_step=0)
    feed.take(7)  ->  StepInputs(inputs {"input_ids": int64 [8, 64]}, content (…, …))

The content of a step is the sum, modulo 2^128, of a hash of every sample of every input. Each is vouched for once, by
the rank that runs the first unit that reads it, so the sum over ranks does not depend on who computes what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from elaswave_fx.config.types import Config
from elaswave_fx.data import Prefetcher, Source, load_ranges
from elaswave_fx.data.dataset import Batch
from elaswave_fx.plan.plan import Plan
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.engine import input_names, vouched_inputs

Content = tuple[int, int]
"""A sum of hashes modulo 2^128, as its low and high 64 bits."""

NOTHING: Content = (0, 0)
_LOW = (1 << 64) - 1


@dataclass(frozen=True)
class StepInputs:
    """What a rank's units read in a step, and the hash of what it vouches for."""

    inputs: dict[str, torch.Tensor]
    content: Content = NOTHING


class InputFeed:
    """Of one tile; a rank whose units read no inputs gets nothing. One thread owns it."""

    def __init__(
        self, config: Config, artifact: Artifact, plan: Plan, rank: int, source: Source, first_step: int
    ) -> None:
        tile = plan.tile(rank)  # type: ignore[arg-type]
        self._names = input_names(artifact, plan, rank)
        self._vouched = vouched_inputs(artifact, plan, rank)
        self._config, self._spans, self._source = config, tile.spans, source
        self._ahead = Prefetcher(self._load, first_step, config.steps) if self._names else None

    def await_batch(self, step: int, timeout_s: float) -> bool:
        """Whether what step `step` reads is here, waiting for so long for it."""
        return self._ahead is None or self._ahead.await_ready(step, timeout_s)

    def next_batch(self, step: int) -> StepInputs:
        """What training step `step` reads."""
        return self._ahead.take(step) if self._ahead is not None else StepInputs({})

    def held_out(self, number: int) -> dict[str, torch.Tensor]:
        """What the held-out batch `number` gives this rank."""
        if self._ahead is None:
            return {}
        return self._select(load_ranges(self._source.evaluation, self._source.held_out, self._positions(number)))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _load(self, step: int) -> StepInputs:
        positions = self._positions(step)
        batch = load_ranges(self._source.dataset, self._source.train, positions)
        return StepInputs(self._select(batch), content_of({name: batch[name] for name in self._vouched}, positions))

    def _positions(self, step: int) -> list[range]:
        """Of the tile's samples, in the run."""
        first = step * self._config.global_batch
        return [range(first + span.lo, first + span.hi) for span in self._spans]

    def _select(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: batch[name] for name in self._names}


def content_of(batch: Batch, positions: Sequence[range]) -> Content:
    """The content of samples at these global positions, one range after the other; inputs [samples, …]."""
    total = 0
    for name, tensor in batch.items():
        if not tensor.numel():
            continue
        rows = tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1).numpy()
        for position, row in zip(chain.from_iterable(positions), rows, strict=True):
            digest = hashlib.blake2b(row.data, digest_size=16, person=position.to_bytes(8, "little"))
            digest.update(name.encode())
            total += int.from_bytes(digest.digest(), "little")
    return total & _LOW, total >> 64 & _LOW
