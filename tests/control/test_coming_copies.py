"""What a rank says of copies that come to it."""

from __future__ import annotations

from elaswave_fx.control.protocol.coming_copies import ComingCopies
from elaswave_fx.plan.work.box import BoxId

ONE, TWO = BoxId(1), BoxId(2)
NONE, FIRST, SECOND, BOTH = frozenset[BoxId](), frozenset({ONE}), frozenset({TWO}), frozenset({ONE, TWO})


def test_copies_are_far_until_the_engine_says_otherwise() -> None:
    coming = ComingCopies().anew(BOTH)
    assert coming == ComingCopies(BOTH, BOTH) == coming.seen(BOTH, BOTH)
    assert coming.seen(BOTH, SECOND) == ComingCopies(BOTH, SECOND)
    assert coming.seen(SECOND, SECOND).seen(NONE, NONE) == ComingCopies()


def test_one_that_is_asked_for_anew_is_far_again() -> None:
    assert ComingCopies().anew(BOTH).seen(BOTH, NONE).seen(BOTH, FIRST).far == FIRST


def test_of_one_that_was_close_in_vain_nothing_is_foretold_until_it_counts() -> None:
    coming = ComingCopies().anew(BOTH).seen(BOTH, SECOND).anew(BOTH)
    assert coming == ComingCopies(BOTH, BOTH, FIRST)
    assert coming.seen(BOTH, NONE).far == FIRST and coming.seen(SECOND, NONE).far == NONE
    assert coming.anew(FIRST).missed == FIRST, "nor after the next epoch"
    assert coming.seen(SECOND, SECOND).anew(BOTH) == ComingCopies(BOTH, BOTH)
