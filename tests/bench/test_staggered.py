"""Steps without a commit, simulated: what they can bring, and what they cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.plan.make.planner import most_memory, plan_uniform
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking, chain
from tools.bench.staggered import staggered_step_s


def workload(samples: int, tied: bool = False) -> Workload:
    """Eight equal units with halves, of which the first and the last may share a parameter."""
    work = chain(8, samples)
    units = tuple(replace(unit, weights_share=0.35, held_bytes=unit.saved_bytes // 2) for unit in work.units)
    return replace(work, units=units, buckets=work.buckets if tied else work.buckets[:-1], update_s=1e-7)


def planned(work: Workload, dp: int, pp: int, schedule: str, room: float | None) -> Plan:
    """`room`: memory of every rank, in what 1F1B takes at most."""
    lean = plan_uniform(asking(work, micro_batch=1), local_topology(dp * pp, 1), dp, pp)
    memory = None if room is None else int(room * most_memory(lean))
    return plan_uniform(asking(work, micro_batch=1, schedule=schedule), local_topology(dp * pp, 1, memory), dp, pp)


@pytest.mark.parametrize("pp", [1, 4])
def test_what_ends_last_begins_first(pp: int) -> None:
    """In 1F1B the first stage does, and so waits for no other one."""
    plan = planned(workload(8), 2, pp, "1f1b", None)
    assert staggered_step_s(plan) == pytest.approx(plan.predicted.step_s)


def test_with_memory_to_spare_steps_overlap() -> None:
    plan = planned(workload(8), 2, 2, "auto", None)
    busy_s = max(cost.busy_s for cost in plan.predicted.ranks.values())
    besides_s = plan.predicted.exchange_s + plan.predicted.update_s
    assert busy_s + besides_s <= staggered_step_s(plan) < 0.98 * plan.predicted.step_s


def test_without_memory_to_spare_they_do_not() -> None:
    plan = planned(workload(8), 2, 2, "auto", 1.0)
    assert staggered_step_s(plan) == pytest.approx(plan.predicted.step_s, rel=0.01)


def test_ranks_that_share_a_parameter_wait_for_each_other() -> None:
    """Here all of them, so that nobody is ahead."""
    plan = planned(workload(8, tied=True), 2, 2, "auto", None)
    assert plan.groups["tied"] == tuple(map(Rank, range(4)))
    assert staggered_step_s(plan) == pytest.approx(plan.predicted.step_s)
