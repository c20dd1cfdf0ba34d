"""What a benchmark says: paired runs, their medians, a table, and the JSON entries that others read.

In: samples of both sides, in pairs. Out: `Entry`, text, JSON.

    paired("16 ranks", ours=[2.1, 1.9, 2.0], peer=[9.8, 9.9, 9.7], unit="ms")  ->  ratio 4.9, ours 2.0, peer 9.8
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One comparison: medians and 95th percentiles of both sides over `runs` paired runs, and the median of the paired
    ratios peer/ours. `target`: the least ratio wanted. `parts`: medians of what `ours` consists of, in `unit`.
    """

    name: str
    ratio: float
    ours: float
    peer: float
    unit: str
    runs: int
    ours_p95: float | None = None
    peer_p95: float | None = None
    target: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What the command line chose; None: as the benchmark likes. `tiny`: to see that it runs, nothing more."""

    repeats: int | None = None
    ranks: tuple[int, ...] | None = None
    tiny: bool = False
    settings: tuple[int, ...] | None = None
    resident_gb: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """`notes`: what stands under the table, in words."""

    entries: Sequence[Entry]
    notes: Sequence[str] = ()


def p95(samples: Sequence[float]) -> float:
    """The smallest sample that at least 95 % of them do not exceed."""
    return sorted(samples)[-(-95 * len(samples) // 100) - 1]


def paired(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    target: float | None = None,
    parts: Mapping[str, float] | None = None,
) -> Entry:
    """The entry of samples that were taken in turn."""
    return Entry(
        name=name,
        ratio=statistics.median(b / a for a, b in zip(ours, peer, strict=True)),
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        unit=unit,
        runs=len(ours),
        ours_p95=p95(ours),
        peer_p95=p95(peer),
        target=target,
        parts=parts or {},
    )


def compare(
    name: str,
    ours: Callable[[], None],
    peer: Callable[[], None],
    runs: int,
    warm_up: int = 3,
    target: float | None = None,
) -> Entry:
    """Run both in turn, ours and peer alternating first, and compare seconds pair by pair."""
    gc.collect()
    gc.freeze()  # what was imported and compiled is not looked through again in the middle of a sample
    for _ in range(warm_up):
        ours()
        peer()
    pairs = []
    for run in range(runs):
        order = (ours, peer) if run % 2 == 0 else (peer, ours)
        first, second = _seconds(order[0]), _seconds(order[1])
        pairs.append((first, second) if run % 2 == 0 else (second, first))
    mine, theirs = zip(*pairs, strict=True)
    return paired(name, [1e3 * s for s in mine], [1e3 * s for s in theirs], "ms", target)


def medians(samples: Sequence[Mapping[str, float]], scale: float = 1.0) -> dict[str, float]:
    """Part by part."""
    return {name: scale * statistics.median(sample[name] for sample in samples) for name in samples[0]}


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def table(entries: Sequence[Entry]) -> str:
    """Aligned text: one line per entry, then one line per entry that has parts."""
    rows = [("", "ours", "p95", "peer", "p95", "peer/ours", "wanted", "runs")]
    rows += [
        (
            e.name,
            f"{e.ours:.3f} {e.unit}",
            _or_dash(e.ours_p95),
            f"{e.peer:.3f} {e.unit}",
            _or_dash(e.peer_p95),
            f"{e.ratio:.2f}x",
            f"{e.target:.3g}x" if e.target is not None else "-",
            str(e.runs),
        )
        for e in entries
    ]
    parts = [
        f"  {e.name}: " + ", ".join(f"{name} {value:.3f}" for name, value in e.parts.items()) + f" {e.unit}"
        for e in entries
        if e.parts
    ]
    return "\n".join([*aligned(rows), *(["", "parts of ours (medians)", *parts] if parts else [])])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines of columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_json(path: Path, entries: Sequence[Entry]) -> None:
    path.write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")
