"""communicator_edit: lose one of n ranks, until every survivor has finished a bit-checked all-reduce on each new group.

Pipelines of two stages; groups of all ranks, of a stage, of a pipeline. Ours includes the agreement, with the real
coordinator, agents and store, in a new job per run; gloo is told for nothing who is left. All start at the moment at
which the first survivor is told to stop, and end with the last survivor's last all-reduce (1024 floats, exact sums).
Beside them runs the bare course: the same messages with nothing between them, as a limit.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from elaswave_fx.bench.edit_gloo import PeerEdit, lose_gloo
from elaswave_fx.bench.edit_limit import Bare, lose_bare, messages
from elaswave_fx.bench.edit_own import Edit, lose_own
from elaswave_fx.bench.results import Entry, Options, Outcome, medians, paired
from elaswave_fx.bench.views import Views
from elaswave_fx.errors import ConfigError

SIZES = (4, 8, 16, 32)
REPEATS = 20
DEPTH = 2
TARGETS: Mapping[str, tuple[int, float]] = {"full": (16, 100.0), "partial": (16, 5.0)}
"""Least ratio, from so many ranks on."""


def run(progress: Callable[[str], None], options: Options) -> Outcome:
    """All sizes; the sides take turns, each first as often as the others."""
    torch.set_num_threads(1)
    if any(ranks < 4 or ranks % DEPTH for ranks in options.ranks or ()):
        raise ConfigError("--ranks: sizes are even and at least 4, in pipelines of two stages")
    entries: list[Entry] = []
    counted, limits = ["", "counted in one edit (medians)"], ["", "the bare course (medians)"]
    for ranks in options.ranks or SIZES:
        sides = _take_turns(ranks, options.repeats or REPEATS, progress)
        entries += _entries(ranks, sides)
        counted.append(f"  {ranks} ranks: " + _counts(sides.own))
        limits.append(f"  {ranks} ranks: " + _limit(ranks, sides))
    return Outcome(entries, (*counted, *_explain(), *limits))


@dataclass(frozen=True)
class Sides:
    """What was measured of one size, in the order of the runs."""

    own: list[Edit] = field(default_factory=list)
    full: list[PeerEdit] = field(default_factory=list)
    partial: list[PeerEdit] = field(default_factory=list)
    bare: list[Bare] = field(default_factory=list)


def _take_turns(ranks: int, repeats: int, progress: Callable[[str], None]) -> Sides:
    """A run loses the same rank on each side."""
    draw = random.Random(ranks)
    found = Sides()
    sides: list[Callable[[int], None]] = [
        lambda victim: found.own.append(lose_own(ranks, DEPTH, victim)),
        lambda victim: found.full.append(lose_gloo(ranks, DEPTH, victim, "full")),
        lambda victim: found.partial.append(lose_gloo(ranks, DEPTH, victim, "partial")),
        lambda victim: found.bare.append(lose_bare(ranks, DEPTH, victim)),
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
        least, ratio = TARGETS[target] if target else (sys.maxsize, 0.0)
        wanted = ratio if ranks >= least else None
        return paired(f"{ranks} ranks, {name}", ours, [1e3 * s for s in peer], "ms", wanted, parts)

    return [
        entry("gloo full rebuild", [edit.total_s for edit in sides.full], "full", parts),
        entry("gloo partial", [edit.total_s for edit in sides.partial], "partial"),
        entry("gloo partial, without the world", [edit.affected_s for edit in sides.partial], None),
    ]


def _counts(own: list[Edit]) -> str:
    found = medians([{name: float(count) for name, count in edit.counts.items()} for edit in own])
    return ", ".join(f"{name} {value:g}" for name, value in found.items())


def _explain() -> tuple[str, ...]:
    return (
        "Bytes between ranks: payload from the agreement to the first all-reduce. Prepare, Prepared, Activate: control",
        "messages of all survivors together, repeated ones included. Not counted: abort frames, log2(n) per rank.",
    )


def _limit(ranks: int, sides: Sides) -> str:
    bare_s = statistics.median(run.total_s for run in sides.bare)
    own_s = statistics.median(edit.total_s for edit in sides.own)
    full_s = statistics.median(edit.total_s for edit in sides.full)
    reduces_ms = 1e3 * statistics.median(run.reduces_s for run in sides.bare)
    count = messages(Views.first(ranks, DEPTH).less(ranks - 1))
    return (
        f"{1e3 * bare_s:.2f} ms for {count} messages, {reduces_ms:.2f} ms of it after the last answer; "
        f"gloo's full rebuild takes {full_s / bare_s:.1f}x that, ours {own_s / bare_s:.1f}x"
    )
