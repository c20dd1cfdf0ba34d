"""This module draws what became of a plan as ranks were lost, joined and left: the work plane, rank by rank.

In: a run directory. Out: planes, units x samples, side by side, one for each change of who computes what, each with the
steps that were measured on it.

    history(Path("runs/x"), lines)  ->  Measured(plan, step_ms=1894.9, steps=6), Measured(…), …
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaswave_fx.errors import ConfigError
from elaswave_fx.pictures.drawing import pyplot, save
from elaswave_fx.plan.make.planner import shape_name
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.spans import Runs
from elaswave_fx.plan.work.tiling import Lane, Tile
from elaswave_fx.words import size_text

SKIPPED = 2
"""First steps on other lanes that do not count if there are more: they are done again, or wait for copies."""


IN_A_ROW = 4
"""Planes of a picture."""


@dataclass(frozen=True)
class Measured:
    """The first plan with these lanes, and the median of the `steps` on them; None where there was no such step."""

    plan: Plan
    step_ms: float | None
    steps: int
    first_step: int | None = None

    @property
    def words(self) -> str:
        """Return when it began and why, and what the plan is, in three lines."""
        lanes = self.plan.lanes
        began = "" if self.first_step is None else f" from step {self.first_step} on"
        why = f": {self.plan.reason.partition(';')[0]}" if self.plan.epoch else ""
        if not lanes:
            return f"no lanes: {self.plan.terminal_reason}"
        shape = shape_name([[len(stage.ranks) for stage in lane.stages] for lane in lanes])
        most = max(cost.memory_bytes for cost in self.plan.predicted.ranks.values())
        times = f"predicted {1e3 * self.plan.predicted.step_s:.0f} ms a step"
        if self.step_ms is not None:
            times += f", measured {self.step_ms:.0f} ms (median of {self.steps})"
        what = f"{len(self.plan.ranks)} ranks, {shape}, at most {size_text(most)} a rank"
        return f"epoch {self.plan.epoch}{began}{why}\n{what}\n{times}"


def history(run: Path, lines: Sequence[Mapping[str, Any]]) -> tuple[Measured, ...]:
    """Return the plans of a run with other lanes or ranks than the one before: an epoch may only move owners. `lines`
    are those of `metrics.jsonl`.

    Raises ConfigError where there is no plan, PlanError where a file is none.
    """
    paths = sorted(run.glob("plan-*.json"), key=lambda path: int(path.stem.removeprefix("plan-")))
    if not paths:
        raise ConfigError(f"timeline: {run / 'plan-0.json'} does not exist; a run keeps the plan of each of its epochs")
    spans: list[list[Plan]] = []
    for path in paths:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
        if not spans or (plan.lanes, plan.ranks) != (spans[-1][0].lanes, spans[-1][0].ranks):
            spans.append([])
        spans[-1].append(plan)
    return tuple(_measured(span, lines) for span in spans)


def before_and_after(run: Path, epoch: int, lines: Sequence[Mapping[str, Any]]) -> tuple[Measured, Measured]:
    """Return the plans on both sides of the beginning of `epoch`. Raises ConfigError, PlanError as `history` does."""
    if not (path := run / f"plan-{epoch}.json").is_file():
        raise ConfigError(f"timeline: {path} does not exist; a run keeps the plan of each of its epochs")
    found = history(run, lines)
    after = max(number for number, measured in enumerate(found) if measured.plan.epoch <= epoch)
    return found[max(after - 1, 0)], found[after]


def draw_plans(planes: Sequence[Measured], title: str, path: Path) -> None:
    """Draw the planes in turn: ranks that the next one lacks are struck out, those that the last one lacked dotted.
    Raises ConfigError without matplotlib."""
    plt = pyplot("timeline", path)
    rows = math.ceil(len(planes) / IN_A_ROW)
    columns = math.ceil(len(planes) / rows)
    size = (6.5 if columns <= 2 else 4.6) * columns, 4.5 * rows
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", sharey=True, squeeze=False)
    for number, each in enumerate(grid.flat):
        each.set_visible(number < len(planes))
        if number < len(planes):
            _draw_plane(each, planes[number], planes[max(number - 1, 0)].plan, planes[number:][:2][-1].plan)
    for each in grid[:, 0]:
        each.set_ylabel("unit")
    figure.suptitle(title)
    save(figure, path)
    plt.close(figure)


def _draw_plane(axes: Any, measured: Measured, before: Plan, after: Plan) -> None:
    """`before`, `after`: the plane's own plan where there is no other."""
    plan = measured.plan
    for tile in plan.tiles:
        hatch = "xxx" if tile.rank not in after.ranks else ".." if tile.rank not in before.ranks else None
        _draw_tile(axes, tile, f"C{tile.rank % 10}", hatch, lost=tile.rank not in after.ranks)
    for lane in plan.lanes:
        _draw_lane(axes, lane, len(plan.workload.units))
    axes.set_xlim(0, plan.workload.options.global_batch)
    axes.set_ylim(len(plan.workload.units), 0)
    axes.set_xlabel("sample of the step")
    axes.set_title(measured.words, loc="left", fontsize=9)


def _draw_tile(axes: Any, tile: Tile, color: str, hatch: str | None, lost: bool) -> None:
    """Draw a rectangle for each span, and the number of the rank in the widest one."""
    for units, samples in tile.work:
        axes.add_patch(
            _rectangle(
                (samples.lo, units.lo), len(samples), len(units),
                facecolor="white" if lost else color, alpha=0.6, edgecolor=color, hatch=hatch,
            )
        )  # fmt: skip
    if tile.work:
        units, samples = max(tile.work, key=lambda piece: len(piece.units) * len(piece.samples))
        middle = (samples.lo + samples.hi) / 2, (units.lo + units.hi) / 2
        axes.text(*middle, str(tile.rank), ha="center", va="center", fontsize=8, fontweight="bold")


def _draw_lane(axes: Any, lane: Lane, units: int) -> None:
    for span in Runs.of(*lane.micro_batches).spans:
        axes.add_patch(_rectangle((span.lo, 0), len(span), units, fill=False, edgecolor="black", linewidth=1.5))


def _rectangle(corner: tuple[float, float], width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, **style)


def _measured(span: Sequence[Plan], lines: Sequence[Mapping[str, Any]]) -> Measured:
    """Return the first of the plans, which have the same lanes, with all steps on them."""
    epochs = {plan.epoch for plan in span}
    steps = {line["step"]: line["step_ms"] for line in lines if line["epoch"] in epochs}
    in_order = [steps[step] for step in sorted(steps)]
    counted = in_order[SKIPPED:] or in_order
    return Measured(
        span[0], statistics.median(counted) if counted else None, len(counted), min(steps) if steps else None
    )
