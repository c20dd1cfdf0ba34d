"""`elaswave COMMAND`: every command under one name, with the files beside the user importable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_fx.command import COMMANDS

SCRIPT = Path(sys.executable).parent / "elaswave"
NET = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 10))

    def forward(self, image, label):
        return F.cross_entropy(self.body(image), label, reduction="sum"), torch.ones_like(label).sum()
"""


def elaswave(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_class_beside_the_user_is_trained_and_the_run_verified(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "mine.py").write_text(NET)
    words = ("data=digits", "model._target_=mine.Net", "steps=3", "hydra.run.dir=run")
    done = elaswave("train", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
    checked = elaswave("verify", "run", folder=tmp_path)
    assert checked.returncode == 0 and "chain        holds" in checked.stdout, checked.stdout + checked.stderr


def test_every_command_is_there_and_others_are_refused(tmp_path: Path) -> None:
    shown = elaswave("--help", folder=tmp_path)
    assert shown.returncode == 0 and all(f"  {name} " in shown.stdout for name in COMMANDS)
    for name in ("join", "reshape", "timeline"):
        assert "usage: " in elaswave(name, "--help", folder=tmp_path).stdout
    wrong = elaswave("traim", folder=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"error: elaswave traim: no such command; there are {', '.join(COMMANDS)}\n"
