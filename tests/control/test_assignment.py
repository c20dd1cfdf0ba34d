"""The control plane's view of a plan."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from elaswave_fx.control.assignment import assignment_of, plan_hash
from elaswave_fx.control.protocol.types import BoxPlan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import Parallel, plan_uniform
from elaswave_fx.plan.topology import Rank, local_topology
from tests.plan.samples import chain


def test_boxes_tiles_and_members_are_those_of_the_plan() -> None:
    plan = plan_uniform(chain(4), local_topology(4), Parallel(2, 2))
    plan = replace(plan, boxes=(replace(plan.boxes[0], catching=(Rank(2),)), *plan.boxes[1:]))
    assignment = assignment_of(plan)
    assert assignment.members == (0, 1, 2, 3)
    assert assignment.tiles == plan.tiles
    assert [b.box for b in assignment.boxes] == list(range(len(plan.boxes)))
    assert assignment.boxes[0] == BoxPlan(0, 0, 0, (2,), (2,), (0, 2))  # type: ignore[arg-type]
    tied = next(b for b, planned in zip(assignment.boxes, plan.boxes, strict=True) if planned.bucket == 4)
    assert (tied.unit, tied.group) == (0, (0, 1, 2, 3))


def test_the_hash_is_that_of_the_text() -> None:
    plan = plan_uniform(chain(4), local_topology(2), Parallel(1, 2))
    assert plan_hash(plan) == plan_hash(Plan.from_json(plan.to_json())) == assignment_of(plan).plan_hash
    assert plan_hash(replace(plan, reason="another")) != plan_hash(plan)
    assert 0 <= plan_hash(plan) < 2**63


def test_the_hash_does_not_depend_on_the_process() -> None:
    code = (
        "from tests.control.test_assignment import *\n"
        "print(plan_hash(plan_uniform(chain(4), local_topology(2), Parallel(1, 2))))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == plan_hash(plan_uniform(chain(4), local_topology(2), Parallel(1, 2)))
