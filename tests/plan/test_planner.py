"""What the planner chooses, what it says about it, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.lanes.shares import share_granules
from elaswave_fx.plan.make.planner import plan_lanes, plan_uniform
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import MemoryTable, UnitSums, tile_memory
from elaswave_fx.plan.work.cost import Workload
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.topology import Member, Rank, Topology, local_topology
from tests.plan.samples import asking, chain, two_towers


def uniform(workload: Workload, dp: int, pp: int, micro_batch: int | None = None, memory: int | None = None) -> Plan:
    workload = asking(workload, micro_batch=micro_batch)
    plan = plan_uniform(workload, local_topology(dp * pp, memory_bytes=memory), dp, pp)
    check_plan(plan)
    return plan


def counts(plan: Plan) -> list[int]:
    return [len(t.micro_batches) for t in plan.tiles]


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("workload", [chain(6), two_towers(16), chain(4, 16, 2, batch_coupled=True)])
def test_the_shapes_that_training_promises(workload: Workload, dp: int, pp: int) -> None:
    plan = uniform(workload, dp, pp)
    assert plan.ranks == tuple(range(dp * pp))


def test_ranks_go_down_the_pipeline_first() -> None:
    plan = uniform(chain(4), 2, 2)
    assert [(t.rank, t.units.spans, t.spans) for t in plan.tiles] == [
        (0, (Span(0, 2),), (Span(0, 8),)),
        (1, (Span(2, 4),), (Span(0, 8),)),
        (2, (Span(0, 2),), (Span(8, 16),)),
        (3, (Span(2, 4),), (Span(8, 16),)),
    ]


@pytest.mark.parametrize(("dp", "pp", "batch"), [(2, 2, 56), (2, 4, 36), (4, 2, 112)])
def test_equal_lanes_keep_equal_shares(dp: int, pp: int, batch: int) -> None:
    """Though a lane's step would be shorter with a granule more, and with a granule less: its last micro-batches would
    be smaller."""
    assert {t.sample_count for t in uniform(chain(pp, batch), dp, pp).tiles} == {batch // dp}


def test_remaining_granules_go_to_the_first_lanes() -> None:
    plan = uniform(chain(4, 22, granule=2), 3, 2)
    assert [t.sample_count for t in plan.tiles] == [8, 8, 8, 8, 6, 6]


def test_one_stage_runs_its_tile_at_once_and_a_pipeline_in_two_pieces_a_stage() -> None:
    assert counts(uniform(chain(4, 32), 2, 1)) == [1, 1]
    assert counts(uniform(chain(4, 32), 1, 2)) == [4, 4]
    assert counts(uniform(chain(4, 3), 1, 2)) == [3, 3]


def test_micro_batch_is_an_upper_bound() -> None:
    assert counts(uniform(chain(4, 32), 2, 1, micro_batch=5)) == [4, 4]
    assert max(len(m) for t in uniform(chain(4, 32), 2, 1, micro_batch=5).tiles for m in t.micro_batches) == 4
    assert counts(uniform(chain(4, 32), 1, 2, micro_batch=16)) == [4, 4]
    assert counts(uniform(chain(4, 32), 1, 2, micro_batch=3)) == [11, 11]


def test_batch_coupled_programs_get_a_granule_at_a_time() -> None:
    plan = uniform(chain(4, 24, 4, batch_coupled=True), 1, 2, micro_batch=8)
    assert {len(m) for t in plan.tiles for m in t.micro_batches} == {4}
    assert "batch-coupled" in plan.reason


def test_memory_takes_micro_batches_down_and_moves_cuts() -> None:
    workload = chain(4, 16)
    free = uniform(workload, 1, 1)
    tight = uniform(workload, 1, 1, memory=free.predicted.ranks[Rank(0)].memory_bytes - 1)
    assert counts(free) == [1] and counts(tight) == [2]
    heavy = replace(workload, units=(replace(workload.units[0], param_bytes=50_000), *workload.units[1:]))
    plan = uniform(heavy, 1, 2, memory=58_000)
    assert plan.tile(Rank(0)).units == Runs.of(Span(0, 1))
    assert "slower than equal numbers of units, which do not fit in memory" in plan.reason


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_limit_is_the_predicted_byte(dp: int, pp: int, units_each: int) -> None:
    workload = chain(pp * units_each, 12)
    plan = uniform(workload, dp, pp)
    need = {rank: cost.memory_bytes for rank, cost in plan.predicted.ranks.items()}

    def bounded(less: int) -> Plan:
        members = tuple(Member(m.rank, m.host, m.speed, need[m.rank] - less) for m in plan.topology.members)
        return replace(plan, topology=replace(plan.topology, members=members))

    check_plan(bounded(0))
    with pytest.raises(PlanError, match="fits in the memory of its rank"):
        check_plan(bounded(1))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_quick_table_counts_the_same_bytes(units: int, samples: int, in_flight: int, data: st.DataObject) -> None:
    workload = chain(units)
    lo = data.draw(st.integers(0, units - 1))
    span = Span(lo, data.draw(st.integers(lo + 1, units)))
    owned = sum(b.numel for b in workload.buckets if b.users[0] in span)
    exact = tile_memory(workload, span, samples, in_flight, owned)
    assert MemoryTable(UnitSums(workload), 1).total(span, samples, in_flight) == exact.total


def test_shares_follow_speed() -> None:
    assert share_granules(7, [1.0, 1.0, 1.0]) == (3, 2, 2)
    assert share_granules(9, [1.0, 2.0]) == (6, 3)
    assert share_granules(2, [100.0, 1.0]) == (1, 1)


def test_a_slow_rank_gets_fewer_units_and_its_lane_fewer_samples() -> None:
    members = tuple(Member(m.rank, m.host, 0.5 if m.rank == 1 else 1.0) for m in local_topology(4).members)
    plan = plan_uniform(chain(9, 24), Topology(members), 2, 2)
    check_plan(plan)
    assert [len(t.units) for t in plan.tiles] == [7, 2, 5, 4], "with 6 and 3 units, filling the lane takes longer"
    assert plan.tiles[0].sample_count < plan.tiles[2].sample_count


def test_uneven_costs_move_the_cut_and_the_reason_says_so() -> None:
    plan = uniform(chain(4, costs=(1e-3, 1e-3, 1e-3, 3e-3)), 1, 2)
    assert [len(t.units) for t in plan.tiles] == [3, 1]
    assert plan.reason == (
        "1 x 2 lanes; units cut at 3; slowest stage 36.1 ms per micro-batch, 1.33x faster than equal numbers of "
        "units (cut at 2); 4 micro-batches of at most 4 samples: about 20% idle in the pipeline against 50% with one"
    )


def test_stages_of_different_widths() -> None:
    plan = plan_lanes(chain(10, 24), local_topology(5), [(3, 2)])
    check_plan(plan)
    assert [len(t.units) for t in plan.tiles] == [7, 7, 7, 3, 3]
    assert [t.sample_count for t in plan.tiles] == [8, 8, 8, 12, 12]
    assert plan.reason.startswith("a lane of stages 3+2 ranks wide; units cut at 7; ")


def test_lanes_of_different_depths() -> None:
    plan = plan_lanes(chain(6, 25), local_topology(5), [(1, 1, 1), (1, 1)])
    check_plan(plan)
    assert [len(t.units) for t in plan.tiles] == [2, 2, 2, 3, 3]
    assert [t.sample_count for t in plan.tiles] == [14, 14, 14, 11, 11]
    assert plan.reason.startswith("lanes of depths 3, 2; units cut at 2, 4 | 3; ")


def test_more_stages_than_units_are_refused() -> None:
    message = "parallel.pp=5: leaves a rank without units, the program has 4; nearest valid: parallel.pp=4"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        plan_uniform(chain(4), local_topology(5), 1, 5)


def test_what_does_not_fit_names_the_depth_that_does() -> None:
    with pytest.raises(ConfigError, match=r"^parallel.pp=1: does not fit in memory: a stage needs about .* a rank has "
                       r".*; nearest valid: parallel.pp=5$"):  # fmt: skip
        uniform(chain(6), 1, 1, memory=7_200)
    uniform(chain(6), 1, 5, memory=7_200)
    with pytest.raises(ConfigError, match=r"no parallel.pp up to 6 fits at parallel.dp=1$"):
        uniform(chain(6), 1, 1, memory=100)


def test_a_topology_of_another_size_is_an_error() -> None:
    with pytest.raises(PlanError, match="dp 2 x pp 2 needs 4 ranks; the topology has 3"):
        plan_uniform(chain(4), local_topology(3), 2, 2)


def test_a_stage_wider_than_the_batch_is_an_error() -> None:
    with pytest.raises(PlanError, match="3 ranks side by side leave ranks without samples; there are 2 granules"):
        plan_lanes(chain(4, 2), local_topology(4), [(3, 1)])


def test_lanes_that_end_together_have_no_granule_to_hand_over() -> None:
    """With one more sample these would be faster: nine smaller micro-batches pass sooner than eight."""
    plan = uniform(chain(9, 48), 2, 4)
    assert [t.sample_count for t in plan.tiles] == [24] * 8
