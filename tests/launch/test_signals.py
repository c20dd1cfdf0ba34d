"""Ctrl-C, orders and warnings of schedulers, and the launcher's own death, with a launcher in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from elaswave_fx.launch.stop import STOPPING, WARNINGS, Stop
from tests.launch.test_local import lines_of, started_pids, summary_of
from tests.waiting import WAIT_S, await_true

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[str]"]


def steps_written(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the fake job in a process group of its own, as a shell does; nothing of it survives the test."""
    groups: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/launch/fake_job.py"), str(tmp_path), *words],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        groups.append(process)
        return process

    yield begin
    for process in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("to_all", [False, True], ids=["launcher", "group"])
@pytest.mark.parametrize("number", STOPPING)
def test_all_ranks_stop_after_the_same_step(start: Start, tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    """Terminals, init systems and schedulers signal the whole group; the latter warn by signals of their own first."""
    process = start("steps=100000", "pause_s=0.002")
    await_true(lambda: steps_written(tmp_path) >= 3, "three steps")
    (os.killpg if to_all else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (128 + number, "")
    steps = steps_written(tmp_path)
    summary = summary_of(tmp_path)
    assert (summary["outcome"], summary["steps"]) == ("interrupted", steps)
    # Every step that a rank ended, all ended: none is half written down. Workers said goodbye in order.
    assert (summary["samples_seen"], summary["params_digest"]) == (12 * steps, "00ff")
    assert out.splitlines()[-1].startswith(f"stopped by {number.name} after {steps} of 100000 steps; the run directory")
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == list(range(steps))


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_to_one_rank_stops_the_run(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    """A limit of processor time is each process's own: the ranks come to it first."""
    process = start("steps=100000", "pause_s=0.002")
    await_true(lambda: steps_written(tmp_path) >= 3, "three steps")
    os.kill(started_pids(tmp_path)[1], number)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (128 + number, "")
    assert (summary_of(tmp_path)["outcome"], summary_of(tmp_path)["params_digest"]) == ("interrupted", "00ff")
    assert out.splitlines()[-1].startswith(f"stopped by {number.name} after")


def test_warnings_that_repeat_themselves_and_an_order_after_them_let_ranks_end_their_step(
    start: Start, tmp_path: Path
) -> None:
    process = start("steps=1000", "pause_s=2")
    await_true(lambda: steps_written(tmp_path) >= 1, "a step")
    for number in (signal.SIGXCPU, signal.SIGXCPU, signal.SIGUSR1, signal.SIGTERM):
        os.kill(process.pid, number)
        await_true(lambda: "stopping" in (tmp_path / "events.jsonl").read_text(), "it is heeded")
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGXCPU
    assert summary_of(tmp_path)["params_digest"] == "00ff"


def test_a_coordinator_of_its_own_does_not_end_by_a_warning(tmp_path: Path) -> None:
    words = (
        "from elaswave_fx.coordinator import main, run_command; run_command(lambda: main(['nowhere'])); "
        "import os; os.kill(os.getpid(), 10); print(1)"
    )
    ended = subprocess.run([sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


@pytest.mark.parametrize(
    ("numbers", "requests"),
    [
        ((signal.SIGUSR1,) * 3, 1),
        ((signal.SIGUSR2, signal.SIGTERM), 1),
        ((signal.SIGTERM, signal.SIGUSR1), 1),
        ((signal.SIGXCPU, signal.SIGTERM, signal.SIGTERM), 2),
        ((signal.SIGINT, signal.SIGHUP), 2),
    ],
)
def test_only_a_second_order_ends_workers_at_once(numbers: tuple[signal.Signals, ...], requests: int) -> None:
    stop = Stop()
    assert stop.requests == 0
    for number in numbers:
        stop.ask(number)
    assert (stop.requests, stop.number) == (requests, numbers[0])


def test_a_second_ctrl_c_ends_workers_that_do_not_stop(start: Start, tmp_path: Path) -> None:
    process = start("steps=1000", "pause_s=600")
    await_true(
        lambda: (tmp_path / "events.jsonl").exists() and "started" in (tmp_path / "events.jsonl").read_text(), "start"
    )
    pids = started_pids(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    await_true(lambda: "stopping" in (tmp_path / "events.jsonl").read_text(), "the first Ctrl-C is heeded")
    assert not any(is_gone(pid) for pid in pids)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert all(is_gone(pid) for pid in pids)
    assert summary_of(tmp_path)["outcome"] == "interrupted"


def test_ctrl_c_while_building_ends_the_builder(start: Start, tmp_path: Path) -> None:
    process = start("builder=slow")
    await_true(lambda: (tmp_path / "logs" / "builder.log").exists(), "the builder starts")
    (builder,) = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert is_gone(builder.pid)
    assert summary_of(tmp_path)["reason"] == "SIGINT after 0 of 5 steps"


def test_no_worker_outlives_a_killed_launcher(start: Start, tmp_path: Path) -> None:
    process = start("steps=1000000", "pause_s=0.01")
    await_true(lambda: steps_written(tmp_path) >= 1, "a step")
    pids = started_pids(tmp_path)
    assert len(pids) == 3
    process.kill()
    process.wait(timeout=WAIT_S)
    await_true(lambda: all(is_gone(pid) for pid in pids), "the workers end with their launcher")


def test_a_worker_killed_from_outside_is_named_and_gone_on_without(start: Start, tmp_path: Path) -> None:
    process = start("steps=1000000", "pause_s=0.01")
    await_true(lambda: steps_written(tmp_path) >= 1, "a step")
    pids = started_pids(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    await_true(lambda: "resumed" in (tmp_path / "events.jsonl").read_text(), "the others go on")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 143
    assert re.search("^epoch 1: rank 1 failed .*; resumed at step ", out, re.M) and "killed by SIGKILL" in out
    assert all(is_gone(pid) for pid in pids)
    summary = summary_of(tmp_path)
    assert (summary["outcome"], summary["steps"]) == ("interrupted", steps_written(tmp_path))
    assert [recovery["rank"] for recovery in summary["recoveries"]] == [1]


def coordinators(launcher: int) -> list[psutil.Process]:
    """Children of the launcher that are no workers: forked before them, or after."""
    return [child for child in psutil.Process(launcher).children() if child_log(child).endswith("coordinator.log")]


def child_log(child: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return os.readlink(f"/proc/{child.pid}/fd/1")
    return ""


def test_a_killed_coordinator_is_replaced(start: Start, tmp_path: Path) -> None:
    process = start("steps=1000000", "pause_s=0.005")
    await_true(lambda: steps_written(tmp_path) >= 1, "a step")
    pids = started_pids(tmp_path)
    for _ in range(2):
        await_true(lambda: len(coordinators(process.pid)) == 1, "a coordinator")
        (old,) = coordinators(process.pid)
        old.kill()
        await_true(lambda old=old: [c.pid for c in coordinators(process.pid)] not in ([old.pid], []), "another one")
    os.kill(pids[0], signal.SIGKILL)
    await_true(lambda: "resumed" in (tmp_path / "events.jsonl").read_text(), "the others go on")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (143, "")
    assert out.count("coordinator failed: killed by SIGKILL") == 2
    assert summary_of(tmp_path)["recoveries"][0]["rank"] == 0


def test_a_coordinator_of_its_own_serves_workers_without_a_launcher(start: Start, tmp_path: Path) -> None:
    """Workers whose launcher was killed end by themselves; the ledger has every step they took."""
    process = start("steps=1000000", "pause_s=0.01")
    await_true(lambda: steps_written(tmp_path) >= 5, "steps")
    pids = started_pids(tmp_path)
    (coordinator,) = coordinators(process.pid)
    process.kill()
    process.wait(timeout=WAIT_S)
    await_true(lambda: all(is_gone(pid) for pid in (*pids, coordinator.pid)), "everybody ends")
    steps = [line["step"] for line in lines_of(tmp_path / "ledger.jsonl")]
    assert steps == list(range(len(steps))) and len(steps) >= 5


def test_a_rank_that_dies_before_it_has_detached_is_lost_when_the_others_have(start: Start, tmp_path: Path) -> None:
    """They may have gone on without it by the time that its process has ended."""
    process = start("steps=40", "mode@1=killed when the others run")
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, ""), out
    assert summary_of(tmp_path)["steps"] == 40
    assert [event["rank"] for event in lines_of(tmp_path / "events.jsonl") if event["kind"] == "left"] == [1]


def test_a_launcher_that_is_slow_to_read_takes_no_loss_for_one_before_the_start(start: Start, tmp_path: Path) -> None:
    """It sees the end of a rank before the earlier word of another one, that its agent runs."""
    process = start("ranks=2", "steps=40", "mode@0=killed while nobody reads", "mode@1=detaches unread")
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, ""), out
    assert summary_of(tmp_path)["steps"] == 40
    assert [event["rank"] for event in lines_of(tmp_path / "events.jsonl") if event["kind"] == "left"] == [0]
