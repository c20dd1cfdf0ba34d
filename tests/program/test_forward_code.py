"""The code that a forward pass runs through, wherever it is, is part of a program's key."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from elaswave_fx.program.forward_code import ForwardCode, forward_code

BATCH = {"x": torch.ones(2, 3)}
NET = """
import torch
from torch import nn
from helper import loss_of
import constants
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, x):
        return loss_of(self.layer(x)) * constants.FACTOR, x.shape[0]
"""
HELPER = "import inner\nSCALE = 1.0\ndef loss_of(y): return inner.twice(y).sum() * SCALE\n"
INNER = "def twice(y): return 2 * y\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("net", NET), ("helper", HELPER), ("inner", INNER), ("constants", "FACTOR = 1\n")):
        (tmp_path / f"{name}.py").write_text(text)
    yield tmp_path
    _forget()


def _forget() -> None:
    for name in ("net", "helper", "inner", "constants"):
        sys.modules.pop(name, None)


def seen() -> ForwardCode:
    _forget()
    importlib.invalidate_caches()
    return forward_code(importlib.import_module("net").Net(), BATCH)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("helper", "sum()", "mean()"),
        ("helper", "SCALE = 1.0", "SCALE = 9.0"),
        ("inner", "2 * y", "20 * y"),
        ("constants", "FACTOR = 1", "FACTOR = 7"),
        ("net", "x.shape[0]", "x.shape[1]"),
    ],
    ids=["helper", "its constant", "what the helper calls", "a module of constants", "the model"],
)
def test_an_edit_of_what_the_model_calls_is_seen(name: str, old: str, new: str, folder: Path) -> None:
    before = seen()
    assert seen().lines() == before.lines(), "the same code, the same lines"
    path = folder / f"{name}.py"
    path.write_text(path.read_text().replace(old, new) + "# longer\n")
    assert seen().lines() != before.lines()


def test_equal_functions_of_two_files_are_two(folder: Path) -> None:
    text = "FACTOR = 1.0\ndef scaled(x): return x * FACTOR\n"
    for name in ("helper", "inner"):
        (folder / f"{name}.py").write_text(text)
    net = NET.replace("from helper import loss_of", "import helper, inner")
    net = net.replace("loss_of(self.layer(x))", "inner.scaled(helper.scaled(self.layer(x))).sum()")
    (folder / "net.py").write_text(net)
    before = seen()
    (folder / "inner.py").write_text(text.replace("1.0", "3.0"))
    assert seen().lines() != before.lines()
    assert "helper.py" in before.words() and "inner.py" in before.words()


def test_the_files_are_named(folder: Path) -> None:
    assert seen().words() == "constants.py, helper.py, inner.py, net.py"


def in_a_notebook(text: str) -> nn.Module:
    names: dict[str, object] = {"nn": nn, "torch": torch, "__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), names)
    return names["Net"]()  # type: ignore[operator]


def test_a_class_that_was_defined_anew_in_a_notebook_is_seen() -> None:
    text = "FACTOR = 1.0\nclass Net(nn.Module):\n    def forward(self, x): return (x.sum() * 2 * FACTOR, x.shape[0])\n"
    found = [
        forward_code(in_a_notebook(each), BATCH).lines()
        for each in (text, text, text.replace("* 2", "* 3"), text.replace("FACTOR = 1.0", "FACTOR = 2.0"))
    ]
    assert found[0] == found[1] and len(set(found)) == 3


def test_installed_packages_count_by_version_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4)
    model = transformers.GPT2Model(config)
    code = forward_code(model, {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
    assert code.packages["transformers"] == transformers.__version__
    assert any(path.name == "modeling_gpt2.py" for path in code.files)
    assert f"transformers {transformers.__version__}" in code.words()


def test_code_that_a_collection_of_garbage_runs_is_not_the_models() -> None:
    def callback(phase: str, info: object) -> None: ...

    gc.callbacks.append(callback)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        code = forward_code(nn.Linear(3, 3), {"input": torch.ones(1, 3)})
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(callback)
    assert code.words() == "torch alone" and gc.isenabled()


def test_looking_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    torch.manual_seed(5)
    forward_code(model, {"input": torch.ones(2, 3)})
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1)) and sys.getprofile() is None


def test_a_forward_pass_that_fails_is_looked_at_as_far_as_it_comes() -> None:
    assert forward_code(nn.Linear(3, 3), {"nothing": torch.ones(1)}).words() == "torch alone"
