"""What a rank has to do at the start of an epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.control.protocol.epoch_start import (
    holdings,
    is_elsewhere,
    promoted,
    replica_transfers,
    resolve,
    unchecked_buckets,
)
from elaswave_fx.control.protocol.types import (
    Activation,
    Assignment,
    Certificate,
    Record,
    Replica,
    Stamp,
    Version,
    Vote,
)
from elaswave_fx.plan.work.box import Box, BoxId
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Epoch, Rank

ME, OTHER, THIRD = Rank(0), Rank(1), Rank(2)
NOTHING = Assignment((ME,), (), 0)


def stamp(version: int) -> Stamp:
    return Stamp(Version(version), Epoch(3))


def activation(resume: int, rollback: bool = False, proved: bool = True) -> Activation:
    certificate = Certificate(stamp(resume), ()) if proved else None
    return Activation(Epoch(4), NOTHING, stamp(resume), stamp(resume - 1), certificate, rollback)


@pytest.mark.parametrize(
    ("resume", "rollback", "finishes"),
    [(8, False, True), (7, False, False), (8, True, False)],
    ids=["goes on after it", "is done again", "rolls back"],
)
def test_a_step_in_flight_is_finished_only_where_the_epoch_goes_on_after_it(
    resume: int, rollback: bool, finishes: bool
) -> None:
    found = resolve(ME, activation(resume, rollback), stamp(7), Epoch(3), pending=True)
    assert found == (activation(resume).certificate if finishes else None)


@pytest.mark.parametrize(
    ("resume", "pending", "proved"), [(9, True, True), (8, False, True), (8, True, False)],
    ids=["two ahead", "nothing in flight", "no proof"],
)  # fmt: skip
def test_a_version_that_cannot_be_reached_is_a_bug_of_ours(resume: int, pending: bool, proved: bool) -> None:
    with pytest.raises(RuntimeError, match=f"rank 0: stands at version 7 and cannot follow to {resume}"):
        resolve(ME, activation(resume, proved=proved), stamp(7), Epoch(3), pending)


@pytest.mark.parametrize(
    ("committed", "was", "elsewhere"),
    [
        (Stamp(Version(8), Epoch(1)), 1, True),
        (Stamp(Version(6), Epoch(1)), 1, True),
        (Stamp(Version(7), Epoch(1)), 1, True),
        (stamp(7), 3, False),
        (stamp(6), 3, False),
        (stamp(6), 2, True),
        (stamp(7), 1, False),
    ],
    ids=["after", "before", "another", "there", "in flight there", "in flight elsewhere", "there, and has missed one"],
)
def test_a_rank_that_has_missed_how_others_went_back_has_nothing(committed: Stamp, was: int, elsewhere: bool) -> None:
    goes_on = replace(activation(7), epoch=Epoch(was + 2))
    assert is_elsewhere(committed, Epoch(was), goes_on) is elsewhere
    assert not is_elsewhere(committed, Epoch(was), replace(goes_on, epoch=Epoch(was + 1))), "it has missed nothing"
    assert is_elsewhere(committed, Epoch(was), replace(goes_on, rollback=True))


def test_a_rank_reports_records_and_votes_of_a_step_that_it_has_voted_for() -> None:
    vote = Vote(stamp(8), OTHER, ())
    held = holdings(stamp(7), Epoch(3), {BoxId(0): 5, BoxId(1): 6}, [BoxId(1), BoxId(2)], [vote])
    assert held.replicas == {0: Replica(stamp(7), 5), 1: Replica(stamp(7), 6)} and held.complete == {0, 1}
    assert held.records == {1: (Record(stamp(8), (), 6),)} and held.votes == (vote,)
    assert holdings(stamp(7), Epoch(3), {BoxId(0): 5}, [BoxId(0)], None).records == {}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((OTHER, (ME,), ()), (OTHER, (ME,), ()), False),
        ((OTHER, (ME,), ()), (ME, (OTHER,), (OTHER,)), False),
        ((OTHER, (ME,), ()), (OTHER, (), ()), True),
        ((OTHER, (ME,), ()), (OTHER, (ME,), (ME,)), True),
        ((ME, (OTHER,), ()), (OTHER, (THIRD,), (THIRD,)), False),
        ((OTHER, (ME,), (ME,)), (OTHER, (THIRD,), ()), False),
    ],
    ids=["stays", "promoted", "dropped", "to be sent again", "was the owner", "never made"],
)
def test_parts_made_from_replicas_that_are_kept_no_more(
    before: tuple[Rank, tuple[Rank, ...], tuple[Rank, ...]],
    after: tuple[Rank, tuple[Rank, ...], tuple[Rank, ...]],
    found: bool,
) -> None:
    old, new = (
        (Box(3, Span(0, 4), *roles, readers=(ME, OTHER)), Box(4, Span(0, 4), THIRD)) for roles in (before, after)
    )
    assert unchecked_buckets(ME, old, new, replicas_agree=False, damaged=()) == ({3} if found else set())
    assert unchecked_buckets(ME, old, new, replicas_agree=True, damaged=()) == set()
    for agree in (True, False):
        assert unchecked_buckets(ME, old, new, agree, damaged=[BoxId(1)]) >= {4}, "nothing is made of that replica"


def test_boxes_that_a_rank_comes_to_own_are_looked_at_and_new_replicas_go_on_their_way() -> None:
    before = (Box(0, Span(0, 4), OTHER, (ME,)), Box(0, Span(4, 8), ME, (OTHER,)), Box(0, Span(8, 12), THIRD, (OTHER,)))
    after = (Box(0, Span(0, 4), ME, (OTHER,), (OTHER,)), before[1], Box(0, Span(8, 12), OTHER, (ME,), (ME,)))
    assert promoted(ME, before, after) == [0] and promoted(OTHER, before, after) == [2]
    assert replica_transfers(after) == [(0, ME, OTHER), (2, OTHER, ME)]


def test_a_replica_is_read_once_more_before_it_is_owned_or_computed_with() -> None:
    def found(before: Box, after: Box) -> list[BoxId]:
        return promoted(ME, [before], [after])

    held = Box(0, Span(0, 4), OTHER, (ME,), (), (OTHER,))
    assert found(held, replace(held, owner=ME, holders=(OTHER,))) == [0]
    assert found(held, replace(held, readers=(ME, OTHER))) == [0]
    assert found(held, held) == [] and found(replace(held, readers=(ME,)), replace(held, readers=(ME, OTHER))) == []
    assert found(held, replace(held, catching_up=(ME,), readers=(ME, OTHER))) == [], (
        "its parameters come from elsewhere"
    )
