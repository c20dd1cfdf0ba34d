"""A recovery's events become parts that follow each other, and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_fx.errors import ConfigError
from elaswave_fx.pictures.plans import before_and_after
from elaswave_fx.pictures.recovery import parts_of
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, local_topology
from elaswave_fx.timeline import render, render_plans
from tests.plan.samples import chain

RECOVERY = {"epoch": 1, "ranks": [2], "rank": 2, "step": 60, "cause": "kill in step 60, phase backward"}
EVENTS = [
    {"t_ms": 100.0, "kind": "fault", "epoch": 0, "rank": 2},
    {"t_ms": 100.5, "kind": "detected", "epoch": 0, "rank": 2},
    {"t_ms": 101.0, "kind": "left", "epoch": 0, "rank": 2},
    {"t_ms": 103.0, "kind": "stopped", "epoch": 1},
    {"t_ms": 109.0, "kind": "agreed", "epoch": 1},
    {"t_ms": 117.0, "kind": "edited", "epoch": 1, "ms": 3.0},
    {"t_ms": 117.0, "kind": "transferred", "epoch": 1, "ms": 4.0},
    {"t_ms": 150.0, "kind": "resumed", "epoch": 1},
]


def test_parts_follow_each_other_from_the_loss_to_the_commit() -> None:
    parts = parts_of(EVENTS, RECOVERY)
    assert [(part.name, part.start_ms, part.end_ms) for part in parts] == [
        ("detect", 0.0, 0.5),
        ("leave the step", 0.5, 3.0),
        ("agree and plan", 3.0, 9.0),
        ("tell the ranks", 9.0, 10.0),
        ("edit in place", 10.0, 13.0),
        ("move parameters", 13.0, 17.0),
        ("do the step again", 17.0, 50.0),
    ]


def test_a_recovery_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeline: the events of epoch 1 lack resumed"):
        parts_of(EVENTS[:-1], RECOVERY)


def test_the_same_run_gives_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"recoveries": [RECOVERY]}))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    words = render(tmp_path, 0, tmp_path / "one.svg")
    assert "33.0 ms  do the step again" in words
    render(tmp_path, 0, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    with pytest.raises(ConfigError, match="has 1 recoveries; --recovery 1 is none of them"):
        render(tmp_path, 1, tmp_path / "one.svg")


def test_the_plans_on_both_sides_of_a_loss_become_a_picture(tmp_path: Path) -> None:
    first = plan_uniform(chain(6), local_topology(4), 2, 2)
    left = tuple(rank for rank in first.ranks if rank != 2)
    second = replan(first, left, {number: left for number, _ in numbered(first.boxes)}, 1)
    third = replace(second, topology=replace(second.topology, epoch=Epoch(2)))  # a replica is in sync
    for plan in (first, second, third):
        (tmp_path / f"plan-{plan.epoch}.json").write_text(plan.to_json())
    times = ((0, 90.0), (0, 70.0), (0, 10.0), (0, 12.0), (1, 99.0), (1, 98.0), (2, 20.0), (2, 21.0), (2, 40.0))
    lines = [{"step": step, "epoch": epoch, "step_ms": ms} for step, (epoch, ms) in enumerate(times)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps({"recoveries": [RECOVERY]}))

    before, after = before_and_after(tmp_path, 1, lines)
    assert (before.plan, before.step_ms, before.steps) == (first, 11.0, 2)
    assert (after.plan, after.step_ms, after.steps) == (second, 21.0, 3)
    words = render_plans(tmp_path, 0, tmp_path / "one.svg")
    assert words.startswith("epoch 0 from step 0 on\n4 ranks, 2 x 2 lanes, ")
    assert "\nepoch 1 from step 4 on: lost rank 2\n" in words
    assert "measured 21 ms (median of 3)" in words
    render_plans(tmp_path, 0, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    (tmp_path / "plan-1.json").unlink()
    with pytest.raises(ConfigError, match=r"timeline: .*plan-1\.json does not exist"):
        render_plans(tmp_path, 0, tmp_path / "one.svg")
