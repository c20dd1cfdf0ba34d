"""Runs whose plans set clocks: kernels take longer, energy is counted, clocks stand as before, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.plan.plan import Plan
from tests.devices.sysfs import HIGHEST, LOWEST, limits, make_sysfs
from tests.runs import SMALL, Run, run_job, small_config

POINTS = "power.points=[{mhz: 1000, speed: 0.5, watts: 100}, {mhz: 2000, speed: 1, watts: 300}]"
TWO = ("parallel.dp=2", "parallel.pp=1", "parallel.granule=4", "emulated.speeds=[1,0.4]")
"""Two ranks with a granule each, so that the first waits for the second."""
WAIT_S = 120.0


def emulated(folder: Path, *overrides: str) -> Run:
    words = ("device=emulated", "emulated.unit_ms=2", "steps=6", POINTS)
    return run_job(small_config("gpt_stdlib", *words, *overrides), folder)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_a_rank_that_waits_is_slowed_and_the_step_is_as_long(tmp_path: Path) -> None:
    run = emulated(tmp_path, *TWO, "power.idle_w=20")
    assert run.code == 0
    plan = Plan.from_json((tmp_path / "plan-0.json").read_text())
    assert {rank: point.mhz for rank, point in plan.clocks.items()} == {0: 1000.0, 1: 2000.0}
    assert {(e["rank"], e["wanted_mhz"], e["outcome"]) for e in events(tmp_path, "clock")} == {
        (0, 1000.0, "applied"),
        (1, 2000.0, "applied"),
    }
    # Kernels really take that long: no rank is done before its own are.
    busiest_s = max(cost.busy_s for cost in plan.predicted.ranks.values())
    assert run.summary["predicted"]["pipeline_ms"] >= 1e3 * busiest_s - 0.01
    for line in run.metrics:
        assert line["energy_j"] == pytest.approx(plan.energy_j(1e-3 * line["step_ms"]), rel=1e-6)
        assert line["energy_per_token_j"] == pytest.approx(line["energy_j"] / line["tokens"])


def test_without_operating_points_no_energy_is_counted(tmp_path: Path) -> None:
    run = run_job(small_config("gpt_stdlib", "device=emulated", "emulated.unit_ms=0.5", "steps=2"), tmp_path)
    assert run.code == 0
    assert {line["energy_j"] for line in run.metrics} == {None}
    assert events(tmp_path, "clock") == []


def test_a_loss_changes_clocks(tmp_path: Path) -> None:
    fault = "faults=[{step: 2, rank: 0, phase: backward}]"
    run = emulated(tmp_path, "parallel.dp=2", "parallel.pp=2", "emulated.speeds=[1,1,0.5,0.5]", fault)
    assert run.code == 0
    plan = Plan.from_json((tmp_path / "plan-1.json").read_text())
    assert set(plan.clocks) == {1, 2, 3}
    assert "clocks: " in plan.reason


# --- Clocks outside of the processes


def own_processors() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:2]


def cpufreq(root: Path) -> tuple[str, ...]:
    """Two ranks, each with a processor and the slow operating point for the first."""
    given = own_processors()
    if len(given) < 2:
        pytest.skip("needs two processors")
    make_sysfs(root, max(given) + 1)
    return (
        *TWO, "parallel.ranks_per_host=1", "device=emulated", "emulated.unit_ms=2", "power.actuator=cpufreq",
        f"power.sysfs={root}", f"power.processors=[[{given[0]}],[{given[1]}]]", POINTS,
    )  # fmt: skip


def stand_as_before(root: Path) -> bool:
    return all(limits(root, number) == (LOWEST, HIGHEST) for number in own_processors())


def test_clocks_are_set_for_the_run_and_put_back(tmp_path: Path) -> None:
    root = tmp_path / "cpu"
    words = cpufreq(root)
    run = run_job(small_config("gpt_stdlib", *words, "steps=3"), tmp_path / "run")
    assert run.code == 0
    told = {event["rank"]: event for event in events(run.folder, "clock")}
    assert [(told[rank]["wanted_mhz"], told[rank]["outcome"]) for rank in (0, 1)] == [
        (1000.0, "applied"),
        (2000.0, "applied"),
    ]
    assert stand_as_before(root)
    assert not (run.folder / "clocks").exists()


def test_a_clock_that_may_not_be_set_stops_nobody(tmp_path: Path) -> None:
    root = tmp_path / "cpu"
    words = cpufreq(root)
    for number in own_processors():
        (root / f"cpu{number}" / "cpufreq" / "affected_cpus").write_text("0 1 2 3 4 5 6 7 8 9\n")
    run = run_job(small_config("gpt_stdlib", *words, "steps=2"), tmp_path / "run")
    assert run.code == 0
    assert {event["outcome"] for event in events(run.folder, "clock")} == {"unsupported"}
    assert stand_as_before(root)


class Job:
    """A run in processes of its own, to be killed."""

    def __init__(self, root: Path, run_dir: Path) -> None:
        words = (*SMALL["gpt_stdlib"], *cpufreq(root), "steps=100000")
        command = [sys.executable, "-m", "elaswave_fx.train", "recipe=gpt_stdlib", "eval.every=0"]
        self.root, self.run_dir = root, run_dir
        with (root.parent / "console").open("w") as console:
            self.launcher = subprocess.Popen(
                [*command, *words, f"hydra.run.dir={run_dir}"], stdout=console, stderr=subprocess.STDOUT
            )
        self.wait_for(lambda: len(self.metrics()) >= 2 or self.launcher.poll() is not None)
        assert self.launcher.poll() is None, (root.parent / "console").read_text()
        assert not stand_as_before(root)

    def metrics(self) -> list[str]:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def workers(self) -> dict[int, int]:
        (started,) = events(self.run_dir, "started")
        return {int(rank): pid for rank, pid in started["pids"].items()}

    def children(self) -> set[int]:
        """The workers and the coordinator."""
        path = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children")
        return {int(pid) for pid in path.read_text().split()}

    def wait_for(self, fact: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < end_s, "nothing came of it"
            time.sleep(0.05)

    def end(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGINT)
        self.launcher.wait(WAIT_S)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_after_sigkill_of_a_worker(tmp_path: Path) -> None:
    """Its clock stands as before at once, while the other goes on; that of the other at its end."""
    job = Job(tmp_path / "cpu", tmp_path / "run")
    try:
        os.kill(job.workers()[0], signal.SIGKILL)
        job.wait_for(lambda: limits(job.root, own_processors()[0]) == (LOWEST, HIGHEST))
        before = len(job.metrics())
        job.wait_for(lambda: len(job.metrics()) > before + 2)
        assert not stand_as_before(job.root)
    finally:
        job.end()
    assert stand_as_before(job.root)


@pytest.mark.slow
def test_after_sigkill_of_the_coordinator(tmp_path: Path) -> None:
    job = Job(tmp_path / "cpu", tmp_path / "run")
    try:
        (coordinator,) = job.children() - set(job.workers().values())
        os.kill(coordinator, signal.SIGKILL)
        before = len(job.metrics())
        job.wait_for(lambda: len(job.metrics()) > before + 2)
        assert not stand_as_before(job.root)
    finally:
        job.end()
    assert stand_as_before(job.root)


def test_after_sigkill_of_the_launcher(tmp_path: Path) -> None:
    """The workers end by themselves, and put back what they set."""
    job = Job(tmp_path / "cpu", tmp_path / "run")
    workers = job.workers()
    job.launcher.kill()
    job.launcher.wait(WAIT_S)
    job.wait_for(lambda: not any(alive(pid) for pid in workers.values()))
    assert stand_as_before(job.root)


def test_after_sigkill_of_all_the_next_run_puts_them_back(tmp_path: Path) -> None:
    job = Job(tmp_path / "cpu", tmp_path / "run")
    pids = job.children()
    for pid in (job.launcher.pid, *pids):
        os.kill(pid, signal.SIGKILL)
    job.launcher.wait(WAIT_S)
    job.wait_for(lambda: not any(alive(pid) for pid in pids))
    words = ("device=emulated", "emulated.unit_ms=0.5", "steps=2", f"power.sysfs={job.root}")
    again = run_job(small_config("gpt_stdlib", *words), tmp_path / "run")
    assert again.code == 0
    assert stand_as_before(job.root)
