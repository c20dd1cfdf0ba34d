"""A line every ten seconds where nobody watches, a bar on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from elaswave_fx.observe.metrics import StepLine
from elaswave_fx.observe.progress import StepProgress
from elaswave_fx.observe.run_log import RunLog


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def line(step: int, loss: float = 2.5) -> StepLine:
    return StepLine(
        step=step, loss=loss, tokens=1000, step_ms=2500.0, epoch=0, world_size=4, lr=0.1, grad_norm=1.0,
        tokens_per_s=400.0, memory_peak_mb=1.0, samples=8,
    )  # fmt: skip


def run(console: Console, steps: int) -> None:
    clock, log = Clock(), RunLog(console=console)
    with StepProgress(steps, log, clock) as progress:
        progress.phase("building")
        log.info("plan [ok]")
        for step in range(steps):
            progress.step(line(step))
            clock.now += 2.5


def test_plain_lines_are_rate_limited_and_end_with_the_last_step() -> None:
    out = io.StringIO()
    run(Console(file=out, force_terminal=False, width=200), steps=10)
    assert out.getvalue().splitlines() == [
        "building",
        "plan [ok]",
        "step 1/10  loss 2.5000  400 tokens/s  2500.0 ms/step  0:00:22 left",
        "step 5/10  loss 2.5000  400 tokens/s  2500.0 ms/step  0:00:12 left",
        "step 9/10  loss 2.5000  400 tokens/s  2500.0 ms/step  0:00:02 left",
        "step 10/10  loss 2.5000  400 tokens/s  2500.0 ms/step  0:00:00 left",
    ]


def test_a_terminal_gets_a_bar_and_keeps_one_line() -> None:
    out = io.StringIO()
    run(Console(file=out, force_terminal=True, width=120, color_system=None), steps=10)
    text = out.getvalue()
    assert "━" in text
    assert text.rstrip().endswith("step 10/10  loss 2.5000  400 tokens/s  2500.0 ms/step  0:00:00 left")


def test_nothing_is_drawn_before_the_first_step() -> None:
    out = io.StringIO()
    with StepProgress(5, RunLog(console=Console(file=out, force_terminal=False)), Clock()) as progress:
        progress.draw(last=True)
        assert progress.line() == ""
    assert out.getvalue() == ""
