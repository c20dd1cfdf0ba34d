"""The progress of a run on the console: a live bar on a terminal, a line every ten seconds elsewhere.

    step 120/200  loss 2.4131  118,204 tokens/s  34.7 ms/step  0:00:03 left

The calling thread draws it; there is no thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn

from elaswave_fx.observe.metrics import StepLine
from elaswave_fx.observe.run_log import RunLog

LINE_EVERY_S = 10.0
DRAW_EVERY_S = 0.1
_SMOOTHING = 0.1
"""Weight of the newest step in the shown means, which so follow about ten steps."""


class StepProgress:
    """The progress over `steps`, of which `done` are already completed; a context manager."""

    def __init__(self, steps: int, log: RunLog, clock: Callable[[], float] = time.monotonic, done: int = 0) -> None:
        self.steps, self._log, self._clock = steps, log, clock
        self._last: StepLine | None = None
        self._done = done
        self._step_s = 0.0  # smoothed time between commits, for the estimate of the time left
        self._committed_at: float | None = None
        self._drawn_at = -float("inf")
        self._shown = done
        self._bar: Progress | None = None
        if log.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[line]}"))
            self._bar = Progress(*columns, console=log.console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task("starting", total=steps, completed=done, line="")

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.draw(last=True)
        if self._bar is not None:
            self._bar.stop()
            if self._last is not None:
                self._log.info(self.line())

    def phase(self, text: str) -> None:
        """Show the current phase before the first step."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
            self._bar.refresh()
        else:
            self._log.info(text)

    def step(self, line: StepLine) -> None:
        """Record a committed step and draw if it is time."""
        now = self._clock()
        since = line.step_ms / 1e3 if self._committed_at is None else now - self._committed_at
        self._committed_at = now
        self._step_s = since if self._last is None else self._step_s + _SMOOTHING * (since - self._step_s)
        self._last, self._done = line, self._done + 1
        self.draw()

    def rewind(self, step: int) -> None:
        """Take back the steps from `step` on, which will be replayed."""
        self._done = min(self._done, step)

    def draw(self, last: bool = False) -> None:
        """Draw the newest step, at most every `LINE_EVERY_S` (lines) or `DRAW_EVERY_S` (bar), and at the end."""
        every = LINE_EVERY_S if self._bar is None else DRAW_EVERY_S
        now = self._clock()
        if self._last is None or not (last or now - self._drawn_at >= every):
            return
        self._drawn_at = now
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description="training", line=self.line())
            self._bar.refresh()
        elif self._shown != self._done:
            self._log.info(self.line())
        self._shown = self._done

    def line(self) -> str:
        """Return the newest step as text, empty before the first."""
        if self._last is None:
            return ""
        step_s = max(self._step_s, 1e-9)
        left = timedelta(seconds=round(step_s * (self.steps - self._done)))
        rate = self._last.tokens / step_s
        return (
            f"step {self._done}/{self.steps}  loss {self._last.loss:.4f}  {rate:,.0f} tokens/s  "
            f"{step_s * 1e3:.1f} ms/step  {left} left"
        )
