"""Restoring of clocks that killed workers have changed."""

from __future__ import annotations

from pathlib import Path

from elaswave_fx.config.keys import PowerConfig


def put_clocks_back(run_dir: Path, power: PowerConfig | None, rank: int | None = None) -> list[str]:
    """Restore the clock of a rank whose process has ended, or of all; return the results as text. `power`: how this job
    sets clocks; None: the system's defaults."""
    if not (run_dir / "clocks").is_dir():
        return []
    from elaswave_fx.devices.clocks import Targets  # imports torch
    from elaswave_fx.devices.clocks.rank_clock import restore_left_behind

    targets = Targets() if power is None else Targets(power.sysfs, power.hook)
    return restore_left_behind(run_dir, targets, rank)
