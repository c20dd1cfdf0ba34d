"""The launcher with workers that compute nothing: every way in which a run can end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaswave_fx.config.faults import Fault
from elaswave_fx.control.coordinator import service
from elaswave_fx.control.coordinator.plan_cache import Held, Joiners, Planned
from elaswave_fx.control.store import file_store
from elaswave_fx.errors import ConfigError, DataError
from elaswave_fx.files import json_lines
from elaswave_fx.launch import coordination, local
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.launch.local import launch
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.worker.worker import listen_for_peers
from tests.control.toy_job import ToyPlanning
from tests.launch.fake_job import broken_builder, job, refusing_builder, three_free_ports
from tests.waiting import WAIT_S

ROOT = Path(__file__).resolve().parents[2]

METRICS = {
    "step", "loss", "tokens", "step_ms", "epoch", "world_size", "lr", "grad_norm", "tokens_per_s", "memory_peak_mb",
    "energy_j", "energy_per_token_j", "samples",
}  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def started_pids(run_dir: Path) -> list[int]:
    (started,) = (event for event in lines_of(run_dir / "events.jsonl") if event["kind"] == "started")
    return list(started["pids"].values())


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_run_that_ends_well_leaves_all_its_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(job(tmp_path, ranks=4)) == 0
    metrics = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert all(set(line) == METRICS for line in metrics)
    # Times and memory are the slowest and the fullest rank's; NaN is not JSON.
    assert metrics[1] == {
        "step": 1, "loss": 1.0, "tokens": 64, "step_ms": 4.0, "epoch": 0, "world_size": 4, "lr": 1e-3,
        "grad_norm": None, "tokens_per_s": 16000.0, "memory_peak_mb": 40.0,
        "energy_j": None, "energy_per_token_j": None, "samples": 12,
    }  # fmt: skip
    summary = summary_of(tmp_path)
    assert summary["steps"] == 5
    assert (summary["loss_first"], summary["loss_last"]) == (2.0, 0.4)
    assert (summary["samples_seen"], summary["samples_duplicated"], summary["samples_skipped"]) == (60, 0, 0)
    assert (summary["params_digest"], summary["recoveries"], summary["outcome"]) == ("00ff", [], "completed")
    assert summary["ports"] == [9000, 9001, 9002, 9003]
    assert summary["host_ids"] == ["host-0", "host-0", "host-1", "host-1"]
    assert json.loads((tmp_path / "plan-0.json").read_text())["members"] == [0, 1, 2, 3]
    ledger = lines_of(tmp_path / "ledger.jsonl")
    assert [(line["step"], line["weight_sum"]) for line in ledger] == [(step, 12.0) for step in range(5)]
    assert not (tmp_path / "control" / "job.json").exists(), "the token does not outlive the job"
    assert lines_of(tmp_path / "eval.jsonl") == [{"step": 5, "loss": 0.25, "count": 100}]
    assert [event["kind"] for event in lines_of(tmp_path / "events.jsonl")] == ["planned", "started", "finished"]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "builder.log", "console.log", "coordinator.log", "rank-0.log", "rank-1.log", "rank-2.log", "rank-3.log",
    }  # fmt: skip
    out = capfd.readouterr().out
    assert "built it" in out
    log = (tmp_path / "logs" / "console.log").read_text()
    assert all(f"rank {rank} pid {pid}" in log for rank, pid in enumerate(started_pids(tmp_path)))
    assert [line.split(" ", 2)[2] for line in log.splitlines() if "workers: " not in line] == out.splitlines()
    assert "5 steps: loss 2.0000 -> 0.4000, held-out 0.2500" in out.splitlines()[-1]


def test_a_second_run_in_the_same_directory_starts_afresh(tmp_path: Path) -> None:
    assert launch(job(tmp_path, ranks=3, steps=4)) == 0
    assert launch(job(tmp_path, ranks=1, steps=2)) == 0
    assert [line["world_size"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 1]
    assert not (tmp_path / "logs" / "rank-2.log").exists()


@pytest.mark.parametrize(
    ("modes", "reason", "shown"),
    [
        ({1: "dies at start"}, "rank 1: RuntimeError: no such device: npu:7", "in at_start"),
        ({2: "raises"}, "rank 2: ValueError: bad value in rank 2", "in in_step"),
        ({0: "loses 1", 1: "raises later"}, "rank 1: ValueError: the cause", "in in_step"),
        (
            {0: "killed", 1: "killed", 2: "killed"},
            "rank 2: killed by SIGKILL (by someone, or by the system when memory ran out)",
            "rank was here",
        ),
        ({1: "killed at start"}, "rank 1: killed by SIGKILL (by someone, or", None),
    ],
)
def test_a_failure_ends_the_run(
    modes: dict[int, str], reason: str, shown: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that says why it cannot go on, the loss of all, and of one before the job has begun."""
    assert launch(job(tmp_path, ranks=3, modes=modes)) == 1
    err = capfd.readouterr().err
    if len(modes) < 3:  # else whoever is noticed first
        assert err.splitlines()[-1].startswith(f"error: {reason}")
    (line,) = err.splitlines()
    found = re.fullmatch("(.*?)(?:; (?:the traceback is|its last words are) in (.*))?", line)
    assert found is not None
    said, place = found.groups()
    assert place is None if shown is None else shown in Path(place).read_text()
    summary = summary_of(tmp_path)
    assert summary["outcome"] == "failed" and summary["reason"].split(": ")[1:] == said.split(": ")[2:]
    assert summary["steps"] == (0 if "start" in str(modes) else 3)
    if len(modes) < 3:
        kinds = [event["kind"] for event in lines_of(tmp_path / "events.jsonl")]
        assert "agreed" not in kinds and "left" not in kinds, "a run that fails is not recovered"


