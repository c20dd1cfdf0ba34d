"""Checkpoints of real runs: going on from them on the same layout and on others, after kills and Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elaswave_fx.checkpoint import saver
from elaswave_fx.checkpoint.folder import complete
from elaswave_fx.config.keys import Config
from elaswave_fx.control.protocol import do
from elaswave_fx.control.protocol.types import Certificate
from elaswave_fx.errors import ConfigError
from elaswave_fx.worker.loop import Training
from tests.runs import Run, run_job, small_config
from tests.waiting import await_true

EVERY = ("checkpoint.every=4", "checkpoint.keep=2")


def gpt(dp: int, pp: int, *overrides: str) -> Config:
    return small_config("gpt_stdlib", f"parallel.dp={dp}", f"parallel.pp={pp}", "steps=12", *overrides)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """12 steps on 2x2 with checkpoints after 4, 8 and 12, of which two are kept."""
    run = run_job(gpt(2, 2, *EVERY), tmp_path_factory.mktemp("undisturbed"))
    assert run.code == 0
    return run


def test_the_newest_checkpoints_are_kept_and_told_of(undisturbed: Run) -> None:
    folder = undisturbed.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-12", "step-8"]
    told = events(undisturbed, "checkpoint")
    assert [(line["step"], line["path"]) for line in told] == [(n, str(folder / f"step-{n}")) for n in (4, 8, 12)]
    assert all(line["megabytes"] > 0 for line in told)


def test_checkpoints_change_no_bit_and_other_tools_read_them(undisturbed: Run, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    plain = run_job(gpt(2, 2), tmp_path / "plain")
    assert plain.losses == undisturbed.losses
    dcp_to_torch_save(undisturbed.folder / "checkpoints" / "step-12", tmp_path / "all.pt")
    stored = torch.load(tmp_path / "all.pt")
    tensors = undisturbed.tensors
    assert set(stored) == {"model", "optimizer"}
    assert all(torch.equal(stored["model"][name], tensor) for name, tensor in tensors.items())
    assert all(state.shape == tensors[name].shape for name, both in stored["optimizer"].items() for state in both)


def test_the_same_layout_goes_on_with_the_same_bits(undisturbed: Run, tmp_path: Path) -> None:
    path = undisturbed.folder / "checkpoints" / "step-8"
    run = run_job(gpt(2, 2, f"resume={path}"), tmp_path)
    assert run.code == 0
    assert [line["step"] for line in run.metrics] == [8, 9, 10, 11]
    assert run.losses == undisturbed.losses[8:]
    summary, expected = run.summary, undisturbed.summary
    assert summary["params_digest"] == expected["params_digest"]
    for key in ("steps", "loss_last", "samples_seen", "samples_duplicated", "samples_skipped"):
        assert summary[key] == expected[key], key
    assert not (tmp_path / "checkpoints").exists()


def test_another_layout_goes_on_with_the_same_run(undisturbed: Run, tmp_path: Path) -> None:
    path = undisturbed.folder / "checkpoints" / "step-8"
    run = run_job(gpt(1, 1, f"resume={path}"), tmp_path)
    assert run.code == 0
    assert run.losses == pytest.approx(undisturbed.losses[8:], rel=1e-5)


def test_from_six_ranks_to_two(undisturbed: Run, tmp_path: Path) -> None:
    wide = run_job(gpt(3, 2, *EVERY), tmp_path / "wide")
    assert wide.code == 0
    narrow = run_job(gpt(2, 1, f"resume={tmp_path / 'wide' / 'checkpoints' / 'step-8'}"), tmp_path / "narrow")
    assert narrow.code == 0
    assert narrow.losses == pytest.approx(undisturbed.losses[8:], rel=1e-5)


def spoil(patched: pytest.MonkeyPatch, name: str, what: Callable[[], None], ranks: tuple[int, ...] = (1,)) -> None:
    """`ranks` do `what` when they have written their part of the checkpoint `name`; workers are forked from here."""
    write = saver._write_own

    def write_and_spoil(files: Any, partial: Path, snapshot: Any, place: int) -> Any:
        answer = write(files, partial, snapshot, place)
        if place in ranks and partial.name == f"{name}.e0.partial":
            what()
        return answer

    patched.setattr(saver, "_write_own", write_and_spoil)


def test_a_kill_while_saving_leaves_the_checkpoint_before(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpt(2, 2, *EVERY, "resume=auto")
    written = tmp_path / "written"
    written.mkdir()

    def die_together() -> None:
        """At the last one that has written its part. All are stopped first, so that none sees another die, which would
        have it go back to the checkpoint before."""
        (written / str(os.getpid())).touch()
        ranks = [path.name for path in written.iterdir()]
        if len(ranks) == 4:
            together = " ".join(ranks)
            subprocess.run(["sh", "-c", f"kill -STOP {together}; kill -KILL {together}"], check=True)

    with monkeypatch.context() as patched:
        spoil(patched, "step-8", die_together, ranks=(0, 1, 2, 3))
        run = run_job(config, tmp_path)
    assert run.code == 1
    assert len(run.metrics) >= 8
    folder = tmp_path / "checkpoints"
    assert sorted(complete(folder)) == [4]
    assert (folder / "step-8.e0.partial").is_dir()

    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # as a launcher leaves it that is killed while it writes
    again = run_job(config, tmp_path)
    assert again.code == 0
    assert [line["step"] for line in again.metrics] == list(range(12))
    assert again.losses == undisturbed.losses
    assert again.summary["loss_first"] == undisturbed.losses[0]
    assert again.summary["samples_seen"] == 12 * config.global_batch
    assert sorted(path.name for path in folder.iterdir()) == ["step-12", "step-8"]
    assert [line["step"] for line in events(again, "resumed")] == [4]


def test_a_rank_that_dies_while_saving_costs_that_checkpoint_at_most(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        spoil(patched, "step-8", lambda: os.kill(os.getpid(), signal.SIGKILL))
        run = run_job(gpt(2, 2, *EVERY), tmp_path)
    assert run.code == 0
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    (agreed,) = events(run, "agreed")
    kept = "step-8" if agreed["step"] == 8 else "step-4"  # The others make it again if they go on from there.
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-12", kept]
    assert [line["rank"] for line in events(run, "detected")] == [1]


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("name", "code"), [("step-2", 0), ("step-4", 1)])
def test_a_full_disk_ends_the_run_only_at_the_last_checkpoint(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        spoil(patched, name, disk_full)
        run = run_job(gpt(2, 1, "steps=4", "checkpoint.every=2"), tmp_path)
    assert run.code == code
    assert len(run.metrics) == 4
    words = f"checkpoint {name}: rank 1: [Errno 28] No space left on device"
    assert [line.get("failed") for line in events(run, "checkpoint")] == ([words, None] if code == 0 else [None, words])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-4" if code == 0 else "step-2"]
    told = capfd.readouterr().err
    assert told == (f"error: {words}\n" if code == 1 else "")
    assert (tmp_path / "model.safetensors").exists(), "the model is written all the same"


def test_ctrl_c_leaves_a_run_that_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("parallel.pp=2", "parallel.dp=1", "steps=8", "eval.every=4", "checkpoint.every=100", "resume=auto")
    config = small_config("resnet_digits", *words)
    expected = run_job(small_config("resnet_digits", *words[:-2]), tmp_path / "undisturbed")
    step = Training._take_step

    def step_and_stop(training: Training, what: do.TakeStep) -> Certificate:
        if what.step == 4 and training._worker.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
            await_true(lambda: training._worker.context.stop_wanted, "the rank is told to stop")
        return step(training, what)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_take_step", step_and_stop)
        stopped = run_job(config, tmp_path / "run")
    assert stopped.summary["outcome"] == "interrupted"
    done = stopped.summary["steps"]
    assert 5 <= done < 8
    assert sorted(complete(tmp_path / "run" / "checkpoints")) == [done]

    run = run_job(config, tmp_path / "run")
    assert run.code == 0
    assert run.losses == expected.losses
    for name, tensor in run.tensors.items():  # running statistics too
        assert torch.equal(tensor, expected.tensors[name]), name
    evaluations = [json.loads(line)["step"] for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert evaluations == [4, 8]
    finished = run_job(config, tmp_path / "run")
    assert (finished.code, finished.losses) == (0, expected.losses)
    assert finished.summary["loss_last"] == expected.losses[-1]


def test_a_truncated_checkpoint_is_refused_before_workers_start(undisturbed: Run, tmp_path: Path) -> None:
    path = tmp_path / "step-8"
    shutil.copytree(undisturbed.folder / "checkpoints" / "step-8", path)
    shard = path / "__1_0.distcp"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    with pytest.raises(ConfigError) as caught:
        run_job(gpt(2, 2, f"resume={path}"), tmp_path / "run")
    assert str(caught.value) == (f"resume={path}: __1_0.distcp is truncated, it has {size - 100} bytes and had {size}")
    assert list((tmp_path / "run").iterdir()) == []


def test_auto_goes_on_from_the_newest_checkpoint_that_is_whole(
    undisturbed: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed.folder, tmp_path / "run")
    shard = tmp_path / "run" / "checkpoints" / "step-12" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    run = run_job(gpt(2, 2, *EVERY, "resume=auto"), tmp_path / "run")
    assert (run.code, run.losses) == (0, undisturbed.losses)
    assert run.summary["params_digest"] == undisturbed.summary["params_digest"]
    assert "DAMAGED, kept as step-12.damaged: " in capfd.readouterr().out
    assert sorted(complete(tmp_path / "run" / "checkpoints")) == [8, 12]
    assert (tmp_path / "run" / "checkpoints" / "step-12.damaged" / "__1_0.distcp").read_bytes() == data


def test_a_checkpoint_of_another_model_is_refused_before_workers_start(undisturbed: Run, tmp_path: Path) -> None:
    path = undisturbed.folder / "checkpoints" / "step-8"
    with pytest.raises(ConfigError) as caught:
        run_job(gpt(2, 2, f"resume={path}", "model.layers=3"), tmp_path)
    assert str(caught.value).startswith(
        f"resume={path}: is a checkpoint of another model or optimizer: it has no model/"
    )
    assert not (tmp_path / "logs" / "rank-0.log").exists()
