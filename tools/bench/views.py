"""The groups of a dp x pp job before and after a loss, and an exchange whose result is known to the bit.

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

WORD = 64
"""Elements, int64, that a rank contributes to a checked exchange."""


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


def word(member: int, size: int) -> torch.Tensor:
    """What a member of a group of that size says."""
    return torch.arange(WORD) + 1009 * member + size


class Checks:
    """Exchanges of one rank with known results: each member of a group says a word, and everybody gets all of them."""

    def __init__(self, rank: int, groups: Iterable[Group]) -> None:
        self.groups = tuple(groups)
        self._rank = rank
        self._wanted = {
            members: torch.cat([word(member, len(members)) for member in members]) for members in self.groups
        }

    def __call__(self, members: Group, all_gather: Callable[[torch.Tensor, list[tuple[int, int]]], object]) -> None:
        """All-gather; `all_gather` takes the tensor with this rank's word in its place, and all members' intervals.
        Raises ValueError unless every bit is right.
        """
        place, wanted = members.index(self._rank), self._wanted[members]
        spans = [(WORD * at, WORD * (at + 1)) for at in range(len(members))]
        data = torch.zeros_like(wanted)
        data[slice(*spans[place])] = word(self._rank, len(members))
        all_gather(data, spans)
        if not torch.equal(data, wanted):
            raise ValueError(f"rank {self._rank}: the all-gather over {list(members)} gave something else")
