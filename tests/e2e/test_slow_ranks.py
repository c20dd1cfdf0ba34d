"""A rank that becomes slow gets less work while training goes on: nothing is done again, and the bits are those of one
rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.config.compose import Job
from elaswave_fx.config.keys import Config
from elaswave_fx.control.protocol import probation, speed_meter
from elaswave_fx.launch.job import WorkerContext
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.train import train
from elaswave_fx.worker.loop import run_worker
from tests.runs import Run, run_job, small_config

STEPS, SLOW_FROM = 240, 3


def with_the_bits_of_one_rank(folder: Path, steps: int, slow: str) -> Run:
    """A run on three ranks, of which rank 1 is slow; nothing was lost, and its bits are those of one rank."""
    words = ("exact=true", f"steps={steps}", "global_batch=12", "eval.every=0")
    alone = run_job(small_config("gpt_stdlib", *words), folder / "alone")
    fault = f"faults=[{{step: {SLOW_FROM}, rank: 1, kind: slow, {slow}}}]"
    run = run_job(small_config("gpt_stdlib", *words, "parallel.dp=3", "parallel.pp=1", fault), folder / "run")
    assert (alone.code, run.code) == (0, 0)
    assert run.losses == alone.losses and run.summary["params_digest"] == alone.summary["params_digest"]
    assert run.summary["recoveries"] == []
    return run


def test_a_slow_rank_gets_less_work_with_the_bits_of_one_rank(tmp_path: Path) -> None:
    run = with_the_bits_of_one_rank(tmp_path, STEPS, "speed: 0.1")
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    found = next(event for event in events if event["kind"] == "slowed" and "1" in event["speeds"])
    assert found["speeds"]["1"] < 0.5
    before, after = (Plan.from_json((run.folder / f"plan-{epoch}.json").read_text()) for epoch in (0, found["epoch"]))
    assert after.tile(Rank(1)).sample_count < before.tile(Rank(1)).sample_count
    assert "rank 1 has a speed of" in after.reason


@pytest.mark.slow
def test_a_rank_without_work_is_tried_and_has_its_share_again_with_the_bits_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probation, "WAIT_S", 0.5)
    run = with_the_bits_of_one_rank(tmp_path, 4000, "speed: 0.02, steps: 60")
    paths = sorted(run.folder.glob("plan-*.json"), key=lambda path: int(path.stem.removeprefix("plan-")))
    shares = [Plan.from_json(path.read_text()).tile(Rank(1)).sample_count for path in paths]
    without = shares.index(0)
    assert max(shares[without:]) >= shares[0], "as much as at first"
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "slowed" and event["tried"] == [1] for event in events)


def on_a_core_that_others_use(config: Config, context: WorkerContext) -> Mapping[str, Any] | None:
    """Each rank on a core of its own, but that a process which spins has that of rank 1 too, and goes before it."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[context.rank % len(cores)]})
    if context.rank == 0:
        return run_worker(config, context)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.nice(5)
    try:
        return run_worker(config, context)
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="both ranks would share their core")
def test_a_rank_whose_core_others_use_is_not_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_meter, "SAMPLE_S", 0.02)  # so that a short run has many
    config = small_config("gpt_stdlib", "steps=100", "eval.every=0", "parallel.dp=2", "parallel.pp=1")
    folder = tmp_path / "run"
    assert train(Job(config, folder, {}, ()), on_a_core_that_others_use) == 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["kind"] == "slowed"] == []
    assert [path.name for path in folder.glob("plan-*.json")] == ["plan-0.json"]
