"""benches.md: what each benchmark asks, and its newest result in `docs/results/NAME.json`, misses beside hits.

An entry is one of `tools.bench.results.Entry`; `least` and `most` are there in place of `ratio` where entries of
several cases were put together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.bench.catalogue import BENCHES, Bench
from tools.docs.markdown import ROOT, code, page_of, prose, table, wrapped

RESULTS = ROOT / "docs" / "results"

INTRO = """
runs both sides in turns on one machine and prints medians, 95th percentiles and ratios. A ratio is peer over ours, the
median over pairs: larger is better for us. Our side of the training benchmarks is `train` itself. Models, batches and
link rates are fixed in `tools/bench/workload.py`. `steady` and `recovery` need the extra `bench`. `--tiny` shows that a
benchmark runs; `--help` lists questions and options. Under each command stands its newest kept result; those without a
run's own commit name the commit that recorded them. Durations are of two quiet cores. All ranks share the machine's
cores, so work that every rank does adds up. *Proportional* is the step before, scaled by the number of ranks (in `slow`
by their speeds).
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
    said = f"**Ours**: {prose(bench.ours)}. **Peer**: {prose(bench.peer)}. **Counted**: {prose(bench.counted)}."
    said += f" {prose(bench.favours)}." if bench.favours else ""
    said += f" Minutes: {bench.minutes}." if bench.minutes else ""
    words = wrapped(said)
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return f"{words}\n\nNo result is kept: `python -m tools.bench {name} --json docs/results/{name}.json`."
    result = json.loads(path.read_text())
    rows = [_row(entry) for entry in result["entries"]]
    columns = [column for column in range(6) if any(row[column] for row in rows)]
    head = ("", "ours", "peer", "ratio", "target", "met")
    facts = [result["date"], f"commit {result['commit']}", result["machine"]]
    made = f"{code(result['command'])} ({', '.join(each for each in facts if each)})"
    note = f"\n\n{wrapped(result['note'])}" if "note" in result else ""
    shown = table([head[column] for column in columns], [[row[column] for column in columns] for row in rows])
    return f"{words}\n\n{made}{note}\n\n{shown}"


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    least, most, target = entry.get("least", entry.get("ratio")), entry.get("most"), entry.get("target")
    ratio = "" if least is None else f"{_short(least)}x" if most is None else f"{_short(least)}x to {_short(most)}x"
    met = "" if target is None or least is None else "yes" if least >= target else "**missed**"
    wanted = "" if target is None else f"{_short(target)}x"
    return (entry["name"], _side(entry, "ours"), _side(entry, "peer"), ratio, wanted, met)


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _side(entry: Mapping[str, Any], side: str) -> str:
    value, tail = entry.get(side), entry.get(f"{side}_p95")
    if value is None:
        return ""
    words = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    words = f"{words} {entry['unit']}".strip()
    return words + (f" (p95 {tail:.4g})" if tail is not None else "")
