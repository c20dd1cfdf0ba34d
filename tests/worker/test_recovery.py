"""Whom a failed step accuses, and what a rank has to be sent anew when an epoch begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.errors import Aborted, CommError, DeadlineExceeded, PeerLost
from elaswave_fx.plan.box import Box
from elaswave_fx.plan.planner import Parallel, plan_uniform
from elaswave_fx.plan.topology import Rank, local_topology
from elaswave_fx.worker.recovery import suspect_of, unchecked_parts
from tests.plan.samples import chain

ME, OTHER, THIRD = Rank(0), Rank(1), Rank(2)


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
def test_parts_made_from_copies_that_are_kept_no_more(
    before: tuple[Rank, tuple[Rank, ...], tuple[Rank, ...]],
    after: tuple[Rank, tuple[Rank, ...], tuple[Rank, ...]],
    found: bool,
) -> None:
    plan = plan_uniform(chain(), local_topology(3), Parallel(3, 1))
    first, *rest = plan.boxes
    old, new = (replace(plan, boxes=(Box(first.bucket, first.span, *roles), *rest)) for roles in (before, after))
    assert unchecked_parts(ME, old, new) == ({first.bucket} if found else set())


@pytest.mark.parametrize(
    ("error", "suspect"),
    [
        (PeerLost("gone", rank=2), Rank(2)),
        (Aborted("told so", rank=0), Rank(0)),
        (Aborted("nobody is accused"), None),
        (DeadlineExceeded("late"), None),
        (CommError("a link"), None),
    ],
)
def test_whom_an_error_accuses(error: BaseException, suspect: Rank | None) -> None:
    assert suspect_of(error) == suspect
