"""Clocks that workers have left as they set them, because they were killed: the launcher puts them back."""

from __future__ import annotations

from pathlib import Path


def put_clocks_back(run_dir: Path, rank: int | None = None) -> list[str]:
    """Of a rank whose process has ended, or of all; what happened, in words. Nothing where no clock was set."""
    if not (run_dir / "clocks").is_dir():
        return []
    from elaswave_fx.devices.clocks.rank_clock import restore_left_behind  # It brings torch along.

    return restore_left_behind(run_dir, rank)