@pytest.mark.parametrize(
    ("victim", "mode", "cause"),
    [
        (0, "killed", "rank 0: killed by SIGKILL (by someone, or by the system when memory ran out)"),
        (1, "crashes", "rank 1: killed by SIGABRT"),
        (2, "leaves", "rank 2: exited before its work was done"),
    ],
)
def test_a_lost_worker_is_gone_on_without(
    victim: int, mode: str, cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(job(tmp_path, ranks=4, steps=40, pause_s=0.005, modes={victim: mode})) == 0
    summary = summary_of(tmp_path)
    assert (summary["outcome"], summary["steps"]) == ("completed", 40)
    assert (summary["samples_seen"], summary["samples_duplicated"], summary["samples_skipped"]) == (480, 0, 0)
    metrics = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(40))
    assert (metrics[0]["world_size"], metrics[-1]["world_size"]) == (4, 3)
    (recovery,) = summary["recoveries"]
    assert recovery["cause"] == cause and recovery["ranks"] == [victim] and recovery["rank"] == victim
    assert (recovery["step"], recovery["epoch"]) == (3, 1)
    # One that is gone at once may be at step 3 before the others have committed step 2, which are rolled forward then.
    assert recovery["steps_redone"] in (0, 1)
    assert (recovery["edit_ms"], recovery["transfer_ms"], recovery["bytes_moved"]) == (1.0, 2.0, 3)
    assert all(recovery[part] is not None for part in ("detect_ms", "plan_ms", "mttr_ms"))
    kinds = [event["kind"] for event in lines_of(tmp_path / "events.jsonl")]
    assert {"left", "detected", "agreed", "planned", "resumed"} <= set(kinds)
    out = capfd.readouterr().out
    others = ", ".join(str(rank) for rank in range(4) if rank != victim)
    # How a process ended may be known only after the others have resumed, and is a line of its own then.
    line = rf"^epoch 1: rank {victim} failed \(.+\); resumed at step 3 on ranks {others} in \d+ ms$"
    assert re.search(line, out, re.M) and cause.removeprefix(f"rank {victim}: ") in out
    assert "epoch 1: planned in" not in out and "epoch 1: planned in" in (tmp_path / "logs" / "console.log").read_text()


class SlowPlanning(ToyPlanning):
    """Takes long over a plan for which everybody waits."""

    def replan(
        self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
        joiners: Joiners | None = None,
    ) -> Planned:  # fmt: skip
        time.sleep(1.5 * HUNG_S)
        return super().replan(before, members, held, like)


HUNG_S = 3.0


def test_a_coordinator_that_plans_for_long_is_not_taken_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "HUNG_S", HUNG_S)
    monkeypatch.setattr(service, "ALIVE_S", HUNG_S / 5)
    spec = job(tmp_path, ranks=4, steps=40, pause_s=0.005, modes={1: "killed"})
    assert launch(replace(spec, planning=SlowPlanning())) == 0
    (recovery,) = summary_of(tmp_path)["recoveries"]
    assert recovery["plan_ms"] > 1e3 * HUNG_S and recovery["ranks"] == [1]
    kinds = {event["kind"] for event in lines_of(tmp_path / "events.jsonl")}
    assert "coordinator" not in kinds, "it was not ended, and no other was started"


@pytest.mark.parametrize(("mode", "version"), [("checkpoint", 3), ("checkpoint fails", 0)])
def test_a_rollback_may_lead_to_checkpoints_that_are_whole(mode: str, version: int, tmp_path: Path) -> None:
    assert launch(job(tmp_path, steps=60, pause_s=0.01, modes={0: mode})) == 0
    register = file_store.FileStore(tmp_path).read()
    assert register.checkpoint.version == version


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_fault_fires_and_is_recovered_from(kind: str, tmp_path: Path) -> None:
    fault = Fault(step=5, rank=1, kind=kind, phase="forward")
    assert launch(job(tmp_path, ranks=4, steps=12, pause_s=0.005, faults=(fault,))) == 0
    (recovery,) = summary_of(tmp_path)["recoveries"]
    assert recovery["cause"] == f"{kind} in step 5, phase forward" and recovery["step"] == 5
    events = lines_of(tmp_path / "events.jsonl")
    times = {event["kind"]: event["t_ms"] for event in reversed(events)}
    assert "fault" in times, "when it was read"
    assert times["detected"] <= times["agreed"] <= times["resumed"]


