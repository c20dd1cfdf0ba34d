"""A loss is answered at once, and the target reached while training goes on: with the bits of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elaswave_fx.build.initial_plan import options_of
from elaswave_fx.config.keys import Config
from elaswave_fx.passes.assign_stages import make_workload
from elaswave_fx.plan.make.planner import plan_lanes, uniform
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition import Transition
from elaswave_fx.plan.work.topology import Link, local_topology
from elaswave_fx.program.artifact import Artifact
from tests.e2e.test_training import run_with_plan
from tests.runs import Run, run_job, small_config

LOST_AFTER, STEPS = 5, 300
SLOW = Link(0.0, 4e4)
"""As the planner is told, so that it does not let parameters travel while everybody waits."""

WORDS = ("exact=true", f"steps={STEPS}", "global_batch=12", "eval.every=0")


def on_slow_links(config: Config, artifact: Artifact) -> Plan:
    """3 x 2, with units that take seconds."""
    workload = make_workload(artifact, replace(options_of(config), micro_batch=1), 1)
    units = tuple(replace(unit, forward_s=1.0, backward_s=2.0, fixed_s=0.0) for unit in workload.units)
    topology = replace(local_topology(6, 2), within_host=SLOW, between_hosts=SLOW)
    return plan_lanes(replace(workload, units=units), topology, uniform(3, 2))


def plans(run: Run) -> list[Plan]:
    found = sorted(run.folder.glob("plan-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [Plan.from_json(path.read_text()) for path in found]


def test_a_target_is_reached_with_the_bits_of_one_rank(tmp_path: Path) -> None:
    alone = run_job(small_config("gpt_stdlib", *WORDS), tmp_path / "alone")
    fault = f"faults=[{{step: {LOST_AFTER}, rank: 3, kind: kill, phase: backward}}]"
    config = small_config("gpt_stdlib", *WORDS, "parallel.dp=3", "parallel.pp=2", fault)
    run = run_with_plan(config, tmp_path / "run", on_slow_links)
    assert (alone.code, run.code) == (0, 0)
    found = plans(run)
    on_the_way = [plan for plan in found if plan.target is not None]
    assert on_the_way, [plan.reason for plan in found]
    target = on_the_way[0].target
    assert target is not None and target.step_s * 1.03 < on_the_way[0].predicted.step_s
    assert any(plan.lanes == target.lanes for plan in found), [plan.reason for plan in found]
    assert found[-1].target is None and all(len(box.holders) == 1 for box in found[-1].boxes)
    reached = next(number for number, plan in enumerate(found) if plan.lanes == target.lanes)
    change = Transition.of(found[reached - 1], found[reached])
    assert change.gained and not change.parameters, "parameters are made from replicas that are there"
    assert run.losses == alone.losses
    assert run.summary["params_digest"] == alone.summary["params_digest"]


@pytest.mark.parametrize("goals", ["blocking", "never"])
def test_what_is_taken_without_a_target_has_the_bits_of_one_rank(goals: str, tmp_path: Path) -> None:
    words = ("exact=true", "steps=20", "global_batch=12", "eval.every=0")
    alone = run_job(small_config("gpt_stdlib", *words), tmp_path / "alone")
    fault = f"faults=[{{step: {LOST_AFTER}, rank: 3, kind: kill, phase: backward}}]"
    config = small_config("gpt_stdlib", *words, "parallel.dp=3", "parallel.pp=2", fault, f"lab.goals={goals}")
    run = run_with_plan(config, tmp_path / "run", on_slow_links)
    assert (alone.code, run.code) == (0, 0)
    before, after, *_ = found = plans(run)
    assert all(plan.target is None for plan in found), [plan.reason for plan in found]
    assert bool(Transition.of(before, after).parameters) == (goals == "blocking"), after.reason
    assert run.losses == alone.losses
    assert run.summary["params_digest"] == alone.summary["params_digest"]
