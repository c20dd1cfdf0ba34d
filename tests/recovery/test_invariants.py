"""The checks of a disturbed run find what they are there to find: each promise is broken on purpose, in its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.recovery import chaos
from tests.recovery import scenario_registry as catalogue
from tests.recovery.fault_matrix import Loss, faults_of
from tests.recovery.harness import Finished, finish, job_config
from tests.recovery.invariants import assert_survived
from tests.recovery.references import References
from tests.recovery.scenarios import STEPS, Scenario, had_no_replica

LOST = {3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, references: References) -> tuple[Finished, Finished]:
    """One that lost rank 3, and the undisturbed one."""
    losses = [Loss((2, 2), 3, "backward")]
    disturbed = finish(job_config((2, 2), STEPS, faults_of(losses)), tmp_path_factory.mktemp("disturbed"))
    return disturbed, references.of(job_config((2, 2), STEPS))


@pytest.fixture
def copy(runs: tuple[Finished, Finished], tmp_path: Path) -> Finished:
    shutil.copytree(runs[0].folder, tmp_path / "copy")
    return Finished(runs[0].code, tmp_path / "copy")


def edit_lines(name: str, edit: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        edit(lines)
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    return change


def edit_summary(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def scale_parameters(folder: Path) -> None:
    tensors = Finished(0, folder).tensors
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, folder / "model.safetensors")


def redo_two(events: list[dict[str, Any]]) -> None:
    next(event for event in events if event["kind"] == "agreed")["steps_redone"] = 2


BROKEN: dict[str, Callable[[Path], None]] = {
    "step without metrics": edit_lines("metrics.jsonl", lambda lines: lines.pop(9)),
    "step twice in metrics": edit_lines("metrics.jsonl", lambda lines: lines.insert(9, lines[9])),
    "step without ledger line": edit_lines("ledger.jsonl", lambda lines: lines.pop(9)),
    "step twice in the ledger": edit_lines("ledger.jsonl", lambda lines: lines.append(lines[9])),
    "tile that nobody computed": edit_lines("ledger.jsonl", lambda lines: lines[9]["tiles"].pop("0")),
    "other samples": edit_lines("ledger.jsonl", lambda lines: lines[9].update(content_hash="00")),
    "another loss": edit_lines("metrics.jsonl", lambda lines: lines[9].update(loss=lines[9]["loss"] * 1.0001)),
    "other parameters": scale_parameters,
    "another rank left too": edit_lines(
        "events.jsonl", lambda lines: lines.append({"kind": "left", "epoch": 1, "rank": 0})
    ),
    "a process started again": edit_lines("events.jsonl", lambda lines: lines.append({"kind": "started", "pids": {}})),
    "two steps redone": edit_lines("events.jsonl", redo_two),
    "no recovery told of": edit_summary(recoveries=[]),
    "failed": edit_summary(outcome="failed"),
    "samples repeated": edit_summary(samples_duplicated=8),
}


def test_a_run_that_survived_passes(copy: Finished, runs: tuple[Finished, Finished]) -> None:
    assert_survived(copy, runs[1], LOST)


@pytest.mark.parametrize("promise", sorted(BROKEN))
def test_a_broken_promise_is_found(promise: str, copy: Finished, runs: tuple[Finished, Finished]) -> None:
    BROKEN[promise](copy.folder)
    with pytest.raises((AssertionError, ValueError)):
        assert_survived(copy, runs[1], LOST)


def test_an_exit_code_and_orphans_are_found(copy: Finished, runs: tuple[Finished, Finished]) -> None:
    for broken in (Finished(1, copy.folder), Finished(0, copy.folder, orphans=(1,))):
        with pytest.raises(AssertionError):
            assert_survived(broken, runs[1], LOST)


def test_one_loss_leaves_a_replica_of_every_box_and_all_of_them_none(copy: Finished) -> None:
    assert not had_no_replica(copy, 0, LOST)
    assert had_no_replica(copy, 0, {0, 1, 2, 3})


def test_scenarios_have_names_of_their_own() -> None:
    for scenarios in (catalogue.everything(), catalogue.specials()):
        folders = [scenario.folder for scenario in scenarios]
        assert len(folders) == len(set(folders))
    names = [scenario.folder for scenario in catalogue.everything(1)]
    assert names == [scenario.folder for scenario in catalogue.everything(1)], "the seed alone draws"


def test_chaos_counts_what_passed_and_what_failed(
    runs: tuple[Finished, Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path, references: References) -> Finished:
        raise AssertionError("loss of step 9")

    scenarios = [Scenario("inside", "good", lambda folder, references: runs[0]), Scenario("host", "bad", fails)]
    monkeypatch.setattr(chaos, "everything", lambda seed: scenarios)
    assert chaos.main(["--keep", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "FAIL  host" in told and "loss of step 9" in told
    rows = {line.split()[0]: line.split()[1:4] for line in told.splitlines()[-3:]}
    assert rows == {"inside": ["1", "1", "0"], "host": ["1", "0", "1"], "all": ["2", "1", "1"]}
    assert chaos.main(["--keep", str(tmp_path), "--only", "good"]) == 0
    assert chaos.main(["--only", "nothing of the kind"]) == 2
