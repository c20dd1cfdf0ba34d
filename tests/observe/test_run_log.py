"""Details are in the file alone; a recovery has one line; neither a full disk nor a link ends the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elaswave_fx.observe.narrative import Narrator
from elaswave_fx.observe.recoveries import Recoveries
from elaswave_fx.observe.run_log import RunLog
from tests.observe.events import event

AGREED = {
    "members": [0, 1, 3], "lost": [2], "step": 60, "steps_redone": 1, "how": "rolled forward",
    "why": "step 59 rolled forward",
}  # fmt: skip
EXIT = "rank 2: killed by SIGKILL"


class Recorded:
    """A log, and events that are told to it with what the recorder makes of them."""

    def __init__(self, level: str = "info") -> None:
        self.out = io.StringIO()
        self.log = RunLog(level, Console(file=self.out, force_terminal=False, width=300))
        self._narrator, self._recoveries, self._now = Narrator(self.log, range(4)), Recoveries(), 0.0

    def __call__(self, kind: str, epoch: int = 0, **fields: Any) -> None:
        self._now += 0.01
        made = event(kind, **fields)
        self._narrator.event(made, epoch, self._recoveries.event(made, epoch, self._now))

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()

    def loss(self) -> None:
        self("detected", 0, rank=2, ranks=[2], cause="rank 2 exited", silent_ms=1.0, exited=True)
        self("stopped", 0, members=[0, 1, 3])

    def resume(self) -> None:
        self("planned", 1, reason="lost rank 2; 3 x 1 lanes", plan_ms=0.2, lines=["rank 0 computes units 0-9"])
        self("edited", 1, ms=4.0)
        self("transferred", 1, ms=8.0, bytes=100, bytes_behind=0)
        self("resumed", 1, step=60)


def test_a_recovery_is_one_line_and_its_parts_are_details(tmp_path: Path) -> None:
    told = Recorded()
    told.loss()
    told("left", rank=2, cause=EXIT)
    told("agreed", 1, **AGREED)
    told.resume()
    assert told.lines == ["epoch 1: rank 2 failed (killed by SIGKILL); resumed at step 60 on ranks 0, 1, 3 in 71 ms"]
    told.log.write_to(tmp_path / "console.log")
    told.log.keep("error: shown elsewhere")
    kept = (tmp_path / "console.log").read_text().splitlines()
    assert len(kept) == 11 and kept[-1].endswith(" error: shown elsewhere") and "    rank 0 computes units 0-9" in kept
    debug = Recorded("debug")
    debug.loss()
    assert len(debug.lines) == 2


def test_an_exit_that_is_read_late_is_a_line_of_its_own() -> None:
    told = Recorded()
    told.loss()
    told("agreed", 1, **AGREED)
    told.resume()
    told("left", rank=2, cause=EXIT)
    assert [line.partition(" in ")[0] for line in told.lines] == [
        "epoch 1: rank 2 failed (exited); resumed at step 60 on ranks 0, 1, 3",
        "rank 2: killed by SIGKILL",
    ]


def test_a_recovery_whose_decision_is_read_late_is_told_when_it_is_known() -> None:
    told = Recorded()
    told.loss()
    told("resumed", 1, step=60)
    assert told.lines == []
    told._now -= 0.02  # The coordinator decided before the ranks resumed.
    told("agreed", 1, **AGREED)
    assert len(told.lines) == 1 and told.lines[0].startswith("epoch 1: rank 2 failed (exited); resumed at step 60")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"members": [0, 1, 2, 3, 4]}, "epoch 3: rank 4 joined; resumes at step 9 on ranks 0, 1, 2, 3, 4"),
        ({"members": [0, 1, 3], "left": [2]}, "epoch 3: rank 2 left as asked; resumes at step 9 on ranks 0, 1, 3"),
        ({"members": [0, 1, 2, 3]}, None),
    ],
)
def test_a_reconfiguration_is_told_where_members_change(fields: dict[str, Any], line: str | None) -> None:
    told = Recorded()
    told("agreed", 3, **{**AGREED, "lost": [], "step": 9, "steps_redone": 0, **fields})
    assert told.lines == ([line] if line else [])


def test_a_file_that_cannot_be_written_costs_a_line(tmp_path: Path) -> None:
    told = Recorded()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "console.log").symlink_to(victim)
    told.log.write_to(tmp_path / "console.log")
    assert victim.read_text() == "mine" and "console.log: cannot be written (" in told.lines[0]
    full = Recorded()
    full.log.write_to(Path("/dev/full"))
    with full.log:
        full.log.info("a line")
    assert full.lines == ["a line"]
