"""Random clusters: every plan passes the checker, and real steps by it have the bits of one rank.

`make proofs` runs two thousand plans and two hundred clusters; here are the first of one seed.
"""

from __future__ import annotations

import pytest

from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.work.topology import local_topology
from tests.plan.campaign import KINDS, tiny_job, try_kind
from tests.plan.samples import asking


def test_the_checker_passes_every_plan() -> None:
    """Of clusters of 1 to 64 ranks, with losses and joins."""
    found = try_kind(KINDS["topologies"], 200, seed=1)
    assert found.holds(KINDS["topologies"]), found.worst.words


def test_real_steps_have_the_bits_of_one_rank() -> None:
    found = try_kind(KINDS["steps"], 25, seed=1)
    assert found.holds(KINDS["steps"]), found.worst.words


@pytest.mark.parametrize("changes", [{"exact": False}, {"global_batch": 6}])
def test_other_bits_are_seen(changes: dict[str, object]) -> None:
    """Those of sums that depend on who adds, and those of other samples."""
    job = tiny_job()
    workload = asking(job.workload, **changes)
    plan = plan_lanes(workload, local_topology(4), [(1, 1), (1, 1)])
    assert job.run(plan).digests != job.alone.digests
