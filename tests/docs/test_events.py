"""The table of events names every kind that a rank may report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elaswave_fx.observe.rank_events import OF_ANY_RANK, FaultStrikes, RankEvent, tag_of

OPERATING = Path(__file__).parents[2] / "docs" / "start" / "operating.md"


@pytest.mark.parametrize("kind", [*OF_ANY_RANK, FaultStrikes], ids=tag_of)
def test_an_event_of_a_rank_is_in_the_table(kind: type[RankEvent]) -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", OPERATING.read_text(), re.MULTILINE)
    assert any(f"`{tag_of(kind)}`" in row for row in rows)
