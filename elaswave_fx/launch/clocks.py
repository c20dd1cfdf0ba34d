"""Clocks that workers have left as they set them, because they were killed: the launcher puts them back."""

from __future__ import annotations

from pathlib import Path

from elaswave_fx.config.types import PowerConfig


def put_clocks_back(run_dir: Path, power: PowerConfig | None, rank: int | None = None) -> list[str]:
    """Put back the clock of a rank whose process has ended, or all; what happened, in words. Nothing where no clock was
    set. `power` says by what this job sets clocks; None: by what the system has."""
    if not (run_dir / "clocks").is_dir():
        return []
    from elaswave_fx.devices.clocks import Targets  # It brings torch along.
    from elaswave_fx.devices.clocks.rank_clock import restore_left_behind

    targets = Targets() if power is None else Targets(power.sysfs, power.hook)
    return restore_left_behind(run_dir, targets, rank)
