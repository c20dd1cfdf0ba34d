"""What a benchmark says: paired runs, their medians, a table, and the JSON entries that others read."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One comparison: medians of both sides over `runs` paired runs, and the median of the paired ratios peer/ours."""

    name: str
    ratio: float
    ours: float
    peer: float
    unit: str
    runs: int


def compare(name: str, ours: Callable[[], None], peer: Callable[[], None], runs: int, warm_up: int = 3) -> Entry:
    """Run both in turn, ours and peer alternating first, and compare seconds pair by pair."""
    for _ in range(warm_up):
        ours()
        peer()
    pairs = []
    for run in range(runs):
        order = (ours, peer) if run % 2 == 0 else (peer, ours)
        first, second = _seconds(order[0]), _seconds(order[1])
        pairs.append((first, second) if run % 2 == 0 else (second, first))
    mine, theirs = zip(*pairs, strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    return Entry(name, ratio, 1e3 * statistics.median(mine), 1e3 * statistics.median(theirs), "ms", runs)


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def table(entries: Sequence[Entry]) -> str:
    """Aligned text, one line per entry."""
    rows = [("", "ours", "peer", "peer/ours", "runs")]
    rows += [
        (e.name, f"{e.ours:.3f} {e.unit}", f"{e.peer:.3f} {e.unit}", f"{e.ratio:.2f}x", str(e.runs)) for e in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def write_json(path: Path, entries: Sequence[Entry]) -> None:
    path.write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")
