"""The generated pages of `docs/reference/` are fresh, and events have the fields of their types."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from elaswave_fx.control.coordinator.event_log import job_event
from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.decide import Resumption
from elaswave_fx.control.protocol.events import Cause, CauseKind
from elaswave_fx.observe.job_events import Recovery
from elaswave_fx.observe.recoveries import Recoveries
from tools.docs.__main__ import PAGES, main, stale
from tools.docs.comments import read_keys
from tools.docs.keys import CONF
from tools.docs.markdown import prose

CAUSE = Cause(CauseKind.EXITED, (2,))
OF_THE_COORDINATOR = (
    events.Detected(0, (2,), CAUSE, 14.6),
    events.Stopping(0, CAUSE),
    events.CalledOff(0),
    events.Waiting(0, (1,), (2,)),
    events.Stopped(0, (0, 1)),
    events.Agreed(1, (0, 1), (2,), 60, 1, Resumption.BACK, (4,), rolled_back=True, left=(3,), back=(5,)),
    events.CannotLeave(0, 2, "it is the last one"),
    events.Over(0, "no rank is left"),
)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_fresh(name: str) -> None:
    assert f"{name}.md" not in stale(), "run `make docs`"


def test_check_says_what_is_stale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tools.docs.__main__.PAGES", {"keys": lambda: "other"})
    assert main(["--check"]) == 1
    assert "docs/reference/keys.md is stale: run `make docs`" in capsys.readouterr().err


def test_every_key_that_is_not_a_size_says_what_it_means() -> None:
    _, keys = read_keys(CONF / "config.yaml")
    silent = [key.path for key in keys if key.default and not key.comment and key.path.split(".")[0] != "hydra"]
    assert silent == []


def test_comments_of_several_lines_belong_to_their_key(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# A group.\nkind: a\nrun:\n  dir: 'x#y'  # where;\n             # null: here\nlast: [1]\n")
    head, keys = read_keys(file)
    assert head == "A group."
    assert [(key.path, key.default, key.comment) for key in keys] == [
        ("kind", "a", ""), ("run", "", ""), ("run.dir", "'x#y'", "where; null: here"), ("last", "[1]", ""),
    ]  # fmt: skip


def test_comments_become_prose() -> None:
    said = prose("1f1b | split: as switch.memory says, e.g. data.paths=[a] | auto", {"switch.memory"})
    assert said == "`1f1b`; `split`: as `switch.memory` says, e.g. `data.paths=[a]`; `auto`"


def test_all_events_of_the_coordinator_are_tried() -> None:
    told = {kind for kind in events.EVENT_TYPES if kind not in (events.Attempt, events.Superseded)}
    assert {type(event) for event in OF_THE_COORDINATOR} == told


def test_a_recovery_has_the_fields_of_its_type() -> None:
    recoveries = Recoveries()
    for event in OF_THE_COORDINATOR:
        found = job_event(event, 15.0)
        assert found is not None
        recoveries.event(found, event.epoch, 15.0)
    (entry,) = recoveries.entries()
    assert entry["rolled_back_to"] == 60
    fields = {key: value for key, value in entry.items() if key != "epoch"}
    assert msgspec.to_builtins(msgspec.convert(fields, Recovery)) == {"event": "recovery", **fields}
