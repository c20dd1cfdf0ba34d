"""What a benchmark does and says: sides that take turns, medians of their pairs, a table, JSON entries for others.

In: functions that run one side each, or samples of both sides, in pairs. Out: `Entry`, text, JSON.

    paired("16 ranks", ours=[2.1, 1.9, 2.0], peer=[9.8, 9.9, 9.7], unit="ms")  ->  ratio 4.9, ours 2.0, peer 9.8
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Steps:
    """One job: seconds of the steps that count, as its first rank saw them, CPU seconds of all threads of all ranks in
    a step, and the mean losses of all steps, where somebody knows them."""

    seconds: tuple[float, ...]
    cpu_s_per_step: float
    losses: tuple[float, ...]


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
    """What the command line chose; with None the benchmark chooses. `tiny` is to see that it runs, nothing more."""

    repeats: int | None = None
    ranks: tuple[int, ...] | None = None
    tiny: bool = False
    settings: tuple[int, ...] | None = None
    resident_gb: float = 0.0
    seeds: int | None = None
    steps: int | None = None
    precision: tuple[str, ...] | None = None
    plot: Path | None = None
    only: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found. `notes` stand under the table, in words."""

    entries: Sequence[Entry]
    notes: Sequence[str] = ()


def p95(samples: Sequence[float]) -> float:
    """Return the smallest sample that at least 95 % of them do not exceed."""
    return sorted(samples)[-(-95 * len(samples) // 100) - 1]


def paired(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    target: float | None = None,
    parts: Mapping[str, float] | None = None,
) -> Entry:
    """Return the entry of samples that were taken in turns."""
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


def in_turns(
    sides: Mapping[str, Callable[[], T]], repeats: int, progress: Callable[[str], None], what: str = "run"
) -> dict[str, list[T]]:
    """Run every side once per turn, another one first each time; return what they gave, by side."""
    names, found = list(sides), {name: list[T]() for name in sides}
    for turn in range(repeats):
        progress(f"{what} {turn + 1} of {repeats}")
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sides[name]())
    return found


def medians_ms(jobs: Sequence[Steps]) -> list[float]:
    """Return a sample per job: the median of its steps in milliseconds."""
    return [1e3 * statistics.median(job.seconds) for job in jobs]


def cpu_line(jobs: Mapping[str, Sequence[Steps]]) -> str:
    """Say what CPU time a step takes by kind of job; a busy machine does not change it much."""
    return "CPU time of a step, all ranks, all threads (medians): " + ", ".join(
        f"{name} {1e3 * statistics.median(job.cpu_s_per_step for job in found):.1f} ms" for name, found in jobs.items()
    )


def compare(
    name: str,
    ours: Callable[[], None],
    peer: Callable[[], None],
    runs: int,
    warm_up: int = 3,
    target: float | None = None,
) -> Entry:
    """Run both in turns, and compare their seconds pair by pair."""
    gc.collect()
    gc.freeze()  # what was imported and compiled is not looked through again in the middle of a sample
    for _ in range(warm_up):
        ours()
        peer()
    taken = in_turns({"ours": partial(_ms, ours), "peer": partial(_ms, peer)}, runs, lambda turn: None)
    return paired(name, taken["ours"], taken["peer"], "ms", target)


def medians(samples: Sequence[Mapping[str, float]], scale: float = 1.0) -> dict[str, float]:
    """Return the median of each part."""
    return {name: scale * statistics.median(sample[name] for sample in samples) for name in samples[0]}


def _ms(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def table(entries: Sequence[Entry]) -> str:
    """Return aligned text: one line per entry, then one line per entry that has parts."""
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
    """Return rows of equal length as lines of columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_json(path: Path, name: str, entries: Sequence[Entry], words: Sequence[str]) -> None:
    """Write the entries with what made them: the command, the commit, the date, the machine."""
    facts = {"bench": name, "command": f"python -m tools.bench {shlex.join(words)}", "commit": _commit()}
    facts |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": _machine()}
    path.write_text(json.dumps({**facts, "entries": [asdict(entry) for entry in entries]}, indent=1) + "\n")


def _commit() -> str:
    """The commit of the working tree, with a mark if files differ from it; empty without git."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _machine() -> str:
    cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in cpus.splitlines() if line.startswith("model name")), "CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
