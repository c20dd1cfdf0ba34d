"""`make chaos`: every scenario, one after another, a line each, and a table at the end. Exit code 1 if any failed.

    python -m tests.recovery.chaos [--only TEXT] [--seed N] [--list] [--keep DIR]

    ok    inside                  2x2-rank3-backward            2.1 s   34.4 ms
    ...
    group                   cases  passed  failed  redone  rolled back  median mttr_ms  worst mttr_ms

Runs of scenarios that passed are removed; those that failed stay, and their folders are named.
"""

from __future__ import annotations

import tests.environment  # noqa: F401  before torch

# isort: split
import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.recovery.references import References
from tests.recovery.scenario_registry import everything
from tests.recovery.scenarios import Scenario


@dataclass(frozen=True)
class Outcome:
    """`failure`: None when it passed. `recoveries`: of its summary."""

    scenario: Scenario
    seconds: float
    failure: str | None
    recoveries: tuple[dict[str, Any], ...] = ()

    @property
    def mttr_ms(self) -> list[float]:
        return [each["mttr_ms"] for each in self.recoveries if each.get("mttr_ms") is not None]

    @property
    def steps_redone(self) -> int:
        """Of those that did not go back to an older state, as far as the coordinator lived to say it."""
        return sum(each["steps_redone"] or 0 for each in self.recoveries if "rolled_back_to" not in each)

    @property
    def rolled_back(self) -> int:
        return sum("rolled_back_to" in each for each in self.recoveries)


def run(scenario: Scenario, folder: Path, references: References) -> Outcome:
    """One scenario; its folder goes if it passed."""
    began = time.monotonic()
    place = folder / scenario.folder
    try:
        finished = scenario.check(place, references)
    except AssertionError as error:
        return Outcome(scenario, time.monotonic() - began, str(error))
    has_summary = (finished.folder / "summary.json").exists()
    recoveries = tuple(finished.summary["recoveries"]) if has_summary else ()
    shutil.rmtree(place, ignore_errors=True)
    return Outcome(scenario, time.monotonic() - began, None, recoveries)


def line_of(outcome: Outcome) -> str:
    """What is said of one scenario when it has ended."""
    word = "ok  " if outcome.failure is None else "FAIL"
    times = " ".join(f"{ms:.1f}" for ms in outcome.mttr_ms)
    said = f"{word}  {outcome.scenario.group:24}{outcome.scenario.name:48}{outcome.seconds:6.1f} s  {times}"
    return said.rstrip() if outcome.failure is None else f"{said.rstrip()}\n      {outcome.failure}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts per group, and of all."""
    head = ("group", "cases", "passed", "failed", "redone", "rolled back", "median mttr_ms", "worst mttr_ms")
    groups = dict.fromkeys(outcome.scenario.group for outcome in outcomes)
    rows = [_row(group, [each for each in outcomes if each.scenario.group == group]) for group in groups]
    rows = [head, *rows, _row("all", outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(_laid_out(row, widths) for row in rows)


def _laid_out(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *figures = row
    return "  ".join([name.ljust(widths[0]), *(word.rjust(w) for word, w in zip(figures, widths[1:], strict=True))])


def _row(group: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    failed = sum(outcome.failure is not None for outcome in outcomes)
    times = [ms for outcome in outcomes for ms in outcome.mttr_ms]
    counts = (
        len(outcomes),
        len(outcomes) - failed,
        failed,
        sum(outcome.steps_redone for outcome in outcomes),
        sum(outcome.rolled_back for outcome in outcomes),
    )
    shown = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("-", "-")
    return (group, *map(str, counts), *shown)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.recovery.chaos", description="Disturb real runs in every way."
    )
    parser.add_argument("--only", default="", help="scenarios whose group and name contain this")
    parser.add_argument("--seed", type=int, default=0, help="draws ranks and moments (default 0)")
    parser.add_argument("--list", action="store_true", help="name them, run none")
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    chosen = parser.parse_args(arguments)
    scenarios = [each for each in everything(chosen.seed) if chosen.only in f"{each.group} {each.name}"]
    if chosen.list or not scenarios:
        print("\n".join(f"{each.group:24}{each.name}" for each in scenarios) or f"no scenario has {chosen.only!r}")
        return 0 if scenarios else 2
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # through the contexts that end runs
    folder = chosen.keep or Path(tempfile.mkdtemp(prefix="elaswave-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(scenarios)} scenarios, seed {chosen.seed}; runs in {folder}", flush=True)
    references = References(folder / "references")
    outcomes = []
    for scenario in scenarios:
        outcomes.append(run(scenario, folder, references))
        print(line_of(outcomes[-1]), flush=True)
    print(f"\n{table(outcomes)}", flush=True)
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if not failed and chosen.keep is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
