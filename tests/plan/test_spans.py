"""Spans, runs of them, and how rectangles cover the work plane."""

from __future__ import annotations

import random

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.work.spans import Coverage, Edges, Runs, Span, WorkSpan, coverage, times_covered


def test_a_span_is_a_range() -> None:
    with pytest.raises(PlanError, match=r"span \[3, 1\) is not a range"):
        Span(3, 1)
    assert Span(4, 6).relative_to(Span(2, 8)) == Span(2, 4)
    with pytest.raises(PlanError, match="does not lie within"):
        Span(4, 9).relative_to(Span(2, 8))


def test_runs_are_the_positions_in_as_few_spans_as_can_be() -> None:
    runs = Runs.of(Span(0, 2), Span(2, 3), Span(5, 5), Span(8, 9))
    assert runs.spans == (Span(0, 3), Span(8, 9)) and str(runs) == "[0, 3) [8, 9)"
    assert list(runs) == [0, 1, 2, 8] and len(runs) == 4 and runs and not Runs()
    assert [position for position in range(10) if position in runs] == [0, 1, 2, 8]
    with pytest.raises(PlanError, match=r"span \[1, 4\) follows \[0, 2\); runs ascend"):
        Runs.of(Span(0, 2), Span(1, 4))


def test_parts_of_a_span_are_told_with_how_often_they_are_covered() -> None:
    draw = random.Random(3)
    for _ in range(200):
        whole = Span(*sorted((draw.randint(0, 9), draw.randint(0, 9))))
        spans = [Span(*sorted((draw.randint(0, 12), draw.randint(0, 12)))) for _ in range(draw.randint(0, 5))]
        found = list(times_covered(whole, spans))
        assert [position for part, _ in found for position in part] == list(whole)
        assert [count for part, count in found for _ in part] == [sum(p in s for s in spans) for p in whole]


def test_a_rectangle_is_reported_by_its_edges() -> None:
    assert WorkSpan(Span(2, 5), Span(8, 16)).edges == (2, 5, 8, 16)


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
def test_coverage_of_tiles(tiles: list[Edges], expected: Coverage) -> None:
    assert coverage(tiles, units=4, samples=8) == expected


def test_what_is_no_rectangle_covers_nothing() -> None:
    assert coverage([(4, 0, 0, 8), (0, 4, 6, 2)], units=4, samples=8) == Coverage(0, 0, 8)


def test_coverage_agrees_with_counting_every_cell() -> None:
    draw = random.Random(5)
    for _ in range(200):
        units, samples = draw.randint(1, 4), draw.randint(1, 9)
        tiles: list[Edges] = []
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
