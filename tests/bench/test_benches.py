"""The benchmarks at tiny sizes: they run, and print and write what is promised. Nothing here looks at a time."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.config.compose import Job
from elaswave_fx.config.faults import Fault, check_faults
from elaswave_fx.train import train
from tests.commands import run
from tests.runs import small_config
from tools.bench.__main__ import main
from tools.bench.convergence import LEAST_STEPS, RANKS, Deviation, WholeRun, check_exact, deviation, failures_of
from tools.bench.gpt_job import FOUR_COLUMNS, tiny
from tools.bench.left_out import train_without
from tools.bench.namespaces import missing
from tools.bench.own_job import OwnJob
from tools.bench.pipeline import check_losses
from tools.bench.processes import BenchFailed
from tools.bench.recovery import DEFAULTS, best_of, entries_of
from tools.bench.recovery_trial import PARTS, Loss, lose, phases
from tools.bench.recovery_trial import parts_of as parts_of_a_loss
from tools.bench.results import Entry, p95, paired, table
from tools.bench.startup import parts_of
from tools.bench.torch_job import Settings
from tools.bench.views import Views

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
needs_torchft = pytest.mark.skipif(
    not HAS_TORCHFT and "CI" not in os.environ, reason="needs torchft, the extra `bench`; fails in CI"
)


def bench(tmp_path: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Standard output and the JSON entries of a benchmark."""
    file = tmp_path / "entries.json"
    done = run("tools.bench", *arguments, "--json", str(file), timeout=900)
    assert done.returncode == 0, done.stderr
    assert "measuring" in done.stderr
    written = json.loads(file.read_text())
    assert written["bench"] == arguments[0] and written["machine"] and "tools.bench" in written["command"]
    entries = written["entries"]
    assert all({"name", "ratio", "ours", "peer", "unit", "runs"} <= entry.keys() for entry in entries)
    return done.stdout, entries


def refused(*arguments: str) -> str:
    done = run("tools.bench", *arguments)
    assert done.returncode == 2
    return done.stderr


def test_percentile_and_pairs() -> None:
    assert p95(list(range(1, 21))) == 19 and p95([3.0]) == 3.0
    entry = paired("x", [1.0, 2.0, 4.0], [2.0, 8.0, 12.0], "ms", target=3.0)
    assert (entry.ratio, entry.ours, entry.peer, entry.ours_p95, entry.runs) == (3.0, 2.0, 8.0, 4.0, 3)
    assert "3.00x" in table([entry]) and "p95" in table([entry])
    assert table([Entry("y", 1.0, 1.0, 1.0, "ms", 1, parts={"plan": 0.5})]).endswith("y: plan 0.500 ms")


@pytest.mark.parametrize(("ranks", "lost"), [(4, 0), (4, 3), (8, 5), (32, 16)])
def test_views_after_a_loss_hold_every_survivor_once(ranks: int, lost: int) -> None:
    before = Views.first(ranks, depth=2)
    after = before.less(lost)
    survivors = sorted(set(range(ranks)) - {lost})
    assert list(after.world) == survivors
    assert sorted(rank for stage in after.stages for rank in stage) == survivors
    assert sorted(rank for pipeline in after.pipelines for rank in pipeline) == survivors
    # One stage is narrower and one pipeline takes the rest of the broken one, however many there are.
    assert len(after.changed(before)) == 2


def test_communicator_edit(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "communicator_edit", "--ranks", "4", "--repeats", "1")
    assert [entry["name"] for entry in entries] == [
        "4 ranks, gloo full rebuild", "4 ranks, gloo partial", "4 ranks, gloo partial, without the world",
    ]  # fmt: skip
    assert set(entries[0]["parts"]) == {"notice", "report", "plan", "store", "activate", "install", "exchange"}
    assert all(seconds >= 0 for seconds in entries[0]["parts"].values())
    assert sum(entries[0]["parts"].values()) == pytest.approx(entries[0]["ours"])
    assert "4 ranks: links opened 0, bytes between ranks " in shown
    assert re.search(r"4 ranks: [\d.]+ ms, [\d.]+ ms of it after the last answer; gloo's full rebuild takes", shown)


