"""Writes a run's steps and events as they happen, and its summary at the end.

recorder = Recorder.create(run_dir) recorder.planned(plan_text, units=14, samples=32, world=4) recorder.step(report)  ->
the lines that it completes recorder.finish("completed", None)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elaswave_fx.observe.job_events import Agreed, Finished, Planned
from elaswave_fx.observe.metrics import StepBook, StepLine, StepReport, Summary
from elaswave_fx.observe.rank_events import Drained, FaultStrikes, GaveUp, Resumed
from elaswave_fx.observe.recoveries import Recoveries
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.observe.run_event import RunEvent, fields_of
from elaswave_fx.plan.work.spans import Coverage


class Recorder:
    """The record of a run; only the launcher's one thread uses it."""

    def __init__(
        self,
        directory: RunDirectory,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
    ) -> None:
        self.directory = directory
        self.steps = self._first_step = first_step  # `steps`: number of committed steps
        self._clock, self.began_s = clock, clock() if began_s is None else began_s
        self._book: StepBook | None = None
        self._first: StepLine | None = None
        self._last: StepLine | None = None
        self._tokens, self._first_at = 0, 0.0
        earlier = directory.lines("metrics.jsonl")
        self._earlier = [line.get("samples") for line in earlier]  # None in lines of earlier versions
        self._loss_first, self._loss_last = (earlier[0]["loss"], earlier[-1]["loss"]) if earlier else (None, None)
        evaluated = directory.lines("eval.jsonl")[-1:]
        self._eval_loss: float | None = next((line["loss"] for line in evaluated), None)
        self._eval_step = next((line["step"] for line in evaluated), -1)
        self._ends: dict[int, Mapping[str, Any]] = {}
        events = directory.lines("events.jsonl")
        self._recoveries = Recoveries(_recovery_of(line) for line in events if line["kind"] == "recovery")
        self.faults: set[tuple[int, str]] = set()  # (rank, kind) of the faults that fired
        self._left = [_left_of(line) for line in events if line["kind"] == "left" and line.get("asked")]
        self.gave_up: str | None = None  # why the workers end the run early
        self._has_learned = False  # whether a step from `first_step` on has changed a parameter
        self._unchanged = ""  # why the last such step did not
        self.plane: tuple[int, int] | None = None  # (units, samples) of a step

    @staticmethod
    def create(run_dir: Path, first_step: int = 0, same_run: bool = False, began_s: float | None = None) -> Recorder:
        """Create the record of a run that begins after `first_step` committed steps. `same_run`: they are of this
        directory, so its lines are kept. `began_s`: the launcher's start, by the monotonic clock.

        Raises `ConfigError` if the directory cannot be written.
        """
        return Recorder(RunDirectory.create(run_dir, first_step if same_run else None), first_step, began_s=began_s)

    @staticmethod
    def rejoin(run_dir: Path, first_step: int, began_s: float) -> Recorder:
        """Continue the record of a run whose launcher has died, after its last step. Raises `OSError`."""
        directory = RunDirectory.rejoin(run_dir)
        done = max((line["step"] + 1 for line in directory.lines("metrics.jsonl")), default=first_step)
        recorder = Recorder(directory, done, began_s=began_s)
        for line in directory.lines("events.jsonl"):
            if line["kind"] == "planned" and "units" in line:
                recorder._expect(line["units"], line["samples"])
        return recorder

    def planned(self, plan: str, units: int, samples: int, world: int) -> None:
        """Write the first plan; steps can be recorded after this."""
        self.directory.plan(0, plan)
        self._expect(units, samples)
        self.event(Planned(units=units, samples=samples, world_size=world))
        if self._first_step:
            self.event(Resumed(step=self._first_step))

    def _expect(self, units: int, samples: int) -> None:
        self.plane = (units, samples)
        self._book = StepBook(units, samples, self._first_step)

    def event(self, event: RunEvent, epoch: int = 0, at_s: float | None = None) -> Mapping[str, Any] | None:
        """Write a line of `events.jsonl`, timed since the launcher's start. `at_s`: its monotonic time, if another
        process reports it; None: now. Return the recovery that it completes or corrects, if any."""
        at_s = self._clock() if at_s is None else at_s
        fields = fields_of(event)
        self.directory.event(1e3 * (at_s - self.began_s), fields.pop("event"), epoch, **fields)
        recovery = self._recoveries.event(event, epoch, at_s)
        self._recovery(recovery)
        match event:
            case FaultStrikes(rank=int(rank), fault=fault):
                self.faults.add((rank, fault))
            case Drained():
                self._left.append(_left_of(fields))
            case GaveUp(reason=reason):
                self.gave_up = reason
            case Agreed(rolled_back_to=int(step)):
                self._rewind(step)
        return recovery

    def _recovery(self, entry: Mapping[str, Any] | None) -> None:
        """Write a finished recovery to the file, so that it survives the launcher and a resumed run reads it."""
        if entry is not None:
            fields = {key: value for key, value in entry.items() if key != "epoch"}
            self.directory.event(1e3 * (self._clock() - self.began_s), "recovery", entry["epoch"], **fields)

    def step(self, report: StepReport) -> tuple[StepLine, ...]:
        """Record a rank's report of a committed step. Write and return the lines that it completes."""
        assert self._book is not None, "a step before the plan"
        lines = self._book.add(report)
        self._has_learned = self._has_learned or report.unchanged is None
        self._unchanged = report.unchanged or self._unchanged
        for line in lines:
            self.directory.step(line)
            if self._first is None:
                self._first, self._first_at = line, self._clock() - line.step_ms / 1e3
                self._loss_first = line.loss if self._loss_first is None else self._loss_first
            self._last, self._loss_last = line, line.loss
            self.steps += 1
            self._tokens += line.tokens
            self._recoveries.step(line.step_ms, report.alive_at_s)
        return lines

    def _rewind(self, step: int) -> None:
        """Drop the steps from `step` on and their lines: they were rolled back."""
        if self._book is not None and step < self.steps:
            self._book.rewind(step)
            self.directory.rewind(step)
            self._eval_step = min(self._eval_step, step)
            self.steps = max(step, self._first_step)
            self._has_learned = self._has_learned and self.steps > self._first_step

    @property
    def learned_nothing(self) -> str | None:
        """Why no step changed a parameter, as text; None if one did, or there was none."""
        count = self.steps - self._first_step
        if self._has_learned or not count:
            return None
        return f"none of the {count} steps has changed a parameter: in the last one {self._unchanged}"

    def evaluation(self, step: int, loss: float, count: int) -> None:
        """Write a mean held-out loss; ignore a repetition, which follows a loss of a rank."""
        if step <= self._eval_step:
            return
        self.directory.evaluation(step, loss, count)
        self._eval_loss, self._eval_step = loss, step

    def ended(self, rank: int, summary: Mapping[str, Any]) -> None:
        """Keep a rank's part of the summary."""
        self._ends[rank] = summary

    def finish(self, outcome: str, reason: str | None, ledger_head: str | None = None) -> None:
        """Write the summary and close the files. `ledger_head`: the hash of the ledger's last line, if known."""
        extra: dict[str, Any] = {"ledger_head": ledger_head}
        for rank in sorted(self._ends, reverse=True):
            extra.update(self._ends[rank])
        covered = self._covered()
        self._recovery(self._recoveries.unfinished())
        self.event(Finished(outcome=outcome, steps=self.steps))
        self.directory.summary(
            Summary(
                steps=self.steps,
                loss_first=self._loss_first,
                loss_last=self._loss_last,
                samples_seen=covered.seen,
                samples_duplicated=covered.duplicated,
                samples_skipped=covered.skipped,
                params_digest=extra.pop("params_digest", None),
                recoveries=self._recoveries.entries(),
                left=tuple(self._left),
                eval_loss_last=self._eval_loss,
                outcome=outcome,
                reason=reason,
                wall_s=round(self._clock() - self.began_s, 3),
                extra=extra,
            )
        )
        self.directory.close()

    def _covered(self) -> Coverage:
        """The coverage of the whole run. Steps before a checkpoint count as seen, except for logged skipped samples."""
        if self._book is None:
            return Coverage()
        batch = self._book.samples
        skipped = sum(batch - samples for samples in self._earlier if samples is not None)
        return self._book.covered + Coverage(seen=self._first_step * batch - skipped, skipped=skipped)

    def closing_line(self) -> str:
        """Return the run's result in one line."""
        if self._first is None or self._last is None:
            done = f"all {self.steps} steps were done before" if self.steps else "no steps"
            return f"{done}; {self.directory.path}"
        spent = self._clock() - self._first_at
        earlier = f", {self.steps - self._first_step} of them now" if self._first_step else ""
        held_out = f", held-out {self._eval_loss:.4f}" if self._eval_loss is not None else ""
        return (
            f"{self.steps} steps{earlier}: loss {self._first.loss:.4f} -> {self._last.loss:.4f}{held_out}, "
            f"{spent:.1f} s, {self._tokens / max(spent, 1e-9):,.0f} tokens/s; {self.directory.path}"
        )


def _left_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("rank", "step", "cause")}


def _recovery_of(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("t_ms", "kind")}
