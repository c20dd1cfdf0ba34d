"""Policies: what each may change after a loss, and that ours is never behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.describe import describe
from elaswave_fx.plan.lower.engine_spec import key_stream
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.next.policies import POLICIES
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking, chain


def job(dp: int, pp: int, workload: Workload | None = None, **rules: object) -> Plan:
    workload = asking(workload or chain(8, 24), **rules)
    return plan_uniform(workload, local_topology(dp * pp, 1), dp, pp)


def lose(plan: Plan, *lost: int) -> Plan:
    left = tuple(rank for rank in plan.ranks if rank not in lost)
    after = replan(plan, left, dict.fromkeys(range(len(plan.boxes)), left), 1)
    check_plan(after)
    return after


def spans_of(lane: Lane) -> tuple[Span, ...]:
    return Runs.of(*lane.micro_batches).spans


def keeps_units(before: Plan, after: Plan) -> bool:
    return all(set(tile.units) <= set(before.tile(tile.rank).units) for tile in after.tiles)


@pytest.mark.parametrize(("dp", "pp", "lost"), [(2, 2, (1,)), (3, 2, (0, 3)), (2, 3, (1, 5)), (4, 4, (5,))])
def test_recycle_deals_micro_batches_to_peers(dp: int, pp: int, lost: tuple[int, ...]) -> None:
    before = job(dp, pp, policy="recycle")
    after = lose(before, *lost)
    assert keeps_units(before, after)
    assert after.workload.options.policy == "recycle"
    back = replan(after, before.ranks, dict.fromkeys(range(len(before.boxes)), after.ranks), 1)
    assert back.ranks == before.ranks


def test_recycle_has_no_answer_where_a_stage_is_gone() -> None:
    with pytest.raises(PlanError, match="replan: lab.policy=recycle has no answer to this loss: it moves no units"):
        lose(job(2, 2, policy="recycle"), 1, 3)
    lose(job(2, 2), 1, 3)


def test_without_the_graph_no_rank_gets_other_units() -> None:
    before = job(3, 2, axes=("dataflow", "frequency"))
    assert keeps_units(before, lose(before, 3))
    with pytest.raises(PlanError, match="lab.policy=elaswave, lab.axes=dataflow, frequency has no answer"):
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
    # A smaller batch is another amount of work; the others share out the same.
    rivals = [{"policy": name} for name in POLICIES if name not in ("elaswave", "smaller_batch")]
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
    assert sum(tile.sample_count for tile in after.tiles) == 2 * after.workload.options.global_batch
    chain_of_losses = lose(after, 0)
    assert [lane.ranks for lane in chain_of_losses.lanes] == [(4, 5)]
    assert chain_of_losses.ranks == (1, 2, 4, 5)


def test_drop_replica_has_no_answer_without_a_whole_lane() -> None:
    with pytest.raises(PlanError, match="replan: lab.policy=drop_replica has no answer to this loss: no lane is whole"):
        lose(job(2, 2, policy="drop_replica"), 1, 2)


def test_a_smaller_batch_is_what_whole_lanes_had() -> None:
    before = job(3, 2, chain(8, 26), policy="smaller_batch")
    assert [spans_of(lane) for lane in before.lanes] == [(Span(0, 9),), (Span(9, 18),), (Span(18, 26),)]
    after = lose(before, 0)
    assert [lane.ranks for lane in after.lanes] == [(2, 3), (4, 5)]
    assert [spans_of(lane) for lane in after.lanes] == [(Span(0, 9),), (Span(9, 17),)], "from the first sample on"
    assert (after.workload.samples, after.workload.skipped, after.workload.options.global_batch) == (17, 9, 26)
    assert keeps_units(before, after) and not after.tile(Rank(1)).units
    assert "8 units x 17 of 26 samples" in describe(after) and Plan.from_json(after.to_json()) == after
    for skipped, fault in ((0, "no tile"), (10, "a tile lies in the plane")):
        with pytest.raises(PlanError, match=fault):
            check_plan(replace(after, workload=replace(after.workload, skipped=skipped)))
    again = lose(after, 1)
    assert (again.lanes, again.workload) == (after.lanes, after.workload), "it computed nothing"
    last = lose(again, 4)
    assert (last.workload.samples, [spans_of(lane) for lane in last.lanes]) == (9, [(Span(0, 9),)])


def test_the_whole_batch_comes_back_with_ranks() -> None:
    before = job(3, 2, policy="smaller_batch")
    after = lose(before, 3)
    replicas = dict.fromkeys(range(len(after.boxes)), after.ranks)
    same = replan(after, after.ranks, replicas, 1)
    assert (same.lanes, same.workload.samples) == (after.lanes, 16), "nobody came"
    back = replan(after, before.ranks, replicas, 1)
    check_plan(back)
    assert (back.workload.skipped, sum(len(span) for lane in back.lanes for span in spans_of(lane))) == (0, 24)


def test_keys_of_a_smaller_batch_have_the_stride_of_the_whole_one() -> None:
    """What a step draws and reads does not depend on who was lost before it."""
    before = job(3, 2, policy="smaller_batch")
    after = lose(before, 1)
    stream = key_stream(7, True, after, Rank(2))
    assert (stream.per_step, stream.starts[0]) == (24, 0)


def test_a_smaller_batch_has_no_answer_without_a_whole_lane() -> None:
    with pytest.raises(
        PlanError, match="replan: lab.policy=smaller_batch has no answer to this loss: no lane is whole"
    ):
        lose(job(2, 2, policy="smaller_batch"), 1, 2)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.integers(10, 30), st.data())
def test_smaller_batches_of_losses_one_after_another(
    dp: int, pp: int, granule: int, granules: int, data: st.DataObject
) -> None:
    plan = job(dp, pp, chain(8, granule * granules), granule=granule, policy="smaller_batch")
    for rank in data.draw(st.permutations(range(dp * pp))):
        whole = [lane for lane in plan.lanes if rank not in lane.ranks]
        if not whole:
            break
        plan = lose(plan, rank)  # which is checked
        assert [lane.ranks for lane in plan.lanes] == [lane.ranks for lane in whole]
        assert plan.workload.samples == sum(len(span) for lane in whole for span in spans_of(lane))


def test_a_restart_takes_a_shape_that_a_new_job_could_have() -> None:
    after = lose(job(4, 4, policy="restart"), 5)
    depths = {len(lane.stages) for lane in after.lanes}
    assert len(depths) == 1 and all(len(stage.ranks) == 1 for lane in after.lanes for stage in lane.stages)
    assert "started anew" in after.reason


def test_a_rank_without_work_says_so() -> None:
    after = lose(job(3, 2, policy="drop_replica"), 3)
    assert "schedule of rank 2: computes nothing" in describe(after)
    assert Plan.from_json(after.to_json()) == after