def test_messages(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "messages", "--tiny", "--repeats", "1")
    sizes, sides, skipped = 3, 2, "800 Mbit/s: skipped, " in shown
    behind = entries[sizes * sides :]
    assert [entry["name"] for entry in behind] == [
        "64 KB behind 8 MB, shm", "64 KB behind 8 MB, tcp", "64 KB behind 8 MB, 800 Mbit/s",
    ][: 2 if skipped else 3]  # fmt: skip
    assert all(entry["ours"] > 0 < entry["peer"] for entry in entries)
    assert [entry["target"] for entry in entries[: sizes * sides]] == [None] * 4 + [1.3, 1.0]
    assert "tcp: alone " in shown
    assert re.search(r"1 MB: socket [\d.]+ ms, ours [\d.]+ ms, gloo [\d.]+ ms", shown)


@pytest.mark.slow
def test_pipeline(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "pipeline", "--tiny", "--repeats", "1")
    widths, depths, links = 2, 2, 2
    assert len(entries) == widths * depths * links
    assert [entry["target"] for entry in entries] == [1.3, None] * depths + [1.0, None] * depths
    assert "4 ranks, 1 x 4, micro-batches of 1" in shown


def test_losses_that_differ_fail_the_pipeline_benchmark() -> None:
    check_losses({"ours": [5.5, 5.1], "peer": [5.5, 5.10005]})
    with pytest.raises(BenchFailed, match=r"losses of step 1 differ: ours 5\.100000, peer 5\.100200"):
        check_losses({"ours": [5.5, 5.1], "peer": [5.5, 5.1002]})
    with pytest.raises(BenchFailed, match="step 0"):
        check_losses({"ours": [5.5], "peer": [float("nan")]})


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    _, entries = bench(tmp_path, "startup", "--tiny", "--repeats", "1")
    cold, warm, memory = entries
    assert (cold["peer"], warm["peer"], memory["unit"]) == (12.0, 6.0, "MiB")
    for entry in entries:
        assert entry["ratio"] == pytest.approx(entry["peer"] / entry["ours"])
    assert sum(cold["parts"].values()) == pytest.approx(cold["ours"]) and cold["parts"]["capture and passes"] > 0
    assert warm["parts"]["capture and passes"] == 0, "the cache of the cold start is used"
    assert sum(memory["parts"].values()) == pytest.approx(memory["peer"])


def test_planner(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "planner", "--tiny", "--repeats", "1")
    assert [(entry["name"], entry["unit"], entry["peer"]) for entry in entries] == [
        ("16 ranks, every part", "ms", 20.0), ("16 ranks, every part, bounded", "ms", 20.0),
        ("16 ranks, after a loss", "ms", 20.0), ("16 ranks, after a loss, bounded", "ms", 20.0),
    ]  # fmt: skip
    assert all(entry["ratio"] == pytest.approx(entry["peer"] / entry["ours"]) for entry in entries)
    assert "not timed: the independent checker" in shown


def test_shards(tmp_path: Path) -> None:
    """Two jobs; what both sides move is about the same, and messages are more where boxes are dealt in turn."""
    _, entries = bench(tmp_path, "shards", "--tiny")
    moved, longest, messages = entries
    assert [entry["unit"] for entry in entries] == ["MiB", "MiB", "messages"]
    assert 0 < longest["parts"]["mean"] <= moved["parts"]["mean"]
    assert 0.5 < moved["parts"]["mean of the peer"] / moved["parts"]["mean"] < 2
    assert messages["ratio"] > 1.2


def test_parts_of_a_start_are_read_off_what_it_prints() -> None:
    said = [
        (12.0, "building"),
        (16.0, "program captured: 14 units of 5 kinds (data 0.2 s, model 0.1 s, capture and passes 2.5 s)"),
        (16.0, "plan: 2 x 2 columns; slowest stage 1.06 ms per micro-batch"),
        (16.5, "starting 4 ranks; logs in run/logs"),
    ]
    assert parts_of(said, began=10.0, first=17.5) == pytest.approx(
        {
            "interpreter and imports": 2.0, "data": 0.2, "model": 0.1, "capture and passes": 2.5, "measuring": 0.0,
            "plan": 1.2, "fork": 0.5, "links, engine, first step": 1.0,
        }
    )  # fmt: skip


