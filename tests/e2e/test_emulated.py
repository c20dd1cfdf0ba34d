"""Runs on the emulated device: nothing is computed, everything else is as it always is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.topology import Rank
from tests.runs import Run, run_job, small_config


def emulated(folder: Path, dp: int, pp: int, *overrides: str, recipe: str = "gpt_stdlib") -> Run:
    words = (f"parallel.dp={dp}", f"parallel.pp={pp}", "device=emulated", "emulated.unit_ms=0.5", "steps=8")
    return run_job(small_config(recipe, *words, *overrides), folder)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (4, 2)])
def test_a_run_covers_its_samples_and_tells_of_its_faithfulness(dp: int, pp: int, tmp_path: Path) -> None:
    run = emulated(tmp_path, dp, pp)
    assert run.code == 0  # the ledger covers every step once
    assert run.losses == [1.0] * 8
    assert (run.summary["samples_seen"], run.summary["samples_skipped"], run.summary["samples_duplicated"]) == (
        64,
        0,
        0,
    )
    found = run.summary["predicted"]
    assert (found["ranks"], found["steps"], found["epoch"]) == (dp * pp, 8, 0)
    plan = Plan.from_json((tmp_path / "plan-0.json").read_text())
    assert found["predicted_pipeline_ms"] == pytest.approx(1e3 * plan.predicted.pipeline_s, abs=1e-3)
    # A sleep may be too long, never too short, so no rank is faster than what it was to wait for.
    assert found["step_ms"] >= found["pipeline_ms"] > 0
    assert found["pipeline_ms"] >= 1e3 * max(cost.busy_s for cost in plan.predicted.ranks.values()) - 0.01
    (told,) = events(run, "predicted")
    assert {key: told[key] for key in found} == found


def test_folded_buffers(tmp_path: Path) -> None:
    run = emulated(tmp_path, 2, 1, recipe="resnet_digits")
    assert run.code == 0
    assert run.summary["predicted"]["ranks"] == 2


def test_a_lost_rank_is_recovered_from(tmp_path: Path) -> None:
    run = emulated(tmp_path, 2, 2, "steps=12", "faults=[{step: 5, rank: 1, kind: kill, phase: backward}]")
    assert run.code == 0
    assert len(run.losses) == 12
    (recovery,) = run.summary["recoveries"]
    assert (recovery["rank"], recovery["step"]) == (1, 5)
    found = run.summary["predicted"]
    assert (found["ranks"], found["epoch"]) == (3, 1)
    plan = Plan.from_json((tmp_path / "plan-1.json").read_text())
    assert found["predicted_pipeline_ms"] == pytest.approx(1e3 * plan.predicted.pipeline_s, abs=1e-3)


def test_a_rank_that_is_slowed_down_holds_the_others_up(tmp_path: Path) -> None:
    """Nobody is lost, and a step is never shorter than what the slow rank takes for its units."""
    run = emulated(tmp_path, 2, 1, "steps=8", "faults=[{step: 3, rank: 1, kind: slow, speed: 0.25, steps: 3}]")
    assert (run.code, run.summary["recoveries"]) == (0, [])
    (told,) = events(run, "fault")
    assert (told["rank"], told["step"], told["fault"], told["speed"]) == (1, 3, "slow", 0.25)
    taken = [line["step_ms"] for line in run.metrics]
    busy_ms = 1e3 * Plan.from_json((tmp_path / "plan-0.json").read_text()).predicted.ranks[Rank(1)].busy_s
    assert min(taken[3:6]) >= 4 * busy_ms - 0.01


def test_speeds_and_links_are_real(tmp_path: Path) -> None:
    """A slow rank takes longer for its share, and pieces between hosts as long as their link: no step is faster than
    predicted, for neither is ever early."""
    words = ("parallel.ranks_per_host=1", "emulated.speeds=[1,0.5]", "steps=4")
    link = "emulated.link={latency_ms: 40, bytes_per_s: 1e6}"
    run = emulated(tmp_path, 1, 2, *words, link)
    assert run.code == 0
    plan = Plan.from_json((tmp_path / "plan-0.json").read_text())
    assert [member.speed for member in plan.topology.members] == [1.0, 0.5]
    found = run.summary["predicted"]
    assert found["predicted_pipeline_ms"] > 80  # there and back
    # The clock of the first rank begins with its first kernel and ends with its last.
    assert found["pipeline_ms"] >= 0.98 * found["predicted_pipeline_ms"]


def test_a_memory_limit_asks_for_a_pipeline(tmp_path: Path) -> None:
    """What the whole model needs on each rank is too much, and a half is not."""
    words = ("parallel.dp=2", "parallel.pp=1", "device=emulated", "emulated.memory_mb=0.8")
    with pytest.raises(ConfigError, match="parallel.pp=1: does not fit in memory.*nearest valid: parallel.pp=2"):
        run_job(small_config("gpt_stdlib", *words), tmp_path)
