"""Policies: what each may change after a loss, and that ours is never behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check import check_plan
from elaswave_fx.plan.cost import Workload
from elaswave_fx.plan.describe import describe
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import Parallel, plan_uniform
from elaswave_fx.plan.policies import POLICIES
from elaswave_fx.plan.replan import replan
from elaswave_fx.plan.topology import Rank, local_topology
from tests.plan.samples import chain


def job(dp: int, pp: int, workload: Workload | None = None, **rules: object) -> Plan:
    workload = replace(workload or chain(8, 24), **rules)  # type: ignore[arg-type]
    return plan_uniform(workload, local_topology(dp * pp, 1), Parallel(dp, pp))


def lose(plan: Plan, *lost: int) -> Plan:
    left = tuple(rank for rank in plan.ranks if rank not in lost)
    after = replan(plan, left, dict.fromkeys(range(len(plan.boxes)), left), 1)
    check_plan(after)
    return after


def keeps_units(before: Plan, after: Plan) -> bool:
    return all(set(tile.units) <= set(before.tile(tile.rank).units) for tile in after.tiles)


@pytest.mark.parametrize(("dp", "pp", "lost"), [(2, 2, (1,)), (3, 2, (0, 3)), (2, 3, (1, 5)), (4, 4, (5,))])
def test_recycle_deals_micro_batches_to_peers(dp: int, pp: int, lost: tuple[int, ...]) -> None:
    before = job(dp, pp, policy="recycle")
    after = lose(before, *lost)
    assert keeps_units(before, after)
    assert after.workload.policy == "recycle"
    back = replan(after, before.ranks, dict.fromkeys(range(len(before.boxes)), after.ranks), 1)
    assert back.ranks == before.ranks


def test_recycle_has_no_answer_where_a_stage_is_gone() -> None:
    with pytest.raises(PlanError, match="replan: policy=recycle has no answer to this loss: it moves no units"):
        lose(job(2, 2, policy="recycle"), 1, 3)
    lose(job(2, 2), 1, 3)


def test_without_the_graph_no_rank_gets_other_units() -> None:
    before = job(3, 2, axes=("dataflow", "frequency"))
    assert keeps_units(before, lose(before, 3))
    with pytest.raises(PlanError, match="policy=elaswave, planner.axes=dataflow, frequency has no answer"):
        lose(job(1, 3, axes=("dataflow", "frequency")), 1)


def test_without_dataflow_lanes_keep_their_samples() -> None:
    before = job(3, 2, axes=("graph", "frequency"))
    after = lose(before, 3)
    shares = [[sum(map(len, lane.micro_batches)) for lane in plan.lanes] for plan in (before, after)]
    assert shares[0] == shares[1]
    assert [len(lane.ranks) for lane in after.lanes] == [2, 1, 2]


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([(2, 2), (3, 2), (2, 4), (4, 1), (3, 3)]),
    st.lists(st.sampled_from((1e-3, 3e-3, 7e-3)), min_size=8, max_size=8),
    st.integers(12, 30),
    st.data(),
)
def test_ours_is_never_behind(shape: tuple[int, int], costs: list[float], batch: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, shape[0] * shape[1] - 1))
    workload = chain(8, batch, costs=costs)
    ours = lose(job(*shape, workload), lost)
    rivals = [{"policy": name} for name in POLICIES if name != "elaswave"]
    for rules in (*rivals, {"axes": ("dataflow",)}, {"axes": ("graph",)}):
        try:
            other = lose(job(*shape, workload, **rules), lost)
        except PlanError:
            continue
        assert ours.predicted.step_s <= 1.02 * other.predicted.step_s, (ours.reason, other.reason)


def test_drop_replica_leaves_the_ranks_of_a_hurt_lane_without_work() -> None:
    before = job(3, 2, policy="drop_replica")
    after = lose(before, 3)
    assert [lane.ranks for lane in after.lanes] == [(0, 1), (4, 5)]
    assert after.ranks == (0, 1, 2, 4, 5) and not after.tile(Rank(2)).units
    assert sum(tile.sample_count for tile in after.tiles) == 2 * after.workload.global_batch
    chain_of_losses = lose(after, 0)
    assert [lane.ranks for lane in chain_of_losses.lanes] == [(4, 5)]
    assert chain_of_losses.ranks == (1, 2, 4, 5)


def test_drop_replica_has_no_answer_without_a_whole_lane() -> None:
    with pytest.raises(PlanError, match="replan: policy=drop_replica has no answer to this loss: no lane is whole"):
        lose(job(2, 2, policy="drop_replica"), 1, 2)


def test_a_restart_takes_a_shape_that_a_new_job_could_have() -> None:
    after = lose(job(4, 4, policy="restart"), 5)
    depths = {len(lane.stages) for lane in after.lanes}
    assert len(depths) == 1 and all(len(stage.ranks) == 1 for lane in after.lanes for stage in lane.stages)
    assert "started anew" in after.reason


def test_a_rank_without_work_says_so() -> None:
    after = lose(job(3, 2, policy="drop_replica"), 3)
    assert "schedule of rank 2: computes nothing" in describe(after)
    assert Plan.from_json(after.to_json()) == after
