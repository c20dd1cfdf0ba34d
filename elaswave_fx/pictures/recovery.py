"""This module draws a recovery of a run from the run's own events.

In: a run directory. Out: an SVG (or whatever the suffix says): what happened between the loss and the next commit.

    parts_of(events, recovery)  ->  (Part("detect", 0.0, 0.8), Part("agree and plan", 0.8, 9.1), …)  in ms from the loss
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError
from elaswave_fx.pictures.drawing import pyplot, save

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A span of a recovery, in ms from the loss."""

    name: str
    start_ms: float
    end_ms: float


def parts_of(events: Sequence[Event], recovery: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of one entry of `summary.json`'s `recoveries`, in order of time.

    Raises ConfigError when the run has not written down all of it.
    """
    epoch, ranks = recovery["epoch"], recovery["ranks"]
    at = {event["kind"]: event for event in events if event["epoch"] == epoch}
    signs = [e for e in events if e["kind"] in ("fault", "left", "detected") and e.get("rank") in ranks]
    missing = [kind for kind in ("stopped", "agreed", "edited", "transferred", "resumed") if kind not in at]
    if missing or not signs:
        raise ConfigError(f"timeline: the events of epoch {epoch} lack {', '.join(missing) or 'the loss'}")
    began = min(event["t_ms"] for event in signs)
    detected = min((e["t_ms"] for e in signs if e["kind"] == "detected"), default=began)
    moved = at["transferred"]["t_ms"]
    ready = moved - at["transferred"]["ms"]
    edit = ready - at["edited"]["ms"]
    borders = (
        ("detect", began, detected),
        ("leave the step", detected, at["stopped"]["t_ms"]),
        ("agree and plan", at["stopped"]["t_ms"], at["agreed"]["t_ms"]),
        ("tell the ranks", at["agreed"]["t_ms"], edit),
        ("edit in place", edit, ready),
        ("move parameters", ready, moved),
        ("do the step again", moved, at["resumed"]["t_ms"]),
    )
    return tuple(Part(name, start - began, max(start, end) - began) for name, start, end in borders)


def draw(parts: Sequence[Part], title: str, path: Path) -> None:
    """Draw one bar per part, with its milliseconds. Raises ConfigError without matplotlib."""
    plt = pyplot("timeline", path)
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(parts) + 1.2), layout="constrained")
    total = max(part.end_ms for part in parts)
    for row, part in enumerate(parts):
        width = part.end_ms - part.start_ms
        axes.barh(row, width, left=part.start_ms, color=f"C{row}", height=0.6)
        axes.text(part.end_ms + 0.01 * total, row, f"{width:.1f} ms", va="center")
    axes.set_yticks(range(len(parts)), [part.name for part in parts])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * total)
    axes.set_xlabel("ms since the loss")
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
    plt.close(figure)
