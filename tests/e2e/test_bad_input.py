"""What cannot work is said in one line, before a worker starts, with exit code 2; what dies is shown, with 1."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Command
from tests.marks import slow
from tests.runs import SMALL
from tests.waiting import await_true

REPOSITORY = Path(__file__).resolve().parents[2]


def start(folder: Path, *words: str) -> Command:
    said = (f"hydra.run.dir={folder / 'run'}", *words)
    return Command("elaswave_fx.train", *said, cwd=folder)


def train(folder: Path, *words: str) -> tuple[int, str]:
    process = start(folder, *words)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output + errors


def refused(folder: Path, *words: str) -> str:
    code, output = train(folder, *words)
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output
    return line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("stepz=3",), "steps"),
        (("recipe=two_tower", "parallel.pp=40"), "parallel.pp=40"),
        (("recipe=resnet_digits", "parallel.granule=1"), "parallel.granule=1"),
        (("recipe=two_tower", "model.width=1000000000"), "model=two_tower: there is no memory for it"),
        (("recipe=two_tower", "parallel.dp=64"), "parallel.dp=64"),
        (("data=files", "data.paths=[nothing/*.txt]"), "nothing"),
        (("recipe=gpt_stdlib", "device=cuda"), "device=cuda is not available yet"),
        (("recipe=gpt_stdlib", "device=gpu"), "device=gpu"),
        (("recipe=hf_gpt2", "model.name=gtp2"), "gpt2"),
    ],
)
def test_one_clear_line(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    assert expected in refused(tmp_path, *words)


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(tmp_path, "recipe=two_tower", f"launch.port={port}")


def test_an_unwritable_run_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, output = train(tmp_path, "recipe=two_tower", f"hydra.run.dir={tmp_path / 'file' / 'run'}")
    assert code == 2
    assert "hydra.run.dir" in output


def small(recipe: str, *words: str) -> tuple[str, ...]:
    return (f"recipe={recipe}", *SMALL[recipe], "eval.every=0", *words)


def test_ctrl_c_ends_all_ranks_and_leaves_the_directory_whole(tmp_path: Path) -> None:
    process = start(tmp_path, *small("two_tower", "steps=1000000", "schedule=constant"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    await_true(
        lambda: (metrics.exists() and metrics.read_text().count("\n") > 5) or process.poll() is not None, "five steps"
    )
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, output + errors
    assert (tmp_path / "run" / "summary.json").is_file()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert metrics.read_text().endswith("\n")


def test_killed_workers_are_named_and_when_all_are_gone_the_run_ends(tmp_path: Path) -> None:
    process = start(tmp_path, *small("two_tower", "steps=1000000", "schedule=constant"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    await_true(
        lambda: (metrics.exists() and metrics.read_text().count("\n") > 5) or process.poll() is not None, "five steps"
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        with contextlib.suppress(ProcessLookupError):  # The others may have ended by themselves.
            os.kill(int(child), signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, output + errors
    assert "SIGKILL" in output + errors
    for child in children:
        await_true(lambda pid=child: not Path(f"/proc/{pid}").exists(), "the rank is gone", 10)


BAD = """
import random
import numpy as np
import torch
from torch import nn
class Data:
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": torch.full((3,), float(index))}
class Negative(Data):
    def __len__(self): return -3
class Broken(Data):
    def __getitem__(self, index): raise RuntimeError("no disk")
class Drawn(Data):
    def __getitem__(self, index): return {"x": torch.rand(3)}
class Shuffled(Data):
    def __init__(self, by):
        self.order = [*range(64)]
        {"the system": random.SystemRandom().shuffle, "a new generator": np.random.default_rng().shuffle,
         "a seed": np.random.default_rng(0).shuffle, "torch": self.by_torch}[by](self.order)
    def by_torch(self, order): order[:] = torch.randperm(64).tolist()
    def __getitem__(self, index): return super().__getitem__(self.order[index] / 64)
class Net(nn.Module):
    def __init__(self, layer=nn.Linear(3, 1)):
        super().__init__()
        self.layer = layer
    def forward(self, x): return self.layer(x).square().sum(), x.shape[0]
class Sums(Net):
    def forward(self, x): return self.layer(x).square().sum(), torch.ones(x.shape[0]).sum()
class Lazy(Net):
    def __init__(self): super().__init__(nn.LazyLinear(1))
"""


@pytest.mark.parametrize(
    ("data", "model", "words", "error"),
    [
        slow("Negative", "Net", (),
             "data._target_=bad.Negative: its length cannot be read (ValueError: __len__() should"),
        ("Broken", "Net", (), "data._target_=bad.Broken: sample 0 cannot be read (RuntimeError: no disk)"),
        ("Drawn", "Net", (), "data._target_=bad.Drawn: x of sample 0 is another one when it is read again"),
        ("Data", "Lazy", (), "model=target: layer.weight has no shape yet"),
        slow("Data", "Net", ("resume=loop",), "resume=loop: its symbolic links lead in a circle"),
        slow("Data", "Net", ("checkpoint.dir=file/x",), "checkpoint.dir=FOLDER/file/x: cannot be written"),
        ("Data", "Net", ("recipe=broken", "--config-dir", "."), "FOLDER/recipe/broken.yaml, line 2, column 5: is no"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)  # fmt: skip
def test_input_of_the_user_that_cannot_work(
    data: str, model: str, words: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "broken.yaml").write_text("steps: [1\nseed: {a\n")
    targets = () if "--config-dir" in words else (f"data._target_=bad.{data}", f"model._target_=bad.{model}")
    code, output = train(tmp_path, *targets, "global_batch=8", "steps=1", *words)
    lines = [line for line in output.splitlines() if line != "building"]
    assert code == 2 and len(lines) == 1, output
    assert lines[0].startswith(f"error: {error.replace('FOLDER', str(tmp_path))}")


@pytest.mark.parametrize(("by", "code"), [("the system", 2), ("a new generator", 2), ("a seed", 0), ("torch", 0)])
def test_data_that_each_rank_shuffles_in_its_own_way_is_refused(by: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    targets = ("data._target_=bad.Shuffled", f"+data.by='{by}'", "model._target_=bad.Sums")
    ended, output = train(tmp_path, *targets, "global_batch=8", "steps=1", "parallel.dp=2", "parallel.pp=1")
    assert ended == code, output
    assert ("has other samples than the process that built the model" in output) == (code == 2)


def test_data_for_evaluation_that_each_rank_shuffles_in_its_own_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    targets = ("data._target_=bad.Shuffled", "+data.by='a seed'", "model._target_=bad.Sums", "eval.every=1")
    evaluated = ("eval.data._target_=bad.Shuffled", "+eval.data.by='the system'")
    code, output = train(tmp_path, *targets, *evaluated, "global_batch=8", "steps=1", "parallel.dp=2", "parallel.pp=1")
    assert code == 2 and "has other samples than the process that built the model" in output, output


def test_torchrun_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Each of its processes would start all ranks, in one directory."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "elaswave_fx.train",
        "steps=1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = [*command, f"hydra.run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    line = "error: train starts its ranks itself, and torchrun or the like has started it 2 times (WORLD_SIZE=2): each"
    assert line in ended.stderr and "parallel.dp=2" in ended.stderr, ended.stderr[-2000:]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
