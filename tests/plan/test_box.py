"""Boxes and routing between layouts."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import Box, Layout, Move, Span, box, difference, route
from elaswave_fx.plan.topology import Rank


@st.composite
def boxes(draw: st.DrawFn, axes: int = 2, size: int = 6) -> Box:
    pairs = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for _ in range(axes)]
    return box(*((lo, hi) for lo, hi in pairs))


@st.composite
def partitions(draw: st.DrawFn, whole: Box) -> Layout:
    """`whole` cut in random places, pieces given to random ranks."""
    pieces = [whole]
    for _ in range(draw(st.integers(0, 5))):
        cutter = draw(boxes(len(whole.spans)))
        pieces = [p for piece in pieces for p in (*piece.subtract(cutter), *filter(None, [piece.intersect(cutter)]))]
    return Layout(tuple((Rank(draw(st.integers(0, 3))), piece) for piece in pieces))


def cells(*found: Box) -> Counter[tuple[int, ...]]:
    return Counter(cell for b in found for cell in product(*b.spans))


@given(boxes(3), boxes(3))
def test_intersection_and_rest_make_up_the_box(a: Box, b: Box) -> None:
    common = a.intersect(b)
    inside = cells(common) if common else Counter()
    assert inside == cells(a) & cells(b)
    assert cells(*a.subtract(b)) + inside == cells(a)


@given(st.lists(boxes(), max_size=3), st.lists(boxes(), max_size=3))
def test_difference_is_what_is_left_of_the_cells(first: list[Box], second: list[Box]) -> None:
    left = cells(*difference(first, second))
    assert left == Counter({cell: n for cell, n in cells(*first).items() if cell not in cells(*second)})


WHOLE = box((0, 6), (0, 6))


@given(partitions(WHOLE), partitions(WHOLE))
def test_a_route_brings_every_wanted_element_once(old: Layout, new: Layout) -> None:
    assert old.covers_once(WHOLE) and new.covers_once(WHOLE)
    moves = route(old, new)
    for rank in range(4):
        wanted = cells(*(b for r, b in new.parts if r == rank))
        assert cells(*(m.box for m in moves if m.target == rank)) == wanted
    for move in moves:
        assert any(r == move.source and move.box.intersect(b) == move.box for r, b in old.parts)


@given(partitions(WHOLE))
def test_a_route_to_the_same_layout_stays_where_it_is(layout: Layout) -> None:
    assert all(move.source == move.target for move in route(layout, layout))


def test_a_rank_takes_its_own_copy_before_that_of_another() -> None:
    old = Layout(((Rank(0), box((0, 6))), (Rank(1), box((3, 6)))))
    new = Layout(((Rank(1), box((2, 6))),))
    assert route(old, new) == (Move(Rank(1), Rank(1), box((3, 6))), Move(Rank(0), Rank(1), box((2, 3))))


def test_a_box_that_nobody_holds_is_named() -> None:
    with pytest.raises(PlanError, match=r"route: rank 1 wants \[4, 6\), which no rank holds"):
        route(Layout(((Rank(0), box((0, 4))),)), Layout(((Rank(1), box((0, 6))),)))


def test_a_layout_with_a_hole_or_an_overlap_does_not_cover_once() -> None:
    assert not Layout(((Rank(0), box((0, 4))),)).covers_once(box((0, 6)))
    assert not Layout(((Rank(0), box((0, 4))), (Rank(1), box((2, 4))))).covers_once(box((0, 6)))
    assert Layout(((Rank(0), box((0, 4))), (Rank(1), box((4, 6))))).covers_once(box((0, 6)))


def test_boxes_of_different_tensors_do_not_meet() -> None:
    with pytest.raises(PlanError, match="different numbers of axes"):
        box((0, 1)).intersect(box((0, 1), (0, 1)))


def test_a_span_is_a_range() -> None:
    with pytest.raises(PlanError, match=r"span \[3, 1\) is not a range"):
        Span(3, 1)
    assert Span(4, 6).relative_to(Span(2, 8)) == Span(2, 4)
    with pytest.raises(PlanError, match="does not lie within"):
        Span(4, 9).relative_to(Span(2, 8))
