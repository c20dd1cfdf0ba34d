"""How runs end whose directory is gone or has no room, and what a run that is gone on with keeps of its part before."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elaswave_fx.errors import ConfigError, JobOver
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.worker.model_file import write_model
from tests.recovery.harness import Job
from tests.runs import run_job, small_config

TENSORS = {"weight": torch.arange(6.0).view(2, 3)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder where a model may go besides its run directory."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    monkeypatch.chdir(home)
    return home


def test_a_run_whose_directory_is_removed_saves_elsewhere_and_says_so(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    words = ("parallel.dp=2", "steps=120", "checkpoint.every=1000", f"checkpoint.dir={checkpoints}")
    with Job(small_config("gpt_stdlib", *words), tmp_path / "run") as job:
        job.await_step(5)
        console = (tmp_path / "run" / "console.log").open()
        shutil.rmtree(tmp_path / "run")
        code = job.wait().code
    assert code == 1
    told = console.read()
    (model,) = home.glob("run-*-model.safetensors")
    assert f"the model cannot be written there; it is in {model}" in told
    assert told.rstrip().endswith(f"error: {tmp_path / 'run'}: was removed while the run went on"), told[-500:]
    assert "Traceback" not in told and "can be written again" not in told
    assert (checkpoints / "step-120").is_dir() and load_file(model)


def test_a_disk_without_room_for_the_model_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no room for the model of 1024.0 TiB \("):
        RunDirectory.reserve(tmp_path, 1 << 50)
    assert list(tmp_path.iterdir()) == []
    RunDirectory.reserve(tmp_path, 1 << 20)
    (reserved,) = tmp_path.iterdir()
    assert reserved.stat().st_blocks * 512 >= 1 << 20, "the room is taken"
    assert write_model(tmp_path, TENSORS) == tmp_path / "model.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_goes_elsewhere_when_a_file_has_the_place_of_the_directory(home: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    path = write_model(tmp_path / "run", TENSORS)
    assert path.parent == home and load_file(path)["weight"].equal(TENSORS["weight"])


def test_a_model_that_can_be_written_nowhere_ends_the_job_with_all_places_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaswave_fx.worker.model_file.save_file", _full)
    with pytest.raises(JobOver, match=rf"to any of {tmp_path} \(No space left on device\), .*{Path.home()} \("):
        write_model(tmp_path, TENSORS)


def _full(tensors: object, path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


def test_a_run_that_is_gone_on_with_keeps_recoveries_plans_and_summary(tmp_path: Path) -> None:
    words = ("parallel.dp=2", "checkpoint.every=4", "resume=auto")

    def part(steps: int, step: int, rank: int) -> None:
        fault = f"faults=[{{step: {step}, rank: {rank}, kind: kill, phase: forward}}]"
        assert run_job(small_config("gpt_stdlib", *words, f"steps={steps}", fault), tmp_path).code == 0

    for number in range(3):
        part(4 * number + 4, 4 * number + 2, number % 2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(entry["rank"], entry["step"]) for entry in summary["recoveries"]] == [(0, 2), (1, 6), (0, 10)]
    assert all(entry["mttr_ms"] is not None for entry in summary["recoveries"])
    for number in (1, 2):
        before = tmp_path / "earlier" / str(number)
        assert sorted(path.name for path in before.iterdir()) == [
            "plan-0.json",
            "plan-1.json",
            "run.json",
            "summary.json",
        ]
        assert len(json.loads((before / "summary.json").read_text())["recoveries"]) == number
    assert len(list(tmp_path.glob("plan-*.json"))) == 2
