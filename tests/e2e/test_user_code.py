"""A user's own model, data, optimizer and schedule, from a file outside of this repository, through the command."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands import run

MINE = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        middle = (nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.Tanh())
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), *middle, nn.Linear(hidden, 1))

    def forward(self, features, target):
        error = self.layers(features).squeeze(-1) - target
        return (error * error).sum(), torch.ones_like(target).sum()


class MeanNet(Net):
    def forward(self, features, target):
        error = self.layers(features).squeeze(-1) - target
        return (error * error).mean()


class Points:
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        features = torch.randn(8, generator=generator)
        return {"features": features, "target": features.sum()}


class SignDescent:
    """Moves every element against its gradient, smoothed by a running mean."""

    def __init__(self, beta=0.9):
        self.beta = beta

    def init(self, param):
        return (torch.zeros_like(param),)

    def update(self, param, grad, state, hyper):
        (lr,) = hyper
        mean = torch.lerp(state[0], grad, 1.0 - self.beta)
        return param - mean * lr, (mean,)

    def hyper_values(self, step, lr, group):
        return [lr]


def halving(every=5):
    return lambda step: 0.5 ** (step // every)
'''


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(MINE)
    here = ("hydra.run.dir=run", f"cache.dir={folder / 'cache'}")
    return run("elaswave_fx.train", *here, *words, cwd=folder)


ALL = (
    "model._target_=mine.Net", "model.hidden=24", "data._target_=mine.Points", "optimizer._target_=mine.SignDescent",
    "optimizer.beta=0.8", "optimizer.lr=0.2", "schedule._target_=mine.halving", "schedule.every=40", "steps=60",
    "global_batch=16", "parallel.dp=2", "parallel.pp=2",
)  # fmt: skip


def test_everything_of_the_users_trains_on_four_ranks(tmp_path: Path) -> None:
    done = train(tmp_path, *ALL)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert [lines[0]["lr"], lines[-1]["lr"]] == pytest.approx([0.2, 0.1])


@pytest.mark.slow
def test_a_model_that_returns_only_a_mean_is_refused_by_name(tmp_path: Path) -> None:
    done = train(tmp_path, *ALL, "model._target_=mine.MeanNet")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "a model returns (loss sum, count)" in line
