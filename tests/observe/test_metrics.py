"""Reports become lines, each step once; coverage is counted, not believed."""

from __future__ import annotations

from elaswave_fx.observe.metrics import StepBook, StepReport
from elaswave_fx.plan.work.spans import Coverage


def report(step: int, **changes: object) -> StepReport:
    return StepReport(step=step, **{"loss": 1.0, "tokens": 10, "step_ms": 2.0, "lr": 0.1, "grad_norm": 0.5, **changes})  # type: ignore[arg-type]


def test_the_first_report_of_a_step_is_its_line() -> None:
    book = StepBook(units=1, samples=4)
    (line,) = book.add(report(0, step_ms=5.0, world_size=2))
    assert (line.step, line.step_ms, line.tokens_per_s, line.world_size) == (0, 5.0, 2000.0, 2)
    assert book.add(report(0, step_ms=9.0)) == ()
    assert book.add(report(2)) == (), "a step before it is still to come"
    assert [line.step for line in book.add(report(1))] == [1, 2]
    assert book.add(report(1)) == ()


def test_steps_that_are_done_again_count_once() -> None:
    book = StepBook(units=1, samples=4, first=3)
    for step in (3, 4, 5):
        (line,) = book.add(report(step, consumed=((0, 1, 0, 4),)))
        assert line.samples == 4
    book.rewind(4)
    assert book.covered == Coverage(4, 0, 0)
    assert [line.step for line in book.add(report(4, consumed=((0, 1, 0, 4),)))] == [4]
    assert book.covered == Coverage(8, 0, 0)


def test_a_line_says_how_many_samples_were_computed() -> None:
    book = StepBook(units=2, samples=4)
    (line,) = book.add(report(0, consumed=((0, 2, 0, 3),)))
    assert line.samples == 3
    assert book.covered == Coverage(3, 0, 1)
