"""The code by which a joiner is compared: the user's files and whatever they import, and our own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import elaswave_fx
from elaswave_fx.control.protocol.member_info import OWN_CODE
from elaswave_fx.launch import code_digests
from elaswave_fx.launch.code_digests import own_code, target_code, targets_of
from elaswave_fx.launch.versions import versions

FILES = {
    "mine_net.py": "import numpy as np\nfrom mine_package import blocks\n\nclass Net: ...\n",
    "mine_package/__init__.py": "",
    "mine_package/blocks.py": "from . import sizes\nfrom .deep.down import value\n",
    "mine_package/sizes.py": "WIDTH = 8\n",
    "mine_package/deep/down.py": "value = 1\n\ndef later():\n    import mine_late\n    return mine_late\n",
    "mine_late.py": "import os, torch, mine_net\n",
    "mine_rows.py": "raise RuntimeError('nobody runs this')\n",
}


def written(folder: Path, **changed: str) -> Path:
    for name, text in {**FILES, **changed}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, *targets: str) -> dict[str, str]:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    before = set(sys.modules)
    try:
        return target_code(targets)
    finally:
        assert not [name for name in set(sys.modules) - before if name.startswith("mine")], "nothing is imported"
        monkeypatch.undo()


TARGETS = ("mine_net.Net", "mine_rows.Rows", "numpy.random.default_rng", "nosuch.Thing")


def test_all_files_count_that_a_target_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(written(tmp_path / "one"), monkeypatch, *TARGETS)
    assert set(one) == {*FILES, "numpy"} and one["numpy"] == np.__version__
    assert found(written(tmp_path / "other"), monkeypatch, *TARGETS) == one, "wherever they lie"


@pytest.mark.parametrize("name", ["mine_net.py", "mine_package/sizes.py", "mine_late.py", "mine_rows.py"])
def test_a_file_that_differs_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = found(written(tmp_path / "one"), monkeypatch, *TARGETS)
    changed = {name: FILES[name] + "\nMORE = 1\n"}
    other = found(written(tmp_path / "other", **changed), monkeypatch, *TARGETS)
    assert {each for each in one if one[each] != other[each]} == {name}


def test_targets_stand_anywhere_in_a_configuration() -> None:
    config: Mapping[str, object] = {
        "model": {"kind": "target", "name": "mine.Net", "options": {"norm": {"_target_": "mine.Norm"}}},
        "data": {"kind": "hf", "name": "not.Me", "transform": {"_target_": "mine.Flip"}},
        "optimizer": {"name": "target", "target": "lion.Lion"},
        "schedule": {"name": "constant", "target": None},
        "passes": {"extra": [{"_target_": "mine.Pass", "after": "normalize"}], "pipeline": "normalize,mine.Other{a=1}"},
    }
    assert targets_of(config) == ("lion.Lion", "mine.Flip", "mine.Net", "mine.Norm", "mine.Other", "mine.Pass")


def test_another_checkout_of_ours_is_told_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()[OWN_CODE] == own_code() == own_code()
    package = tmp_path / "elaswave_fx"
    for path in Path(elaswave_fx.__file__).parent.glob("*.py"):
        package.mkdir(exist_ok=True)
        (package / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(code_digests.elaswave_fx, "__file__", str(package / "__init__.py"))
    before = own_code()
    (package / "words.py").write_text((package / "words.py").read_text() + "\n")
    assert own_code() != before
