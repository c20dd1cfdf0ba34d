"""communicator_edit: lose one of n ranks, until every survivor stands in the new epoch; gloo rebuilds its groups.

Pipelines of two stages. Ours is a job as `train` starts it, which has to notice, agree, plan with the real planner and
install the plan in every engine; then all ranks, and the ranks that share a bucket, exchange words that are checked to
the bit. Gloo is told for nothing who is left, and rebuilds the groups of all ranks, of a stage, of a pipeline, in which
the same words are exchanged. All clocks start at the moment at which the first survivor is told to stop, and end with
the last survivor's last exchange. Beside them runs a lower bound: the messages that an agreement needs, and the same
exchanges, with nothing between them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from elaswave_fx.errors import ConfigError
from tools.bench.edit_gloo import PeerEdit, lose_gloo
from tools.bench.edit_limit import LowerBound, lower_bound
from tools.bench.edit_own import Edit, lose_own
from tools.bench.results import Entry, Options, Outcome, medians, paired

SIZES = (16, 32, 64, 96)
"""96 is the size of which ElasWave's paper says 82x of a full rebuild and 3.6x of a partial one."""

REPEATS = 5
DEPTH = 2
WANTED: Mapping[str, float] = {"full": 82.0, "partial": 3.6}
WANTED_FROM = 16
"""Ranks."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All sizes; the sides take turns, each first as often as the others."""
    torch.set_num_threads(1)
    if any(ranks < 4 or ranks % DEPTH for ranks in options.ranks or ()):
        raise ConfigError("--ranks: sizes are even and at least 4, in pipelines of two stages")
    entries: list[Entry] = []
    counted, limits = ["", "counted in one edit, all survivors (medians)"], ["", "the lower bound (medians)"]
    for ranks in options.ranks or SIZES:
        sides = _take_turns(ranks, options.repeats or REPEATS, progress)
        entries += _entries(ranks, sides)
        opened = statistics.median(edit.links_opened for edit in sides.own)
        moved = statistics.median(edit.bytes_moved for edit in sides.own)
        counted.append(f"  {ranks} ranks: links opened {opened:g}, bytes between ranks {moved:g}")
        limits.append(f"  {ranks} ranks: " + _limit(sides))
    return Outcome(entries, (*counted, *limits))


@dataclass(frozen=True)
class Sides:
    """What was measured of one size, in the order of the runs."""

    own: list[Edit] = field(default_factory=list)
    full: list[PeerEdit] = field(default_factory=list)
    partial: list[PeerEdit] = field(default_factory=list)
    bound: list[LowerBound] = field(default_factory=list)


def _take_turns(ranks: int, repeats: int, progress: Callable[[str], None]) -> Sides:
    """A run loses the same rank on each side."""
    draw = random.Random(ranks)
    found = Sides()
    sides: list[Callable[[int], None]] = [
        lambda victim: found.own.append(lose_own(ranks, DEPTH, victim)),
        lambda victim: found.full.append(lose_gloo(ranks, DEPTH, victim, "full")),
        lambda victim: found.partial.append(lose_gloo(ranks, DEPTH, victim, "partial")),
        lambda victim: found.bound.append(lower_bound(ranks, DEPTH, victim)),
    ]
    for turn in range(repeats):
        progress(f"{ranks} ranks, run {turn + 1} of {repeats}")
        victim, first = draw.randrange(ranks), turn % len(sides)
        for side in sides[first:] + sides[:first]:
            side(victim)
    return found


def _entries(ranks: int, sides: Sides) -> list[Entry]:
    ours = [1e3 * edit.total_s for edit in sides.own]
    parts = medians([edit.parts for edit in sides.own], 1e3)

    def entry(name: str, peer: list[float], target: str | None, parts: Mapping[str, float] | None = None) -> Entry:
        wanted = WANTED[target] if target and ranks >= WANTED_FROM else None
        return paired(f"{ranks} ranks, {name}", ours, [1e3 * s for s in peer], "ms", wanted, parts)

    return [
        entry("gloo full rebuild", [edit.total_s for edit in sides.full], "full", parts),
        entry("gloo partial", [edit.total_s for edit in sides.partial], "partial"),
        entry("gloo partial, without the world", [edit.affected_s for edit in sides.partial], None),
    ]


def _limit(sides: Sides) -> str:
    bound_s = statistics.median(run.total_s for run in sides.bound)
    own_s = statistics.median(edit.total_s for edit in sides.own)
    full_s = statistics.median(edit.total_s for edit in sides.full)
    exchanges_ms = 1e3 * statistics.median(run.exchanges_s for run in sides.bound)
    return (
        f"{1e3 * bound_s:.2f} ms, {exchanges_ms:.2f} ms of it after the last answer; "
        f"gloo's full rebuild takes {full_s / bound_s:.1f}x that, ours {own_s / bound_s:.1f}x"
    )