def test_a_fault_that_never_fires_fails_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fault = Fault(step=2, rank=1, kind="kill", phase="gather")
    assert launch(job(tmp_path, ranks=2, modes={1: "fails to fail"}, faults=(fault,))) == 1
    reason = "faults: the kill of rank 1 in step 2, phase gather never fired"
    assert capfd.readouterr().err.splitlines()[-1] == f"error: {reason}"
    assert summary_of(tmp_path)["reason"] == reason


def test_too_few_ranks_fail_the_run_with_the_planners_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(job(tmp_path, ranks=3, steps=4000, modes={2: "killed"}, least=3)) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: rank ") and "PlanError: 2 ranks are too few; 3 would do; the traceback is in" in last


def test_a_ledger_that_misses_a_step_fails_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "json_lines", lambda path: json_lines(path)[1:])
    assert launch(job(tmp_path)) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: ledger: step 0 has 0 lines")


def test_what_the_user_can_mend_comes_as_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device=npu: no device answers"):
        launch(job(tmp_path, modes={1: "config error"}))
    assert summary_of(tmp_path)["outcome"] == "failed"


def test_a_builder_that_refuses_comes_as_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give at least one"):
        launch(job(tmp_path, builder=refusing_builder))
    assert summary_of(tmp_path)["steps"] == 0
    assert not (tmp_path / "plan-0.json").exists()
    assert "refusing_builder" in (tmp_path / "logs" / "builder.log").read_text()


def test_a_builder_that_breaks_leaves_its_traceback_in_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(job(tmp_path, builder=broken_builder)) == 1
    err = capfd.readouterr().err
    log = tmp_path / "logs" / "builder.log"
    assert err == f"error: builder: KeyError: 'layer9'; the traceback is in {log}\n"
    assert "in broken_builder" in log.read_text()


def test_workers_that_leave_steps_undone_fail_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(job(tmp_path, steps=5, short=True)) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "error: the workers ended after 4 of 5 steps"


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    port = three_free_ports() + 1
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=rf"launch.port={port - 1}: port {port} \(rank 1\) is busy; nearest valid"),
    ):
        launch(job(tmp_path / "run", ranks=2, port=port - 1))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="launch.port=65535: 2 ranks need ports 65535 to 65536; nearest valid: 65534"):
        launch(job(tmp_path, ranks=2, port=65535))


def test_an_unwritable_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        launch(job(tmp_path / "file" / "run"))


def test_a_busy_control_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=f"launch.control_port={port}: .*another process has the port.*0 for any"):
            launch(replace(job(tmp_path / "run"), control_port=port))
    port = three_free_ports()
    ranks = job(tmp_path / "run", ranks=2, port=port)
    taken = f"launch.control_port={port + 1}: rank 1 listens on it; nearest valid: {port + 2}, or 0"
    with pytest.raises(ConfigError, match=taken):
        launch(replace(ranks, control_port=port + 1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("0.0.0.0", "is no address that others can dial"),
        ("2001:db8::1", "is no address of this machine"),
        ("nowhere.invalid", "cannot be resolved"),
    ],
)
def test_a_host_that_is_not_this_machine_is_refused(host: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^launch.host={host}: .*{why}.*nearest valid: 127.0.0.1$"):
        launch(replace(job(tmp_path / "run"), host=host))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace of its own takes root")
def test_a_machine_that_does_not_reach_itself_is_refused_at_once(tmp_path: Path) -> None:
    words = "from elaswave_fx.launch.ports import check_host; check_host('127.0.0.1')"
    ended = subprocess.run(["unshare", "-n", sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True)
    last = ended.stderr.splitlines()[-1]
    if "unshare failed" in last:
        pytest.skip(last)
    assert "ConfigError: launch.host=127.0.0.1: ranks cannot reach each other there" in last
    assert "(Network is unreachable)" in last


def test_a_port_that_is_taken_after_the_launcher_has_looked_is_the_users_to_mend(tmp_path: Path) -> None:
    port = three_free_ports()

    def listen(context: WorkerContext) -> None:
        with contextlib.ExitStack() as others:
            if context.rank == 1:
                others.enter_context(socket.create_server(("127.0.0.1", context.port)))
            options = {"token": "t" * 32, "listen_host": "127.0.0.1", "port": context.port}
            ends = [listen_for_peers(context, rank=context.rank, **options)]
            time.sleep(WAIT_S)
            assert ends

    why = f"^launch.port={port}: rank 1: .*cannot listen on .*{port + 1}.*; another process has taken the port"
    with pytest.raises(ConfigError, match=why):
        launch(replace(job(tmp_path, ranks=2, port=port), worker=listen))


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_a_host_may_have_an_address_of_the_newer_kind_or_a_name(host: str, tmp_path: Path) -> None:
    spec = job(tmp_path, ranks=4, steps=40, pause_s=0.005, modes={1: "killed"})
    assert launch(replace(spec, host=host)) == 0
    assert [recovery["rank"] for recovery in summary_of(tmp_path)["recoveries"]] == [1]
