"""`python -m elaswave_fx.timeline RUN [--recovery N] [--out FILE]`: draw a recovery of a run from its events."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from elaswave_fx.errors import ConfigError
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.observe.timeline import draw, parts_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m elaswave_fx.timeline", description="Draw a recovery of a run.")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--recovery", type=int, default=0, metavar="N", help="which of its recoveries (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the picture (default: RUN/recovery-N.svg)")
    wanted = parser.parse_args()
    try:
        print(render(wanted.run, wanted.recovery, wanted.out or wanted.run / f"recovery-{wanted.recovery}.svg"))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def render(run: Path, number: int, out: Path) -> str:
    """Draw one recovery; what was drawn, in words. Raises ConfigError."""
    path = run / "summary.json"
    if not path.is_file():
        raise ConfigError(f"timeline: {path} does not exist; a run writes it at its end")
    recoveries = json.loads(path.read_text(encoding="utf-8"))["recoveries"]
    if not 0 <= number < len(recoveries):
        raise ConfigError(f"timeline: {run} has {len(recoveries)} recoveries; --recovery {number} is none of them")
    recovery = recoveries[number]
    parts = parts_of(RunDirectory(run).lines("events.jsonl"), recovery)
    lost = ", ".join(str(rank) for rank in recovery["ranks"])
    draw(parts, f"rank {lost} lost in step {recovery['step']}: {recovery['cause']}", out)
    return "\n".join(f"{part.end_ms - part.start_ms:9.1f} ms  {part.name}" for part in parts) + f"\n{out}"


if __name__ == "__main__":
    sys.exit(main())
