"""From what ranks report to what is written down: a step is committed once every rank has reported it.

    book = StepBook(world=2, units=4, samples=8)
    book.add(0, StepReport(step=0, loss=5.5, tokens=1024, step_ms=20.0, lr=1e-3, grad_norm=1.2))   ->  ()
    book.add(1, StepReport(step=0, …))   ->  (StepLine(step=0, loss=5.5, …),)

Coverage is counted from what ranks say that they consumed, never from the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Consumed = tuple[int, int, int, int]
"""(first unit, last + 1, first sample, last + 1) of one tile, samples counted within the step."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank says of a step that it has finished. Sums over the step (loss, tokens, norm) are equal on all."""

    step: int
    loss: float  # mean over the step: loss sum / count
    tokens: int  # count of the whole step
    step_ms: float
    lr: float
    grad_norm: float
    memory_peak_mb: float = 0.0
    epoch: int = 0
    consumed: tuple[Consumed, ...] = ()

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> StepReport:
        """From a message's JSON."""
        return StepReport(**{**fields, "consumed": tuple(tuple(tile) for tile in fields["consumed"])})


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A line of `metrics.jsonl`. Times and memory are those of the slowest and the fullest rank."""

    step: int
    loss: float
    tokens: int
    step_ms: float
    epoch: int
    world_size: int
    lr: float
    grad_norm: float
    tokens_per_s: float
    memory_peak_mb: float


@dataclass(frozen=True)
class Coverage:
    """Samples by how often their whole work (every unit) was done: once or more, more than once, less than once."""

    seen: int = 0
    duplicated: int = 0
    skipped: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.seen + other.seen, self.duplicated + other.duplicated, self.skipped + other.skipped)


def coverage(tiles: Iterable[Consumed], units: int, samples: int) -> Coverage:
    """How `tiles` cover the work plane of one step, `units` x `samples`.

    A sample is seen when all its units were computed, skipped otherwise; duplicated when a unit was computed twice.
    Between the borders of tiles nothing changes, so one look per strip of samples is enough.
    """
    tiles = tuple(tiles)
    borders = sorted({0, samples, *(min(max(b, 0), samples) for tile in tiles for b in tile[2:])})
    total = Coverage()
    for lo, hi in itertools.pairwise(borders):
        times = [0] * units
        for first, last, start, end in tiles:
            if start <= lo and hi <= end:
                for unit in range(max(first, 0), min(last, units)):
                    times[unit] += 1
        width, whole = hi - lo, min(times, default=0) > 0
        total += Coverage(width * whole, width * (max(times, default=0) > 1), width * (not whole))
    return total


class StepBook:
    """Gathers reports until a step is complete. Lines come out in step order, each once."""

    def __init__(self, world: int, units: int, samples: int) -> None:
        self.world, self.units, self.samples = world, units, samples
        self.covered = Coverage()
        self._pending: dict[int, dict[int, StepReport]] = {}

    def add(self, rank: int, report: StepReport) -> tuple[StepLine, ...]:
        """The lines that this report completes. A rank reports its steps in order, so they come out in order."""
        self._pending.setdefault(report.step, {})[rank] = report
        lines = []
        while self._pending:
            step = min(self._pending)
            if len(self._pending[step]) < self.world:
                break
            reports = self._pending.pop(step)
            tiles = [tile for _, each in sorted(reports.items()) for tile in each.consumed]
            self.covered += coverage(tiles, self.units, self.samples)
            lines.append(step_line(reports, self.world))
        return tuple(lines)

    def owing(self) -> frozenset[int]:
        """Ranks that have yet to report the oldest step that another one has reported."""
        reported = self._pending[min(self._pending)] if self._pending else range(self.world)
        return frozenset(range(self.world)) - frozenset(reported)


def step_line(reports: Mapping[int, StepReport], world: int) -> StepLine:
    """The reports of one step by rank, as one line."""
    first = reports[min(reports)]
    step_ms = max(report.step_ms for report in reports.values())
    return StepLine(
        step=first.step,
        loss=first.loss,
        tokens=first.tokens,
        step_ms=step_ms,
        epoch=first.epoch,
        world_size=world,
        lr=first.lr,
        grad_norm=first.grad_norm,
        tokens_per_s=1e3 * first.tokens / step_ms if step_ms > 0 else 0.0,
        memory_peak_mb=max(report.memory_peak_mb for report in reports.values()),
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`summary.json`. `outcome`: completed, interrupted or failed, with the `reason` of the latter two."""

    steps: int
    loss_first: float | None
    loss_last: float | None
    samples_seen: int
    samples_duplicated: int
    samples_skipped: int
    params_digest: str | None
    recoveries: tuple[Mapping[str, Any], ...] = ()
    eval_loss_last: float | None = None
    outcome: str
    reason: str | None = None
    wall_s: float
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """`extra`, what workers added at their end, lies beside the other keys."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("extra"), **fields}
