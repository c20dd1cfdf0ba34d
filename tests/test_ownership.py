"""Folders of other users, and links in one's own: nothing that they name is run, nothing they lead to is changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_fx import verify
from elaswave_fx.audit.program import code_of
from elaswave_fx.audit.record import read_record
from elaswave_fx.checkpoint import folder as checkpoints
from elaswave_fx.control.coordinator.job_file import JobFile, address_of
from elaswave_fx.errors import ConfigError
from elaswave_fx.files import open_log, place_of_others, replace_file
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.ownership import refuse_links, refuse_others

BOB = 65534
needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in /tmp, which everybody may enter."""
    folder = Path(tempfile.mkdtemp(prefix="ownership-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def made(folder: Path, mode: int = 0o755, owner: int | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    if owner is not None:
        os.chown(folder, owner, owner)
    return folder


@needs_two_users
@pytest.mark.parametrize("whose", ["it", "the one above"])
def test_a_folder_of_another_user_is_refused_by_name(shared: Path, whose: str) -> None:
    place = made(shared / "place", 0o777 if whose == "it" else 0o755, BOB)
    folder = place if whose == "it" else made(place / "run")
    with pytest.raises(ConfigError, match=rf"^RUN: {place} is user nobody's, who may change .* user root; .*cp -r"):
        refuse_others(folder, "RUN")


def test_a_folder_that_everybody_may_write_is_refused(shared: Path) -> None:
    with pytest.raises(ConfigError, match=f"chmod o-w {shared / 'open'}"):
        refuse_others(made(shared / "open", 0o777), "RUN")
    with pytest.raises(ConfigError, match=f"chmod o-w {shared / 'open'}"):
        refuse_others(made(shared / "open" / "run"), "RUN")


@pytest.mark.parametrize("above", [0o755, 0o1777, 0o775])
def test_projects_may_share_their_folders(shared: Path, above: int) -> None:
    """In a folder like /tmp, and where a group works together."""
    place = made(shared / "project", above)
    for mode in (0o700, 0o755, 0o775):
        assert place_of_others(made(place / "run", mode)) is None
    assert place_of_others(place / "not there yet") is None


@pytest.mark.parametrize(
    "name", ["logs", "clocks", "logs/rank-0.log", "clocks/rank-0.json", ".lock", ".init", "earlier"]
)
def test_a_run_directory_with_links_is_refused(tmp_path: Path, name: str) -> None:
    run, aim = made(tmp_path / "run"), tmp_path / "aim"
    aim.write_text("precious")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(aim)
    with pytest.raises(ConfigError, match=f"hydra.run.dir={run}: its {name} is a link to {aim}, .*rm {run / name}"):
        RunDirectory.prepare(run)
    assert aim.read_text() == "precious"


def test_a_run_directory_may_lead_to_its_checkpoints(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    (run / "checkpoints").symlink_to(made(tmp_path / "big disk"))
    RunDirectory.prepare(run)
    refuse_links(run, "RUN", ("not there",))


@pytest.mark.parametrize("kind", ["link", "second name"])
def test_room_for_the_model_empties_nothing_else(tmp_path: Path, kind: str) -> None:
    aim = tmp_path / "aim"
    aim.write_text("precious")
    place = tmp_path / ".model.reserved"
    place.symlink_to(aim) if kind == "link" else place.hardlink_to(aim)
    RunDirectory.reserve(tmp_path, 5000)
    assert aim.read_text() == "precious"
    assert place.stat().st_size == 5000 and not place.is_symlink()


def test_files_are_replaced_and_added_to_without_following_links(tmp_path: Path) -> None:
    aim, place = tmp_path / "aim", tmp_path / "plan-0.json"
    aim.write_text("precious")
    for planted in (place, tmp_path / f".{place.name}.{os.getpid()}.new"):
        planted.symlink_to(aim)
    replace_file(place, b"{}\n")
    assert place.read_text() == "{}\n" and not place.is_symlink()
    (tmp_path / "metrics.jsonl").symlink_to(aim)
    with pytest.raises(OSError, match="symbolic links"):
        open_log(tmp_path / "metrics.jsonl")
    RunDirectory.create(tmp_path).close()  # what an earlier run has left goes, and not what it leads to
    assert not (tmp_path / "metrics.jsonl").is_symlink()
    assert aim.read_text() == "precious"


def test_links_among_checkpoints_go_alone(tmp_path: Path) -> None:
    aim, place = made(tmp_path / "aim"), made(tmp_path / "checkpoints")
    (aim / "precious").touch()
    (place / "step-3.e0.partial").symlink_to(aim)
    checkpoints.sweep(place)
    (place / "step-4").symlink_to(aim)
    checkpoints.discard(place / "step-4")
    assert not list(place.iterdir())
    assert (aim / "precious").exists()


# --- What a run's files name


def record(folder: Path, **changed: object) -> Path:
    """A run directory with a ledger without lines; `changed`: of its configuration."""
    from tests.fuzz import _RUN_FILES

    made(folder)
    (folder / "ledger.jsonl").touch()
    said = json.loads(_RUN_FILES[0])
    said["config"].update(changed)
    (folder / "run.json").write_text(json.dumps(said))
    return folder


NET = {
    "kind": "target",
    "name": "planted_model.Net",
    "task": None,
    "options": {"inner": [{"_target_": "planted.Part"}]},
}


def told(run: Path, steps: tuple[int, int] | None = None) -> dict[str, str]:
    found = verify.verify(verify.Wanted(run, None, steps), lambda what, done, of: None)
    return {each.check: str(each) for each in found}


def test_the_code_that_a_run_names_is_found_however_deep(tmp_path: Path) -> None:
    (part,) = read_record(record(tmp_path / "run", model=NET)).parts
    assert code_of(part.config) == ("planted_model.Net", "planted.Part")
    (part,) = read_record(record(tmp_path / "other")).parts
    assert code_of(part.config) == ()


def test_verify_runs_no_code_of_a_run_unless_it_is_to_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planted_model.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nNet = None\n")
    run = record(tmp_path / "run", model=NET)
    found = told(run)
    for check in ("contents", "counts", "keys"):
        assert "takes code that run.json names (planted_model.Net, planted.Part), which only replay=" in found[check]
    assert not (tmp_path / "was run").exists()
    with pytest.raises(ConfigError, match="replay"):  # it has no steps
        told(run, (0, 0))
    assert (tmp_path / "was run").exists()
    said = capsys.readouterr().out
    assert f"replay runs planted.Part, planted_model.Net, which {run} of user " in said


@needs_two_users
def test_code_that_another_user_names_is_not_run(shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planted_model.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nNet = None\n")
    run = record(shared / "run", model=NET)
    os.chown(run, BOB, BOB)
    assert "which only replay=" in told(run)["contents"], "its numbers may be looked at"
    with pytest.raises(ConfigError, match=f"{run} is user nobody's"):
        told(run, (0, 0))
    assert not (tmp_path / "was run").exists()


@needs_two_users
@pytest.mark.parametrize("kind", ["a run directory", "a folder in memory", "a folder in memory by a link of ours"])
def test_a_job_of_another_user_is_not_joined(shared: Path, kind: str) -> None:
    place = made(shared / "elaswave-job", 0o755, BOB)
    (place / "job.json").write_text(json.dumps({"host": "127.0.0.1"}))
    run = made(shared / "run")
    if kind == "a run directory":
        run = made(shared / "theirs", 0o755, BOB)
        place.rename(run / "control")
    elif kind == "a folder in memory":
        os.lchown(run, BOB, BOB)
    if kind != "a run directory":
        (run / "control").symlink_to(place)
    with pytest.raises(ConfigError, match="is user nobody's, who may change what would be run as user root"):
        address_of(str(run))


def test_a_job_file_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "aim").write_text("{}")
    (made(tmp_path / "run" / "control") / "job.json").symlink_to(tmp_path / "aim")
    with pytest.raises(ConfigError, match="holds no job that runs"):
        JobFile.read(tmp_path / "run")


@needs_two_users
def test_train_does_not_write_to_a_directory_of_another_user(shared: Path) -> None:
    run = made(shared / "run", 0o777, BOB)
    (run / "clocks").mkdir()
    (run / "clocks" / "rank-0.json").write_text('{"actuator": "ascend", "options": {"hook": "os.abort"}, "before": {}}')
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    command = [sys.executable, "-m", "elaswave_fx.train", "recipe=gpt_stdlib", "steps=1", f"hydra.run.dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: hydra.run.dir={run}: {run} is user nobody's")
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before
