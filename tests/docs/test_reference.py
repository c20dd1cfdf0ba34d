"""The generated pages of `docs/reference/` are fresh, and lines of events have the fields of their types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_fx.control.coordinator.event_log import line_of
from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.decide import Resumption
from elaswave_fx.control.protocol.events import Cause, CauseKind
from elaswave_fx.observe.job_events import KINDS
from elaswave_fx.observe.recoveries import Recoveries
from tools.docs.__main__ import PAGES, main, stale
from tools.docs.comments import read_keys
from tools.docs.events import OF_RANKS
from tools.docs.keys import CONF
from tools.docs.markdown import prose

PACKAGE = Path(__file__).parents[2] / "elaswave_fx"
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


@pytest.mark.parametrize("event", OF_THE_COORDINATOR, ids=lambda event: type(event).__name__)
def test_a_line_of_the_coordinator_has_the_fields_of_its_type(event: events.Event) -> None:
    line = line_of(event, 15.0)
    assert line is not None
    kind, _, fields = line
    assert fields.keys() <= KINDS[kind].__annotations__.keys()


def test_all_events_of_the_coordinator_are_tried() -> None:
    told = {kind for kind in events.EVENT_TYPES if kind not in (events.Attempt, events.Superseded)}
    assert {type(event) for event in OF_THE_COORDINATOR} == told


def test_a_recovery_has_the_fields_of_its_type() -> None:
    recoveries = Recoveries()
    for event in OF_THE_COORDINATOR:
        line = line_of(event, 15.0)
        assert line is not None
        recoveries.event(line[0], line[1], 15.0, line[2])
    (entry,) = recoveries.entries()
    assert entry["rolled_back_to"] == 60
    assert entry.keys() - {"epoch"} <= KINDS["recovery"].__annotations__.keys()


def test_every_kind_that_is_written_has_a_type() -> None:
    found = {(kind, name) for path in PACKAGE.rglob("*.py") for kind, name in _written(ast.parse(path.read_text()))}
    assert {kind for kind, _ in found} >= {"planned", "started", "finished", "coordinator", "recovery", "slowed"}
    for kind, name in found:
        types = [each for each in (KINDS.get(kind), OF_RANKS.get(kind)) if each is not None]
        assert types, f"{kind} has no type"
        assert name in ("", "rank") or any(name in each.__annotations__ for each in types), f"{kind}: {name}"


def _written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The kinds and fields of calls `….event("kind", field=…)`, `….…("event", event="kind", field=…)`, and of dicts
    `{"event": "kind", "field": …}`."""
    for node in ast.walk(tree):
        named: dict[str, ast.expr] = {}
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            found = [named.get("event"), *(node.args[:2] if node.func.attr == "event" else [])]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            named = {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            found = [named.get("event")]
        for kind in found:
            if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                yield kind.value, ""
                yield from ((kind.value, name) for name in named.keys() - {"event", "epoch", "at_s"})
