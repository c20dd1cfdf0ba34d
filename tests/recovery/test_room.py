"""Runs whose directory is removed, or whose memory for files is full, and that then lose a coordinator or a rank."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_fx.control.coordinator import service
from elaswave_fx.control.store import file_store
from tests.control.test_file_store import START
from tests.recovery.harness import Job, job_config
from tests.waiting import await_true

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
WORDS = ("steps=300", "eval.every=0")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


def own_memory(megabytes: int) -> Callable[[], None]:
    """In the process that calls it, and in those that it forks, /dev/shm is a small one of their own."""

    def mount() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        done = (
            libc.unshare(CLONE_NEWNS)
            or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            or libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, f"size={megabytes}m".encode())
        )
        if done != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    return mount


def memory_of(job: Job) -> Path:
    """/dev/shm as the processes of the job see it."""
    return Path(f"/proc/{job.launcher}/root/dev/shm")


def fill(folder: Path) -> None:
    """Not a byte is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_without_its_directory_a_run_gets_coordinators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would log is lost, and nothing else."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    run = tmp_path / "run"
    with Job(job_config((2, 1), *WORDS, f"checkpoint.dir={tmp_path / 'saved'}", "checkpoint.every=1000"), run) as job:
        job.await_step(5)
        pids, first = job.pids, job.coordinator()
        console = (run / "console.log").open()
        shutil.rmtree(run)
        assert first is not None
        for _ in range(2):
            before = job.coordinator()
            assert job.signal_coordinator(signal.SIGKILL)
            await_true(lambda was=before: job.coordinator() not in (None, was) or job.ended, "another coordinator")
        await_true(lambda: "another one takes over" in console.read() or job.ended, "it is told of")
        os.kill(pids[1], signal.SIGKILL)
        code = job.wait().code
    console.seek(0)
    told = console.read()
    assert code == 1, told[-3000:]
    assert told.rstrip().endswith(f"error: {run}: was removed while the run went on"), told[-800:]
    assert re.search(r"^epoch 1: rank 1 failed .*; resumed at step \d+ on rank 0", told, re.M), told[-3000:]
    assert "Traceback" not in told and told.count("coordinator failed: killed") == 2, told[-3000:]
    assert (tmp_path / "saved" / "step-300").is_dir()


@needs_root
def test_when_others_have_filled_the_memory_for_files_a_loss_has_the_room_that_was_kept(tmp_path: Path) -> None:
    with Job(job_config((2, 1), *WORDS), tmp_path / "run", own_memory(8)) as job:
        job.await_step(5)
        fill(memory_of(job))
        assert job.signal_rank(1, signal.SIGKILL)
        run = job.wait()
    assert run.code == 0, run.console[-3000:]
    assert [event["lost"] for event in run.of_kind("agreed")] == [[1]]
    assert len(run.ledger) == 300


@needs_root
def test_a_loss_for_which_there_is_no_room_at_all_ends_the_run_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STORE_PATIENCE_S", 2.0)
    with Job(job_config((2, 1), *WORDS), tmp_path / "run", own_memory(8)) as job:
        job.await_step(5)
        (folder,) = memory_of(job).glob("elaswave-*")
        (folder / "spare").unlink()
        fill(memory_of(job))
        assert job.signal_rank(1, signal.SIGKILL)
        run = job.wait()
    assert run.code == 1, run.console[-3000:]
    last = run.console.rstrip().splitlines()[-1]
    assert last.startswith("error: ") and "cannot be written (No space left on device)" in last, run.console[-3000:]
    assert "Traceback" not in run.console


@needs_root
def test_a_memory_for_files_that_is_full_before_refuses_the_run(tmp_path: Path) -> None:
    def begin() -> None:
        own_memory(2)()
        fill(Path("/dev/shm"))

    with Job(job_config((2, 1), *WORDS), tmp_path / "run", begin) as job:
        run = job.wait()
    assert run.code == 1
    assert "error: launcher: the job cannot be started ([Errno 28] No space left on device: '/dev/shm/" in run.console
    assert "/dev/shm needs a few MB" in run.console


def test_room_is_kept_and_given_up_for_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "SPARE_BYTES", 4096)
    store = file_store.FileStore.create(tmp_path / "run", START, "{}")
    spare, real, is_full = store.folder / "spare", file_store.replace_file, False
    assert spare.stat().st_blocks * 512 >= 4096

    def replace(path: Path, data: bytes, *, durable: bool = False) -> None:
        if spare.exists() or is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data, durable=durable)

    with monkeypatch.context() as patch:
        patch.setattr(file_store, "replace_file", replace)
        store.write_plan(1, "a plan")
        assert store.read_plan(1) == "a plan" and not spare.exists()
        is_full = True
        with pytest.raises(OSError, match="No space left"):
            store.write_plan(2, "another")
    store.settle()
