"""Trouble of the launcher's own: a console that went away, a full disk, a fault in its code. No step is lost to it."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.errors import ConfigError
from elaswave_fx.launch.job import BuildResult
from elaswave_fx.launch.local import launch
from elaswave_fx.observe.recorder import Recorder
from elaswave_fx.observe.run_directory import RunDirectory
from tests.launch.fake_job import broken_builder, job, three_free_ports
from tests.launch.test_local import lines_of, no_process_is_left, summary_of
from tests.waiting import await_true

ROOT = Path(__file__).resolve().parents[2]
FAKE_JOB = f"{sys.executable} {ROOT / 'tests/launch/fake_job.py'}"

__all__ = ["no_process_is_left"]


@pytest.mark.parametrize("console", ["> /dev/full 2>&1", ">&- 2>&-", "<&- >&- 2>&-", "| head -n 1"])
def test_nobody_has_to_listen(tmp_path: Path, console: str) -> None:
    command = f"set -o pipefail; {FAKE_JOB} {tmp_path} steps=40 pause_s=0.01 {console}"
    ended = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=90, check=False,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert ended.returncode == 0
    assert (summary_of(tmp_path)["outcome"], summary_of(tmp_path)["steps"]) == ("completed", 40)


def test_lines_wait_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk is full for a while, and takes half a line before it is."""
    write, calls = os.write, 0

    def on_a_full_disk(descriptor: int, data: bytes) -> int:
        nonlocal calls
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            return write(descriptor, data)
        calls += 1
        if calls == 3:
            return write(descriptor, bytes(data[:7]))
        if 3 < calls < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", on_a_full_disk)
    assert launch(job(tmp_path, steps=40, pause_s=0.01)) == 0
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == list(range(40))
    told = capfd.readouterr().out
    assert (
        told.count("metrics.jsonl: cannot be written (No space left on device); its lines are kept until it can") == 1
    )
    assert told.count("can be written again") == 1


def test_workers_finish_when_the_launcher_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Recorder.step

    def fail_at_five(recorder: Recorder, report: Any) -> Any:
        if report.step == 5:
            raise RuntimeError("a slip in the launcher")
        return step(recorder, report)

    monkeypatch.setattr(Recorder, "step", fail_at_five)
    with pytest.raises(RuntimeError, match="a slip in the launcher"):
        launch(job(tmp_path, steps=100_000, pause_s=0.002))
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert logs == ["the launcher is gone\n"] * 2  # They came to their end by themselves.


def test_a_build_that_fails_costs_no_earlier_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(job(tmp_path)) == 0
    (tmp_path / "model.safetensors").write_text("the fruit of a week")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "builder.log"}
    assert launch(job(tmp_path, builder=broken_builder)) == 1
    assert {path: path.read_bytes() for path in files} == files
    assert launch(job(tmp_path, steps=3)) == 0
    assert (summary_of(tmp_path)["steps"], (tmp_path / "model.safetensors").exists()) == (3, False)


def test_a_build_that_fails_leaves_no_initial_tensors(tmp_path: Path) -> None:
    initial = RunDirectory.initial(tmp_path)

    def builder() -> BuildResult:
        initial.mkdir()
        (initial / "state.safetensors").touch()
        return broken_builder()

    assert launch(job(tmp_path, builder=builder)) == 1
    assert not initial.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device files")
def test_a_directory_says_what_it_cannot_write(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path)
    os.mknod(tmp_path / "eval.jsonl", stat.S_IFCHR | 0o600, os.stat("/dev/full").st_rdev)
    directory.evaluation(1, 0.5, 10)
    assert directory.trouble == (
        f"{tmp_path}/eval.jsonl: cannot be written (No space left on device); its lines are kept until it can"
    )
    directory.close()


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    command = ["bash", "-c", f"exec {FAKE_JOB} {tmp_path} steps=100000 pause_s=0.01"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    ) as first:
        await_true(
            lambda: (tmp_path / "metrics.jsonl").exists() and lines_of(tmp_path / "metrics.jsonl") != [], "a step"
        )
        with pytest.raises(ConfigError, match=r"another run goes on in it"):
            launch(job(tmp_path))
        first.send_signal(signal.SIGINT)
    assert summary_of(tmp_path)["outcome"] == "interrupted"
    assert launch(job(tmp_path)) == 0


def test_a_run_waits_for_the_ranks_of_one_whose_launcher_was_killed(tmp_path: Path) -> None:
    """They end their step first. While that launcher lives, nobody waits."""
    said: list[str] = []
    command = [*FAKE_JOB.split(), str(tmp_path), "steps=100000", "pause_s=0.5"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    ) as first:
        await_true(
            lambda: (tmp_path / "metrics.jsonl").exists() and lines_of(tmp_path / "metrics.jsonl") != [], "a step"
        )
        RunDirectory.await_orphans(tmp_path, said.append, 60.0)
        assert said == []
        first.kill()
    RunDirectory.await_orphans(tmp_path, said.append, 60.0)
    assert len(said) == 1 and "waits for the ranks of the run before, whose launcher is gone" in said[0]
    assert launch(job(tmp_path)) == 0


@pytest.mark.parametrize("shift", [0, 2, -1], ids=["the same ports", "its last one", "its first one"])
@pytest.mark.parametrize("words", [("builder=slow",), ("steps=1000000", "pause_s=0.005")], ids=["built", "running"])
def test_ports_of_another_job_are_refused_before_anything_is_done(
    words: tuple[str, ...], shift: int, tmp_path: Path
) -> None:
    """Also of one that is still being built, when none of its ranks listens. It does not notice."""
    first, second, port = tmp_path / "first", tmp_path / "second", three_free_ports()
    command = [*FAKE_JOB.split(), str(first), f"port={port}", *words]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as other:
        try:
            begun = first / ("logs/builder.log" if "builder=slow" in words else "metrics.jsonl")
            await_true(begun.exists, "the first job has begun")
            with pytest.raises(ConfigError, match=f"launch.port={port + shift}: port .* is busy; nearest valid: "):
                launch(job(second, ranks=3, port=port + shift))
            assert not second.exists()
            if "builder=slow" not in words:
                steps = len(lines_of(begun))
                await_true(lambda: len(lines_of(begun)) > steps + 3, "the first job goes on")
            assert other.poll() is None
        finally:
            other.send_signal(signal.SIGINT)
    assert launch(job(second, ranks=3, port=port)) == 0, "they are free again"
