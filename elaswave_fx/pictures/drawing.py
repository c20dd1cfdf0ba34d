"""Matplotlib, which only those who draw need: imported late, and set up so that the same content is the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError

_DPI = 150


def pyplot(command: str, path: Path) -> Any:
    """Return `matplotlib.pyplot`, which is to draw what `path` will hold. Raises ConfigError without matplotlib,
    or when it writes no files of that suffix."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{command}: drawing needs matplotlib; pip install elaswave_fx[plot]") from error
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "elaswave_fx"
    import matplotlib.pyplot
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ConfigError(f"{command}: {path} cannot be drawn; suffixes are {', '.join(sorted(kinds))}")
    return matplotlib.pyplot


def save(figure: Any, path: Path) -> None:
    """Write the file; its suffix says of what kind it is."""
    figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
