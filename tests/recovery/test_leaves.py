"""Ranks leave in each layout, with the bits of one rank; also while another one, or the coordinator, dies."""

from pathlib import Path

import pytest

from tests.marks import slow
from tests.recovery.fault_matrix import Loss
from tests.recovery.leaves import leaving, leaving_in
from tests.recovery.references import References
from tests.recovery.scenarios import Scenario

SCENARIOS = [
    slow(leaving((2, 2), (1,), 1)),
    slow(leaving((3, 2), (0,), 2)),
    leaving((3, 2), (2, 3), 3),
    slow(leaving((2, 3), (5,), 4)),
    slow(leaving((4, 1), (0,), 5)),
    leaving((1, 3), (1,), 6),
    leaving((2, 2), (2,), 7, kill=1),
    slow(leaving((3, 2), (4,), 8, kill=0)),
    leaving((2, 2), (3,), 9, coordinator=True),
    slow(leaving((1, 3), (0,), 10, coordinator=True)),
    leaving_in(Loss((2, 2), 0, "update")),
    slow(leaving_in(Loss((3, 2), 5, "reduce"))),
    slow(leaving_in(Loss((1, 3), 2, "gather"))),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_who_is_told_to_leave_goes_and_nothing_is_missed(
    scenario: Scenario, tmp_path: Path, references: References
) -> None:
    scenario.check(tmp_path, references)
