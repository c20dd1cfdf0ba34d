"""Reports become lines when every rank has spoken; coverage is counted, not believed."""

from __future__ import annotations

import random

import pytest

from elaswave_fx.observe.metrics import Consumed, Coverage, StepBook, StepReport, coverage


def report(step: int, **changes: float) -> StepReport:
    return StepReport(step=step, **{"loss": 1.0, "tokens": 10, "step_ms": 2.0, "lr": 0.1, "grad_norm": 0.5, **changes})  # type: ignore[arg-type]


def test_a_line_comes_when_the_last_rank_has_reported() -> None:
    book = StepBook(world=2, units=1, samples=4)
    assert book.owing() == frozenset()
    assert book.add(1, report(0, step_ms=5.0)) == ()
    assert book.add(1, report(1)) == ()
    assert book.owing() == {0}
    (line,) = book.add(0, report(0))
    assert (line.step, line.step_ms, line.tokens_per_s, line.world_size) == (0, 5.0, 2000.0, 2)
    (line,) = book.add(0, report(1))
    assert line.step == 1


@pytest.mark.parametrize(
    ("tiles", "expected"),
    [
        ([(0, 4, 0, 8)], Coverage(8, 0, 0)),
        ([(0, 2, 0, 8), (2, 4, 0, 3), (2, 4, 3, 8)], Coverage(8, 0, 0)),
        ([(0, 4, 0, 5), (0, 4, 4, 8)], Coverage(8, 1, 0)),
        ([(0, 4, 0, 5), (0, 3, 5, 8)], Coverage(5, 0, 3)),
        ([(0, 3, 0, 8), (2, 4, 0, 6)], Coverage(6, 6, 2)),
        ([], Coverage(0, 0, 8)),
    ],
)
def test_coverage_of_tiles(tiles: list[Consumed], expected: Coverage) -> None:
    assert coverage(tiles, units=4, samples=8) == expected


def test_coverage_agrees_with_counting_every_cell() -> None:
    draw = random.Random(5)
    for _ in range(200):
        units, samples = draw.randint(1, 4), draw.randint(1, 9)
        tiles: list[Consumed] = []
        for _ in range(draw.randint(0, 5)):
            first, last = sorted((draw.randint(0, units), draw.randint(0, units)))
            lo, hi = sorted((draw.randint(0, samples), draw.randint(0, samples)))
            tiles.append((first, last, lo, hi))
        cells = [
            [sum(a <= u < b and lo <= s < hi for a, b, lo, hi in tiles) for u in range(units)] for s in range(samples)
        ]
        seen = sum(min(column) > 0 for column in cells)
        expected = Coverage(seen, sum(max(column) > 1 for column in cells), samples - seen)
        assert coverage(tiles, units, samples) == expected, tiles
