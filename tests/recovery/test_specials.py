"""One of each kind of disturbance: see catalogue.py for the list, scenarios.py and moments.py for what they do."""

import os
from pathlib import Path

import pytest

from tests.marks import slow
from tests.recovery.references import References
from tests.recovery.scenario_registry import specials
from tests.recovery.scenarios import Scenario
from tools.bench.connection_resets import CannotCut

SLOW = (
    "enduring-", "storm-2-", "churn-", "checkpointing-2x2-rank1-", "checkpointing-3x2-", "join-3x2-", "join-2x3-",
    "stopped-4x1-", "stopped-2x2-rank3-", "slow-", "cut-1x3-", "launcher-1x3-", "settings-default-3x2-",
    "settings-default-bf16-",
)  # fmt: skip
"""More of what others show."""

SCENARIOS = [slow(each) if each.folder.startswith(SLOW) else each for each in specials()]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.folder)
def test_the_run_survives(scenario: Scenario, tmp_path: Path, references: References) -> None:
    try:
        scenario.check(tmp_path, references)
    except CannotCut as error:
        if os.geteuid() == 0:
            raise
        pytest.skip(str(error))
