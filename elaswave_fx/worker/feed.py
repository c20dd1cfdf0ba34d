"""The inputs of a rank's tile: loaded ahead of their step, and hashed as they are fed.

    feed = InputFeed(config, artifact, plan, rank, source, first_step=0)
    feed.take(7)  ->  StepInputs(inputs {"input_ids": int64 [8, 64]}, content (…, …))

The content of a step is the sum, modulo 2^128, of a hash of every sample of every input. The rank that runs the first
unit that reads an input vouches for it, so the sum over ranks does not depend on the layout. A feed with `cross_check`
also reads the samples that another rank vouches for, see cross_check.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from elaswave_fx.config.keys import Config
from elaswave_fx.data import Prefetcher, Source, load_ranges
from elaswave_fx.data.dataset import Batch
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.program.artifact import Artifact
from elaswave_fx.worker.cross_check import checked_ranks, has_origins
from elaswave_fx.worker.engine import input_names, vouched_inputs


class Content(NamedTuple):
    """A sum of hashes modulo 2^128, as its low and high 64 bits; and the sum modulo 2^64 of the hashes' low halves
    times the samples' positions, which locates a single difference."""

    low: int
    high: int
    places: int


NOTHING = Content(0, 0, 0)
_LOW = (1 << 64) - 1


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a rank's units in a step, and the content hash of those that it vouches for. `cross_check`: another
    rank, and the hash of its samples as read here."""

    inputs: dict[str, torch.Tensor]
    content: Content = NOTHING
    cross_check: tuple[Rank, Content] | None = None


class InputFeed:
    """The feed of one tile, empty if its units read no inputs. One thread owns it."""

    def __init__(
        self,
        config: Config,
        artifact: Artifact,
        plan: Plan,
        rank: int,
        source: Source,
        first_step: int,
        cross_check: bool = False,
    ) -> None:
        self._names = input_names(artifact, plan, rank)
        self._config, self._plan, self._source = config, plan, source
        self._rank = Rank(rank)
        self._checks = cross_check and has_origins(plan.ranks, config.parallel.ranks)
        vouching = plan.ranks if self._checks else (self._rank,)
        self._vouched = {each: vouched_inputs(artifact, plan, each) for each in vouching}
        reads = bool(self._names) or self._checks
        self._ahead = Prefetcher(self._load, first_step, config.steps) if reads else None

    def await_batch(self, step: int, timeout_s: float) -> bool:
        """Whether the batch of a step is loaded, after a wait of at most `timeout_s`."""
        return self._ahead is None or self._ahead.await_ready(step, timeout_s)

    def next_batch(self, step: int) -> StepInputs:
        return self._ahead.take(step) if self._ahead is not None else StepInputs({})

    def held_out(self, number: int) -> dict[str, torch.Tensor]:
        """Return this rank's inputs of held-out batch `number`."""
        if not self._names:
            return {}
        positions = self._positions(number, self._rank)
        return self._select(load_ranges(self._source.evaluation, self._source.held_out, positions))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _load(self, step: int) -> StepInputs:
        positions = self._positions(step, self._rank)
        batch = self._read(positions) if self._names else {}
        content = self._content(self._rank, batch, positions)
        return StepInputs(self._select(batch), content, self._cross_check(step, batch, positions))

    def _cross_check(self, step: int, batch: Batch, positions: Sequence[range]) -> tuple[Rank, Content] | None:
        """Return the rank that this one checks, and the hash of its samples, which may be in this rank's own batch."""
        if not self._checks:
            return None
        other = checked_ranks(self._plan.ranks, self._config.parallel.ranks, step).get(self._rank)
        if other is None or not self._vouched[other]:
            return None
        theirs = self._positions(step, other)
        read = batch if batch and theirs == positions else self._read(theirs)
        return other, self._content(other, read, theirs)

    def _read(self, positions: Sequence[range]) -> Batch:
        return load_ranges(self._source.dataset, self._source.train, positions)

    def _content(self, rank: Rank, batch: Batch, positions: Sequence[range]) -> Content:
        return content_of({name: batch[name] for name in self._vouched[rank]}, positions)

    def _positions(self, step: int, rank: Rank) -> list[range]:
        first = step * self._config.global_batch
        return [range(first + span.lo, first + span.hi) for span in self._plan.tile(rank).spans]

    def _select(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {name: batch[name] for name in self._names}


def content_of(batch: Batch, positions: Sequence[range]) -> Content:
    """The content of samples at these global positions, range by range; inputs [samples, …]."""
    total = places = 0
    for name, tensor in batch.items():
        if not tensor.numel():
            continue
        rows = tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1).numpy()
        for position, row in zip(chain.from_iterable(positions), rows, strict=True):
            digest = hashlib.blake2b(row.data, digest_size=16, person=position.to_bytes(8, "little"))
            digest.update(name.encode())
            value = int.from_bytes(digest.digest(), "little")
            total += value
            places += position * (value & _LOW)
    return Content(total & _LOW, total >> 64 & _LOW, places & _LOW)


def reads_alike(was: Plan, now: Plan, rank: Rank, started: int, cross_check: bool) -> bool:
    """Whether a rank's feed serves both plans, of a job that began with `started` ranks."""
    if cross_check and (has_origins(was.ranks, started) or has_origins(now.ranks, started)):
        return was.tiles == now.tiles
    return was.tile(rank) == now.tile(rank)
