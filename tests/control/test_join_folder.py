"""Folders of processes that join: theirs while they live, and nobody's after."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from elaswave_fx.control.agent import join_folder as folders
from elaswave_fx.control.agent.join_folder import join_folder, remove_left_behind
from tests.waiting import await_true


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In which they are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "YOUNG_S", -1.0)
    return tmp_path


def test_it_goes_with_the_block(place: Path) -> None:
    with join_folder() as folder:
        (folder / "program").mkdir()
        assert folder.parent == place and folder.stat().st_mode & 0o777 == 0o700
        remove_left_behind()
        assert (folder / "program").is_dir(), "its process lives"
    assert not list(place.iterdir())
    with pytest.raises(KeyError), join_folder():
        raise KeyError
    assert not list(place.iterdir())


def test_those_of_killed_processes_are_removed_by_the_next(place: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with join_folder() as folder:
            (folder / "state").write_bytes(b"x" * 4096)
            signal.pause()
        os._exit(1)
    try:
        await_true(lambda: list(place.glob("*/state")) != [], "it has one")
        remove_left_behind()
        assert list(place.glob("*/state"))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with join_folder() as folder:
        assert list(place.iterdir()) == [folder]


@pytest.mark.parametrize("kind", ["young", "link", "pipe", "another user's"])
def test_what_may_be_somebodys_stays(kind: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aim, folder = place / "aim", place / "elaswave-join-x"
    aim.mkdir()
    if kind == "link":
        folder.symlink_to(aim)
    else:
        folder.mkdir()
    if kind == "young":
        monkeypatch.setattr(folders, "YOUNG_S", 60.0)
    elif kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can make folders of others")
        os.chown(folder, 65534, 65534)
    elif kind == "pipe":
        os.mkfifo(folder / "alive")
    began_s = time.monotonic()
    remove_left_behind()
    assert time.monotonic() - began_s < 10.0
    assert aim.is_dir() and (kind == "pipe" or folder.exists())
