"""benches.md: what each benchmark asks, and its newest result in `docs/results/NAME.json`, misses beside hits.

An entry is one of `tools.bench.results.Entry`; `least` and `most` are there in place of `ratio` where entries of
several cases were put together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.catalogue import BENCHES, Bench
from tools.docs.markdown import ROOT, code, page_of, prose, table, wrapped

RESULTS = ROOT / "docs" / "results"

INTRO = """
runs both sides in turns on one machine and prints medians, 95th percentiles and ratios. A ratio is peer over ours,
the median over pairs: larger is better for us; a missed target is bold. Our side of the training benchmarks is
`train`, on the models, batches and links of `tools/bench/gpt_job.py`. `steady` and `recovery` need the extra
`bench`; `--tiny` shows that a benchmark runs. *Made* says of the newest kept result minutes, options, date, commit
and machine (virtual, two quiet cores for all ranks). *Proportional* is the step before, scaled by the number of ranks
(in `slow` by their speeds).
"""


def page() -> str:
    """Return the page."""
    return page_of(
        "Benchmarks",
        "    python -m tools.bench NAME [--json docs/results/NAME.json] && make docs",
        wrapped(INTRO),
        *(f"## {name}\n\n{_section(name, each)}" for name, each in BENCHES.items()),
    )


def _section(name: str, bench: Bench) -> str:
    said = f"Ours: {prose(bench.ours)}. Peer: {prose(bench.peer)}. Counted: {prose(bench.counted)}."
    said += f" {prose(bench.favours)}." if bench.favours else ""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return f"{wrapped(said)}\n\nNo result is kept: `python -m tools.bench {name} --json docs/results/{name}.json`."
    result = json.loads(path.read_text())
    rows = [("", "ours", "peer", "ratio", "target"), *map(_row, _together(result["entries"]))]
    columns = [column for column in range(5) if any(row[column] for row in rows[1:])]
    minutes = f"{bench.minutes} min" if bench.minutes else ""
    options = code(result["command"].removeprefix(f"python -m tools.bench {name}").strip())
    machine = result["machine"].split("2 cores")[0].rstrip(", ")
    made = ", ".join(each for each in (minutes, options, result["date"], result["commit"], machine) if each)
    head, *shown = [_without_tail([row[column] for column in columns]) for row in rows]
    words = wrapped(" ".join(each for each in (said, result.get("note"), f"Made: {made}.") if each))
    return f"{words}\n\n{table(head, shown)}"


def _without_tail(cells: list[str]) -> list[str]:
    """A row without the empty cells at its end."""
    while cells and not cells[-1]:
        cells = cells[:-1]
    return cells


def _together(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries; ranges of several cases (`4x4: recycle`, `2x8: recycle`) with one target become one range."""
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    for entry in entries:
        ranges = "least" in entry and "ours" not in entry and ": " in entry["name"]
        name = entry["name"].split(": ", 1)[1] if ranges else entry["name"]
        known = found.setdefault((name, entry.get("target")), {**entry, "name": name})
        if ranges:
            known["least"], known["most"] = min(known["least"], entry["least"]), max(known["most"], entry["most"])
    return list(found.values())


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    least, most, target = entry.get("least", entry.get("ratio")), entry.get("most"), entry.get("target")
    ratio = "" if least is None else f"{_short(least)}x" if most is None else f"{_short(least)}x to {_short(most)}x"
    wanted = "" if target is None else f"{_short(target)}x"
    if target is not None and least is not None and least < target:
        wanted = f"**{wanted} missed**"
    return (entry["name"], _side(entry, "ours"), _side(entry, "peer"), ratio, wanted)


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _side(entry: Mapping[str, Any], side: str) -> str:
    value, tail = entry.get(side), entry.get(f"{side}_p95")
    if value is None:
        return ""
    words = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    words = f"{words} {entry['unit']}".strip()
    return words + (f" (p95 {tail:.4g})" if tail is not None else "")