@pytest.mark.slow
def test_copies(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "copies", "--tiny", "--repeats", "1")
    assert [entry["unit"] for entry in entries] == ["ms"] * 5 + ["MiB"] * 2
    # A record is a third of the state in fp32, a sixth in bf16; what is beside it is small even in a tiny model.
    fp32, bf16 = (entry["ratio"] for entry in entries[5:])
    assert 2.8 < fp32 < 3.2 and 5.6 < bf16 < 6.4
    assert "bytes of copies per parameter and step" in shown and "more than without copies" in shown


@pytest.mark.slow
def test_exact(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "exact", "--tiny", "--repeats", "1")
    assert [entry["name"] for entry in entries[:2]] == ["16 tokens: granules of 1", "16 tokens: granules of 2"]
    assert entries[2]["name"].startswith("16 tokens, each at its best: granules of ")
    assert [entry["target"] for entry in entries[:4]] == pytest.approx([1 / 1.1, 1 / 1.1, 1 / 1.25, 1 / 1.05])
    assert entries[3]["unit"] == "x" and 16 / 3 / 4 <= entries[3]["peer"] <= 1.501, "at most six granules after four"
    for gradients, everything in (entries[4:6], entries[6:8]):
        assert gradients["ratio"] == 0.5 and gradients["unit"] == "MiB"
        # All is gradients and parameters, as many of both in the default mode; a tiny model's votes are beside them.
        assert 1 / 1.5 <= everything["ratio"] < 0.7
    assert "granules to do for 4 are 1." in shown and "memory of a parameter on each rank +4.0 bytes" in shown


@pytest.mark.slow
@needs_torchft
def test_steady(tmp_path: Path) -> None:
    _, entries = bench(tmp_path, "steady", "--tiny", "--repeats", "1")
    assert [entry["name"] for entry in entries] == [
        "ours: all on, against off", "ours: copies alone, against off", "TorchFT, against DDP",
        "ours: all on, against DDP",
    ]  # fmt: skip


@pytest.mark.slow
@needs_torchft
def test_recovery(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "recovery", "--tiny", "--repeats", "1", "--settings", "4")
    assert [entry["name"].rsplit(": ", 1)[1] for entry in entries] == ["median", "p95", "worst"] * 2
    told = ["told"] * 3 + ["untold"] * 3
    for entry, word in zip(entries, told, strict=True):
        assert entry["name"].startswith(f"{word}, TorchFT best: heartbeat 500, join 100")
    assert set(entries[0]["parts"]) == set(entries[3]["parts"]) == set(PARTS)
    for entry in (entries[0], entries[3]):
        assert entry["parts"]["detect"] >= 0 and sum(entry["parts"].values()) == pytest.approx(entry["ours"])
    assert "what TorchFT's lighthouse waited for last" in shown and "0 of 1" in shown
    assert "SIGSTOP: " in shown and "links down: " in shown


@pytest.mark.slow
def test_convergence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "convergence.svg"
    shown, entries = bench(tmp_path, "convergence", "--tiny", "--precision", "bf16", "--plot", str(picture))
    assert [entry["name"] for entry in entries] == [
        "bf16, default against lab.reshard_rng=false", "bf16, default against a smaller batch",
    ]  # fmt: skip
    assert all(entry["ratio"] > entry["target"] == pytest.approx(1 / 0.22) for entry in entries)
    assert re.search(r"exact=true +0\.0 +0\.0 +0\.0 +0\.0 +100 % +100 %", shown)
    assert "about 78 % lower" in shown and picture.stat().st_size > 0


def test_failures_of_a_seed_are_two_ranks_apart_in_time() -> None:
    for seed in range(20):
        first, second = failures_of(seed, LEAST_STEPS)
        assert first.rank != second.rank and second.step - first.step > LEAST_STEPS // 6
        check_faults((first, second), RANKS, LEAST_STEPS)
    assert failures_of(3, 120) == failures_of(3, 120) != failures_of(4, 120)


