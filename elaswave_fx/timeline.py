"""`python -m elaswave_fx.timeline RUN [--recovery N] [--plans] [--out FILE]`: draw a recovery of a run from its events.

`--plans` draws which rank computed what, in the whole run or, with `--recovery`, before and after one recovery.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.entry import run_command
from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.pictures.plans import before_and_after, draw_plans, history
from elaswave_fx.pictures.recovery import draw, parts_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m elaswave_fx.timeline", description="Draw what became of a run.")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--recovery", type=int, metavar="N", help="which of its recoveries (default: 0)")
    parser.add_argument(
        "--plans",
        action="store_true",
        help="draw who computed what instead, whenever that changed, or around recovery N",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the picture (default: RUN/recovery-N.svg, RUN/plans.svg)"
    )
    wanted = parser.parse_args()
    number = wanted.recovery
    name = f"recovery-{number or 0}" if not wanted.plans else "plans" if number is None else f"plans-{number}"
    out = wanted.out or wanted.run / f"{name}.svg"
    try:
        print(render_plans(wanted.run, number, out) if wanted.plans else render(wanted.run, number or 0, out))
    except PlanError as error:  # from a file of the run
        raise ConfigError(str(error)) from error
    return 0


def render(run: Path, number: int, out: Path) -> str:
    """Draw one recovery; return its parts and times as text. Raises ConfigError."""
    recovery = _recovery(run, number)
    parts = parts_of(RunDirectory(run).lines("events.jsonl"), recovery)
    draw(parts, _title(recovery), out)
    return "\n".join(f"{part.end_ms - part.start_ms:9.1f} ms  {part.name}" for part in parts) + f"\n{out}"


def render_plans(run: Path, number: int | None, out: Path) -> str:
    """Draw the plans of a run, or those before and after one recovery; return them as text. Raises ConfigError,
    PlanError."""
    lines = RunDirectory(run).lines("metrics.jsonl")
    if number is None:
        planes, title = history(run, lines), run.name
    else:
        recovery = _recovery(run, number)
        planes, title = before_and_after(run, recovery["epoch"], lines), _title(recovery)
    draw_plans(planes, title, out)
    return "\n".join((*(plane.words for plane in planes), f"{out}"))


def _recovery(run: Path, number: int) -> Mapping[str, Any]:
    path = run / "summary.json"
    if not path.is_file():
        raise ConfigError(f"timeline: {path} does not exist; a run writes it at its end")
    recoveries = json.loads(path.read_text(encoding="utf-8"))["recoveries"]
    if not 0 <= number < len(recoveries):
        raise ConfigError(f"timeline: {run} has {len(recoveries)} recoveries; --recovery {number} is none of them")
    return recoveries[number]


def _title(recovery: Mapping[str, Any]) -> str:
    lost = ", ".join(str(rank) for rank in recovery["ranks"])
    return f"rank {lost} lost in step {recovery['step']}: {recovery['cause']}"


if __name__ == "__main__":
    sys.exit(run_command(main))
