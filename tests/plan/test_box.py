"""Who does what with a box."""

from __future__ import annotations

from elaswave_fx.plan.work.box import Box, numbered
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank

ME, HOLDER, LATE, READER = map(Rank, range(4))


def test_whoever_has_a_replica_makes_parameters_from_it_and_whoever_waits_for_one_does_not() -> None:
    box = Box(0, Span(0, 8), ME, (HOLDER, LATE), (LATE,), (ME, READER))
    assert box.replica_ranks == (ME, HOLDER, LATE)
    assert box.local_materializers == {ME, HOLDER}
    assert set(box.readers) - box.local_materializers == {READER}


def test_a_box_is_known_by_its_place() -> None:
    boxes = [Box(0, Span(0, 8), ME), Box(0, Span(8, 9), HOLDER)]
    assert list(numbered(boxes)) == [(0, boxes[0]), (1, boxes[1])]
