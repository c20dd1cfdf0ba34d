"""This module draws what a loss has made of a plan: the work plane, rank by rank, before and after it.

In: a run directory. Out: two planes, units x samples, side by side, each with the steps that were measured on it.

    before, after = before_and_after(Path("runs/x"), epoch=1)  ->  Measured(plan, step_ms=1894.9, steps=6), …
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError
from elaswave_fx.pictures.drawing import pyplot, save
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import shape_name
from elaswave_fx.plan.tiling import Lane, Tile, joined
from elaswave_fx.words import size_text

SKIPPED = 2
"""First steps on other lanes that do not count if there are more: they are done again, or wait for copies."""


@dataclass(frozen=True)
class Measured:
    """A plan and the median of the steps on its lanes; None where there was no such step."""

    plan: Plan
    step_ms: float | None
    steps: int

    @property
    def words(self) -> str:
        """Return what the plan is, in two lines."""
        lanes = self.plan.lanes
        if not lanes:
            return f"no lanes: {self.plan.terminal_reason}"
        shape = shape_name([[len(stage.ranks) for stage in lane.stages] for lane in lanes])
        most = max(cost.memory_bytes for cost in self.plan.predicted.ranks.values())
        times = f"predicted {1e3 * self.plan.predicted.step_s:.0f} ms a step"
        if self.step_ms is not None:
            times += f", measured {self.step_ms:.0f} ms (median of {self.steps})"
        return f"{len(self.plan.ranks)} ranks, {shape}, at most {size_text(most)} a rank\n{times}"


def before_and_after(run: Path, epoch: int, lines: Sequence[Mapping[str, Any]]) -> tuple[Measured, Measured]:
    """Return the plans on both sides of the beginning of `epoch`; `lines` are those of `metrics.jsonl`.

    Raises ConfigError where a plan is missing, PlanError where it is none.
    """
    found = [_measured(run, range(epoch - 1, -1, -1), lines), _measured(run, itertools.count(epoch), lines)]
    return found[0], found[1]


def draw_plans(pair: tuple[Measured, Measured], title: str, path: Path) -> None:
    """Draw both planes; ranks that are lost are struck out. Raises ConfigError without matplotlib."""
    plt = pyplot("timeline", path)
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained", sharey=True)
    left = set(pair[1].plan.ranks)
    for each, measured in zip(axes, pair, strict=True):
        plan = measured.plan
        for tile in plan.tiles:
            _draw_tile(each, tile, f"C{tile.rank % 10}", lost=tile.rank not in left)
        for lane in plan.lanes:
            _draw_lane(each, lane, len(plan.workload.units))
        each.set_xlim(0, plan.workload.global_batch)
        each.set_ylim(len(plan.workload.units), 0)
        each.set_xlabel("sample of the step")
        each.set_title(measured.words, loc="left", fontsize=9)
    axes[0].set_ylabel("unit")
    figure.suptitle(title)
    save(figure, path)
    plt.close(figure)


def _draw_tile(axes: Any, tile: Tile, color: str, lost: bool) -> None:
    """Draw a rectangle for each span, and the number of the rank in the widest one."""
    for span in tile.spans:
        axes.add_patch(
            _rectangle(
                (span.lo, tile.units.lo), len(span), len(tile.units),
                facecolor="white" if lost else color, alpha=0.6, edgecolor=color, hatch="xxx" if lost else None,
            )
        )  # fmt: skip
    if tile.spans:
        widest = max(tile.spans, key=len)
        middle = (widest.lo + widest.hi) / 2, (tile.units.lo + tile.units.hi) / 2
        axes.text(*middle, str(tile.rank), ha="center", va="center", fontsize=8, fontweight="bold")


def _draw_lane(axes: Any, lane: Lane, units: int) -> None:
    for span in joined(lane.micro_batches):
        axes.add_patch(_rectangle((span.lo, 0), len(span), units, fill=False, edgecolor="black", linewidth=1.5))


def _rectangle(corner: tuple[float, float], width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, **style)


def _measured(run: Path, epochs: Iterator[int] | range, lines: Sequence[Mapping[str, Any]]) -> Measured:
    """Return the plan of the first of the epochs, with all steps on its lanes: an epoch may only add a copy."""
    first: Plan | None = None
    steps: dict[int, float] = {}
    for epoch in epochs:
        path = run / f"plan-{epoch}.json"
        plan = Plan.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
        if first is None and plan is None:
            raise ConfigError(f"timeline: {path} does not exist; a run keeps the plan of each of its epochs")
        if plan is None or (first is not None and plan.lanes != first.lanes):
            break
        first = first or plan
        steps |= {line["step"]: line["step_ms"] for line in lines if line["epoch"] == epoch}
    assert first is not None
    in_order = [steps[step] for step in sorted(steps)]
    counted = in_order[SKIPPED:] or in_order
    return Measured(first, statistics.median(counted) if counted else None, len(counted))
