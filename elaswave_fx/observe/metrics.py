"""Turns ranks' step reports into metrics lines: one per committed step, from the first report of it.

    book = StepBook(units=4, samples=8)
    book.add(StepReport(step=0, loss=5.5, tokens=1024, step_ms=20.0, lr=1e-3, grad_norm=1.2, world_size=2, …))
        ->  (StepLine(step=0, loss=5.5, …),)
    book.add(StepReport(step=0, …))   ->  ()

Coverage is counted from the samples that ranks report as consumed, never from the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaswave_fx.plan.work.spans import Coverage, Edges, coverage


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A rank's report of a committed step, which holds for all ranks.

    `loss` is the mean over the step (loss sum / count) and `tokens` the count of the whole step. `memory_peak_mb` is
    that of the fullest rank. `energy_j`: all ranks' energy, from the watts of their clocks. `alive_at_s` is the
    monotonic time of the previous commit: every member has voted since. `unchanged`: why the step changed no parameter,
    if so.
    """

    step: int
    loss: float
    tokens: int
    step_ms: float
    lr: float
    grad_norm: float
    memory_peak_mb: float = 0.0
    epoch: int = 0
    consumed: tuple[Edges, ...] = ()
    world_size: int = 0
    alive_at_s: float | None = None
    energy_j: float | None = None
    unchanged: str | None = None

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> StepReport:
        return StepReport(**{**fields, "consumed": tuple(tuple(tile) for tile in fields["consumed"])})


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A line of `metrics.jsonl`, for each committed step. A value that is not finite is `null`."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean over the step: loss sum / count."""
    tokens: int
    """The count of targets in the loss; samples if a sample has one label."""
    step_ms: float
    """Time between commits at the rank that reported first; in an epoch's first step, from when that rank was ready."""
    epoch: int
    """The epoch that committed the step."""
    world_size: int
    """Number of ranks that took part."""
    lr: float
    grad_norm: float
    """Norm of the mean gradient over all parameters, before clipping."""
    tokens_per_s: float
    """`tokens` / `step_ms`."""
    memory_peak_mb: float
    """Peak resident memory of the fullest rank, shared pages of torch included."""
    energy_j: float | None = None
    """Joules of all ranks, from their clocks; null without `power.points`."""
    energy_per_token_j: float | None = None
    samples: int
    """Computed samples: the whole batch, except with `lab.policy=smaller_batch`."""


class StepBook:
    """The first report of every step, as lines in step order, each once, from `first` on."""

    def __init__(self, units: int, samples: int, first: int = 0) -> None:
        self.units, self.samples = units, samples
        self._first = self._next = first
        self._ahead: dict[int, StepReport] = {}
        self._odd: dict[int, Coverage] = {}  # of steps not covered exactly once: few or none

    def add(self, report: StepReport) -> tuple[StepLine, ...]:
        """Add a report; return the lines that it completes: none for a known step, more if later ones waited."""
        if report.step >= self._next:
            self._ahead.setdefault(report.step, report)
        lines = []
        while self._next in self._ahead:
            found = self._ahead.pop(self._next)
            covered = coverage(found.consumed, self.units, self.samples)
            if covered != Coverage(seen=self.samples):
                self._odd[self._next] = covered
            lines.append(step_line(found, covered.seen))
            self._next += 1
        return tuple(lines)

    def rewind(self, step: int) -> None:
        """Forget steps from `step` on, which are replayed from a checkpoint."""
        self._next = max(self._first, min(self._next, step))
        self._odd = {odd: covered for odd, covered in self._odd.items() if odd < self._next}
        self._ahead.clear()

    @property
    def covered(self) -> Coverage:
        even = self._next - self._first - len(self._odd)
        return sum(self._odd.values(), Coverage(seen=even * self.samples))


def step_line(report: StepReport, samples: int) -> StepLine:
    """Return the line of a step; `samples` were computed."""
    return StepLine(
        step=report.step,
        loss=report.loss,
        tokens=report.tokens,
        step_ms=report.step_ms,
        epoch=report.epoch,
        world_size=report.world_size,
        lr=report.lr,
        grad_norm=report.grad_norm,
        tokens_per_s=1e3 * report.tokens / report.step_ms if report.step_ms > 0 else 0.0,
        memory_peak_mb=report.memory_peak_mb,
        energy_j=report.energy_j,
        energy_per_token_j=None if report.energy_j is None else report.energy_j / max(1, report.tokens),
        samples=samples,
    )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`summary.json`, written last, however the run ended."""

    steps: int
    """Steps of the whole run, including those before the checkpoint that it resumed from."""
    loss_first: float | None
    loss_last: float | None
    samples_seen: int
    """Samples that ranks consumed; seen + skipped are the batches of all steps."""
    samples_duplicated: int
    samples_skipped: int
    params_digest: str | None
    """Digest of all parameters (fp32, by name), for any layout: SHA-256 over the SHA-256 of each 16 MiB chunk."""
    recoveries: tuple[Mapping[str, Any], ...] = ()
    """One entry per failure, with the fields of the event `recovery`; one during a recovery belongs to its entry."""
    left: tuple[Mapping[str, Any], ...] = ()
    """`rank`, `step`, `cause` of each drained rank."""
    eval_loss_last: float | None = None
    outcome: str
    """`completed`, `interrupted` or `failed`."""
    reason: str | None = None
    """The reason of the latter two outcomes."""
    wall_s: float
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON, merged with `extra`, which workers added at their end."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("extra"), **fields}
