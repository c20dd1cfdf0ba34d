"""The groups of a dp x pp job before and after a loss, and an all-reduce whose result is known to the bit.

In: the ranks, the depth of the pipelines, who is lost. Out: the groups of each rank: all ranks, the ranks of its stage
(data parallel), the ranks of its pipeline.

    Views.first(8, depth=2)          ->  stages (0 2 4 6) (1 3 5 7), pipelines (0 1) (2 3) (4 5) (6 7)
    Views.first(8, depth=2).less(4)  ->  stages (0 2 6) (1 3 5 7), pipelines (0 1) (2 3) (5 6 7)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Group = tuple[int, ...]

ELEMENTS = 1024
"""Of the checked all-reduce, fp32."""

_PRIME = 1009


@dataclass(frozen=True)
class Views:
    """Groups of ranks; every rank is in one stage and one pipeline."""

    world: Group
    stages: tuple[Group, ...]
    pipelines: tuple[Group, ...]

    @staticmethod
    def first(ranks: int, depth: int) -> Views:
        """Rank r computes stage r mod depth of pipeline r div depth."""
        world = tuple(range(ranks))
        columns = tuple(world[lo : lo + depth] for lo in range(0, ranks, depth))
        return Views(world, tuple(world[stage::depth] for stage in range(depth)), columns)

    def less(self, lost: int) -> Views:
        """Without a rank: its stage is narrower, and the rest of its pipeline feeds, and is fed by, the next one."""
        world = tuple(rank for rank in self.world if rank != lost)
        stages = tuple(tuple(rank for rank in stage if rank != lost) for stage in self.stages)
        broken = next(number for number, pipeline in enumerate(self.pipelines) if lost in pipeline)
        rest = tuple(rank for rank in self.pipelines[broken] if rank != lost)
        whole = [pipeline for number, pipeline in enumerate(self.pipelines) if number != broken]
        if rest and whole:
            host = broken % len(whole)
            whole[host] = tuple(sorted((*whole[host], *rest)))
        elif rest:
            whole = [rest]
        return Views(world, tuple(stage for stage in stages if stage), tuple(whole))

    def of(self, rank: int) -> tuple[Group, Group, Group]:
        """World, stage and pipeline of a rank."""
        stage = next(stage for stage in self.stages if rank in stage)
        return self.world, stage, next(pipeline for pipeline in self.pipelines if rank in pipeline)

    def changed(self, before: Views) -> tuple[Group, ...]:
        """Stages and pipelines that were not there before."""
        old = {*before.stages, *before.pipelines}
        return tuple(group for group in (*self.stages, *self.pipelines) if group not in old)


def summand(rank: int) -> torch.Tensor:
    """Whole numbers, so that their sum is exact in any order."""
    return ((torch.arange(ELEMENTS) * (rank + 3)) % _PRIME).float()


class Checks:
    """All-reduces of one rank with known results; what can be made before the clock runs is made here."""

    def __init__(self, rank: int, groups: Iterable[Group]) -> None:
        self._rank = rank
        self._data = {members: summand(rank) for members in groups}
        self._sums = {members: torch.stack([summand(member) for member in members]).sum(0) for members in self._data}

    def __call__(self, members: Group, all_reduce: Callable[[torch.Tensor], object]) -> None:
        """All-reduce the members' summands; raises ValueError unless every bit of the sum is right."""
        data = self._data[members].clone()
        all_reduce(data)
        if not torch.equal(data, self._sums[members]):
            raise ValueError(f"rank {self._rank}: the all-reduce over {list(members)} gave another sum")
