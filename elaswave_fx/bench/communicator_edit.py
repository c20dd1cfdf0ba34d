"""communicator_edit: lose one of n ranks, until every survivor has finished a bit-checked all-reduce on each new group.

Pipelines of two stages; groups of all ranks, of a stage, of a pipeline. Ours includes the agreement, with the real
coordinator, agents and store, in a new job per run; gloo is told for nothing who is left. All start at the moment at
which the first survivor is told to stop, and end with the last survivor's last all-reduce (1024 floats, exact sums).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Mapping

import torch

from elaswave_fx.bench.edit_gloo import PeerEdit, lose_gloo
from elaswave_fx.bench.edit_limit import Costs, costs, least
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
    """All sizes; the three sides take turns, each first in a third of the runs."""
    torch.set_num_threads(1)
    if any(ranks < 4 or ranks % DEPTH for ranks in options.ranks or ()):
        raise ConfigError("--ranks: sizes are even and at least 4, in pipelines of two stages")
    entries: list[Entry] = []
    counted, limits = ["", "counted in one edit (medians)"], ["", "the least that this machine's cores need"]
    spent = costs()
    for ranks in options.ranks or SIZES:
        sides = _take_turns(ranks, options.repeats or REPEATS, progress)
        entries += _entries(ranks, *sides)
        counted.append(f"  {ranks} ranks: " + _counts(sides[0]))
        limits.append(f"  {ranks} ranks: " + _limit(ranks, sides[0], spent))
    return Outcome(entries, (*counted, *_explain(), *limits, *_explain_limit(spent)))


def _take_turns(
    ranks: int, repeats: int, progress: Callable[[str], None]
) -> tuple[list[Edit], list[PeerEdit], list[PeerEdit]]:
    """Ours, gloo's full rebuild, gloo's partial one; a run loses the same rank in each."""
    draw = random.Random(ranks)
    own: list[Edit] = []
    full: list[PeerEdit] = []
    partial: list[PeerEdit] = []
    sides: list[Callable[[int], None]] = [
        lambda victim: own.append(lose_own(ranks, DEPTH, victim)),
        lambda victim: full.append(lose_gloo(ranks, DEPTH, victim, "full")),
        lambda victim: partial.append(lose_gloo(ranks, DEPTH, victim, "partial")),
    ]
    for turn in range(repeats):
        progress(f"{ranks} ranks, run {turn + 1} of {repeats}")
        victim, first = draw.randrange(ranks), turn % len(sides)
        for side in sides[first:] + sides[:first]:
            side(victim)
    return own, full, partial


def _entries(ranks: int, own: list[Edit], full: list[PeerEdit], partial: list[PeerEdit]) -> list[Entry]:
    ours = [1e3 * edit.total_s for edit in own]
    parts = medians([edit.parts for edit in own], 1e3)

    def entry(name: str, peer: list[float], target: str | None, parts: Mapping[str, float] | None = None) -> Entry:
        least, ratio = TARGETS[target] if target else (sys.maxsize, 0.0)
        wanted = ratio if ranks >= least else None
        return paired(f"{ranks} ranks, {name}", ours, [1e3 * s for s in peer], "ms", wanted, parts)

    return [
        entry("gloo full rebuild", [edit.total_s for edit in full], "full", parts),
        entry("gloo partial", [edit.total_s for edit in partial], "partial"),
        entry("gloo partial, without the world", [edit.affected_s for edit in partial], None),
    ]


def _counts(own: list[Edit]) -> str:
    found = medians([{name: float(count) for name, count in edit.counts.items()} for edit in own])
    return ", ".join(f"{name} {value:g}" for name, value in found.items())


def _explain() -> tuple[str, ...]:
    return (
        "Bytes between ranks: payload from the agreement to the first all-reduce. Prepare, Prepared, Activate: control",
        "messages of all survivors together, repeated ones included. Not counted: abort frames, log2(n) per rank.",
    )


def _limit(ranks: int, own: list[Edit], spent: Costs) -> str:
    least_s, messages = least(Views.first(ranks, DEPTH).less(ranks - 1), spent)
    median_s = statistics.median(edit.total_s for edit in own)
    return f"{1e3 * least_s:.3f} ms for {messages} messages; ours takes {median_s / least_s:.1f}x that"


def _explain_limit(spent: Costs) -> tuple[str, ...]:
    return (
        f"A message takes {1e6 * spent.message_s:.1f} µs of processor time at both ends together, a durable write "
        f"{1e3 * spent.durable_s:.3f} ms;",
        "nothing is allowed for deciding, for interpreters and for waiting.",
    )