def test_a_deviation_counts_from_the_first_failure() -> None:
    found = deviation(WholeRun((3.0, 2.0, 1.0), 1.5), WholeRun((3.0, 2.5, 0.0), 1.25), first=1)
    assert found == Deviation((0.0, 0.5, 1.0), 0.75, 0.25)
    check_exact("fp32", [Deviation((0.0, 0.0), 0.0, 0.0)])
    with pytest.raises(BenchFailed, match="fp32, seed 1: exact=true deviates by 1"):
        check_exact("fp32", [Deviation((0.0,), 0.0, 0.0), found])


def test_samples_that_are_left_out_count_for_nothing(tmp_path: Path) -> None:
    config = small_config("gpt_stdlib", "steps=4", "parallel.dp=2", "parallel.pp=1")
    work = partial(train_without, (Fault(step=2, rank=1),))
    assert train(Job(config, tmp_path, {}, ()), work) == 0
    tokens = config.global_batch * config.seq_len
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [tokens, tokens, tokens // 2, tokens // 2]


def a_loss(recovery_s: float, parts: float | None = None, signal_s: float = 0.0) -> Loss:
    """One in the middle of a step of 50 ms, all of whose parts are equal."""
    return Loss(recovery_s, 0.05, 0.5, signal_s, dict.fromkeys(PARTS, parts) if parts is not None else {})


class FakeJob:
    """Ranks that commit every 10 ms; without rank 2, 50 ms after the signal."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.reports, self.lost_s, self.began_s = ranks, 0, 0.0, time.monotonic()

    def strike(self, pid: int, others: Sequence[int]) -> None:
        assert (pid, list(others)) == (102, [100, 101, 103])
        self.lost_s = time.monotonic()

    def hear(self, kind: str, timeout_s: float = 0.0) -> dict[str, Any]:
        """Reports of all ranks, step by step; after the signal one more step of all, which was under way."""
        step, rank = divmod(self.reports, self.ranks)
        self.reports += 1
        at_s = self.began_s + 0.01 * step
        if not self.lost_s or at_s <= self.lost_s + 0.01:
            return {"rank": rank, "pid": 100 + rank, "at_s": at_s, "ranks": self.ranks, "epoch": 0}
        return {"rank": 3, "pid": 103, "at_s": self.lost_s + 0.05, "ranks": 3, "epoch": 1}


def test_a_loss_is_timed_from_the_signal_to_a_commit_without_the_victim() -> None:
    job = FakeJob(ranks=4)
    loss = lose(job, 4, victim=2, phase=0.5, inject_fault=job.strike)
    assert loss.normal_s == pytest.approx(0.01)
    assert loss.recovery_s == pytest.approx(0.05 - 0.01, abs=5e-3), "the step that all were in does not count"


def test_the_parts_of_a_loss_count_from_the_signal_by_one_clock() -> None:
    moments_s = {"detected": 100.003, "stopped": 100.005, "agreed": 100.009, "planned": 100.009, "resumed": 100.050}
    more: dict[str, dict[str, Any]] = {"planned": {"plan_ms": 1.0}}
    events: list[dict[str, Any]] = [
        {"kind": kind, "epoch": 0 if kind == "detected" else 1, "at_s": at_s, **more.get(kind, {})}
        for kind, at_s in moments_s.items()
    ]
    events += [{"kind": "edited", "epoch": 1, "at_s": 100.02, "ms": 4.0}]
    events += [{"kind": "transferred", "epoch": 1, "at_s": 100.02, "ms": 2.0}]
    parts = parts_of_a_loss(events, a_loss(0.030, signal_s=100.0))
    wanted = {"detect": 3, "abort": 2, "agree": 3, "plan": 1, "edit": 4, "transfer": 2, "redo": 15}
    assert {name: 1e3 * seconds for name, seconds in parts.items()} == pytest.approx(wanted)
    assert parts_of_a_loss([event for event in events if event["kind"] != "detected"], a_loss(0.030)) == {}


def test_the_events_of_a_run_have_the_clock_of_whoever_times_it() -> None:
    began_s = time.monotonic()
    with OwnJob(tiny(FOUR_COLUMNS).config()) as job:
        loss = lose(job, 4, victim=2, phase=0.5)
        at_s = {event["kind"]: event["at_s"] for event in job.events(until="resumed")}
    moments = [began_s, at_s["started"], loss.signal_s, at_s["detected"], at_s["stopped"], at_s["agreed"]]
    moments.append(loss.signal_s + loss.recovery_s + loss.normal_s)
    assert moments == sorted(moments), "started, signal, detected, stopped, agreed, the first commit after it"


def test_points_are_spread_evenly_over_a_step() -> None:
    assert phases(4) == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.slow
def test_executor(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "executor", "--tiny", "--repeats", "2")
    assert [entry["name"] for entry in entries] == ["width 64, 32 tokens", "width 64, 32 tokens, inductor"]
    assert [entry["target"] for entry in entries] == [2.5, 1.0]
    assert "outside of kernels" in shown and "GFLOP/s" in shown


def test_a_setting_that_failed_is_not_the_best_and_its_failures_are_left_out() -> None:
    own = [a_loss(0.1, parts=0.01), a_loss(0.2, parts=0.01)]
    short, safe = Settings(heartbeat_timeout=100), Settings(heartbeat_timeout=900)
    peers: dict[Settings, list[Loss | None]] = {
        DEFAULTS: [a_loss(5.0)] * 2, short: [None, a_loss(0.2)],
        safe: [a_loss(0.3), a_loss(1.0)],
    }  # fmt: skip
    assert best_of(peers) == safe
    defaults, failed, *best = entries_of({"told": own}, peers)
    assert (defaults.runs, defaults.target, round(defaults.ratio, 1)) == (2, 50.0, 33.3)
    assert failed.name.startswith("told, TorchFT other: heartbeat 100") and failed.name.endswith("(1 failed): median")
    assert failed.target is None
    assert [(entry.name.rsplit(" ", 1)[1], entry.target) for entry in best] == [
        ("median", 2.0), ("p95", 5.0), ("worst", None),
    ]  # fmt: skip
    assert best[1].ratio == pytest.approx(1.0 / 0.2), "of the distributions, not of single runs"
    assert best_of({short: peers[short]}) is None
    untold = entries_of({"untold": own}, peers)
    assert [entry.target for entry in untold] == [None, None, 1.0, 2.5, None]


@pytest.mark.skipif(HAS_TORCHFT, reason="torchft is installed")
@pytest.mark.parametrize("name", ["steady", "recovery"])
def test_a_missing_peer_is_named(name: str) -> None:
    assert "torchft 0.2.0 is not installed" in refused(name, "--tiny", "--repeats", "1")


def test_options_that_a_benchmark_does_not_take_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ranks: executor does not take it" in refused("executor", "--ranks", "4")

    def refused_here(*words: str) -> str:
        with pytest.raises(SystemExit) as left:
            sys.exit(main(words))
        assert left.value.code == 2
        return capsys.readouterr().err

    assert "--resident-gb: steady does not take it" in refused_here("steady", "--resident-gb", "1")
    assert "--settings 0,9: there are 8, 0 to 7" in refused_here("recovery", "--settings", "0,9", "--tiny")
    assert "sizes are even and at least 4" in refused_here("communicator_edit", "--ranks", "3")
    assert "--steps 23: two failures need at least 24" in refused_here("convergence", "--steps", "23")
    assert "precision=fp23: must be one of fp32, bf16" in refused_here("convergence", "--precision", "bf16,fp23")
    assert "x.wav cannot be drawn; suffixes are " in refused_here("convergence", "--plot", "x.wav")
    assert "--plot /nowhere/x.png: no such folder /nowhere" in refused_here("convergence", "--plot", "/nowhere/x.png")
    assert "must be at least 1" in refused_here("communicator_edit", "--repeats", "0")


@pytest.mark.slow
def test_policies(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "policies", "--tiny")
    names = [entry["name"].removeprefix("2x2, m=2, ") for entry in entries]
    assert names[:4] == [
        "undisturbed: against 1f1b",
        "0 lost: as predicted",
        "1 lost: as predicted",
        "1 lost: proportional",
    ]
    rivals = ("recycle", "drop_replica", "smaller_batch", "restart", "ours without graph")
    assert {f"1 lost: {rival}" for rival in rivals} <= set(names)
    assert "1 lost, drop_replica: " in shown and "the hurt lanes leave" in shown
    (took_ms,) = re.findall(r"1 lost, smaller_batch: (\d+) ms for 8 of 16 samples", shown)
    (compared,) = (entry for entry in entries if entry["name"].endswith("1 lost: smaller_batch"))
    assert compared["peer"] == pytest.approx(2 * int(took_ms), abs=2), "the time of as many samples"
    assert "--only 5x5: no case has this in its name; there are 4x4, m=4; " in refused("policies", "--only", "5x5")
    assert refused("policies", "--ranks", "4").strip().endswith("--ranks: policies does not take it")


def test_goals(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "goals", "--tiny")
    assert [(entry["name"], entry["target"]) for entry in entries] == [
        ("2x2, m=2, 1 lost, background: proportional", 0.95), ("2x2, m=2, 1 lost, blocking: proportional", None),
        ("2x2, m=2, 1 lost, never: proportional", None), ("2x2, m=2, 1 lost, background: blocking", 1.0),
        ("2x2, m=2, 1 lost, background: never", 1.0),
    ]  # fmt: skip
    assert all(entry["ours"] > 0 and entry["peer"] > 0 for entry in entries)
    lost = re.findall(r"epoch 1, \d+ steps, the first \d+ ms, then \d+ \(\d+ ms predicted\): lost rank 3; ", shown)
    assert len(lost) == 3, "every mode has had its loss"
    assert "--only 5x5: no case has this in its name; there are 4x4, m=16; 2x8, m=32" in refused(
        "goals", "--only", "5x5"
    )


@pytest.mark.slow
def test_slow(tmp_path: Path) -> None:
    _, entries = bench(tmp_path, "slow", "--tiny")
    less, proportional, before, overloaded = entries
    assert 10 < less["ours"] <= 30 and proportional["ours"] < before["peer"]
    assert overloaded["peer"] == 1.0 and overloaded["name"].startswith("plans of 20 steps")


def test_join(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "join", "--tiny")
    (stops,) = entries
    assert stops["ours"] == pytest.approx(sum(stops["parts"].values())) and stops["peer"] > 40
    assert re.search(r"2 ranks: from the command to the first step with 3: \d+\.\d\d s \(process and number ", shown)
    assert "planned within the stops: epoch 1 " in shown


@pytest.mark.slow
def test_switch(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "switch", "--tiny")
    half, restart = entries
    assert half["runs"] == 4 and half["ours"] == restart["ours"] and restart["peer"] > 100
    assert set(half["parts"]) == {"2x1 to 1x2", "1x2 to 2x1"}
    assert "2 ranks, 2x1 to 1x2: a reshape " in shown


@pytest.mark.slow
@pytest.mark.skipif(missing(("ip", "tc")) is not None, reason=f"no hosts of their own: {missing(('ip', 'tc'))}")
def test_migration(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "migration", "--tiny")
    stall, longest = entries
    case = "3x1 to 4x1, width 16"
    assert stall["name"] == f"{case}: exposed stall, background against blocking" and stall["target"] == 5.0
    assert longest["ours"] >= 1.0 and longest["peer"] == 2.0
    for mode in ("background", "blocking"):
        assert re.search(rf"{case}, {mode}: [\d.]+ MB in stops, [\d.]+ MB behind steps; ", shown)


@pytest.mark.slow
def test_frequency(tmp_path: Path) -> None:
    shown, entries = bench(tmp_path, "frequency", "--tiny", "--repeats", "1")
    names = [entry["name"] for entry in entries]
    assert names[:2] == ["1x2, m=2, 600 W: a step", "1x2, m=2, 600 W: a sample"] and len(names) == 4
    assert all(entry["ours"] > 0 and entry["peer"] > 0 for entry in entries)
    assert "fixed: clocks: 1500 MHz on ranks 0-1; they draw 600 W at most" in shown and "of 600 W at most" in shown
