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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elaswave_fx.errors import ConfigError
from tools.bench.edit_gloo import PeerEdit, lose_gloo
from tools.bench.edit_limit import LowerBound, lower_bound
from tools.bench.edit_own import Edit, lose_own
from tools.bench.results import Entry, Options, Outcome, in_turns, medians, paired

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
        lose: dict[str, Callable[[int], Any]] = {
            "own": partial(lose_own, ranks, DEPTH),
            "full": partial(lose_gloo, ranks, DEPTH, way="full"),
            "partial": partial(lose_gloo, ranks, DEPTH, way="partial"),
            "bound": partial(lower_bound, ranks, DEPTH),
        }
        # Each side has the same draws: a run loses the same rank on all of them.
        sides = {side: partial(_lose_any, lose[side], ranks, random.Random(ranks)) for side in lose}
        own, full, partly, bound = in_turns(sides, options.repeats or REPEATS, progress, f"{ranks} ranks, run").values()
        entries += _entries(ranks, own, full, partly)
        opened = statistics.median(edit.links_opened for edit in own)
        moved = statistics.median(edit.bytes_moved for edit in own)
        counted.append(f"  {ranks} ranks: links opened {opened:g}, bytes between ranks {moved:g}")
        limits.append(f"  {ranks} ranks: " + _limit(bound, own, full))
    return Outcome(entries, (*counted, *limits))


def _lose_any(lose: Callable[[int], Any], ranks: int, draw: random.Random) -> Any:
    return lose(draw.randrange(ranks))


def _entries(ranks: int, own: Sequence[Edit], full: Sequence[PeerEdit], partly: Sequence[PeerEdit]) -> list[Entry]:
    ours = [1e3 * edit.total_s for edit in own]
    peers = {
        "gloo full rebuild": ([edit.total_s for edit in full], WANTED["full"]),
        "gloo partial": ([edit.total_s for edit in partly], WANTED["partial"]),
        "gloo partial, without the world": ([edit.affected_s for edit in partly], None),
    }
    entries = [
        paired(f"{ranks} ranks, {name}", ours, [1e3 * s for s in peer], "ms", target if ranks >= WANTED_FROM else None)
        for name, (peer, target) in peers.items()
    ]
    entries[0] = replace(entries[0], parts=medians([edit.parts for edit in own], 1e3))
    return entries


def _limit(bound: Sequence[LowerBound], own: Sequence[Edit], full: Sequence[PeerEdit]) -> str:
    bound_s, own_s, full_s = (statistics.median(run.total_s for run in side) for side in (bound, own, full))
    exchanges_ms = 1e3 * statistics.median(run.exchanges_s for run in bound)
    return (
        f"{1e3 * bound_s:.2f} ms, {exchanges_ms:.2f} ms of it after the last answer; "
        f"gloo's full rebuild takes {full_s / bound_s:.1f}x that, ours {own_s / bound_s:.1f}x"
    )
