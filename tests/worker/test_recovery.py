"""Whom a failed step accuses."""

from __future__ import annotations

import pytest

from elaswave_fx.errors import Aborted, CommError, DeadlineExceeded, PeerLost
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.recovery import suspect_of


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
