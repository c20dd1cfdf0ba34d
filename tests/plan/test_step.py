"""The instruction lists that ranks execute. That they match and end is shown by the checker on random tilings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.lower.step import StepProgram, eval_program, step_program, tag
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.order.hops import Hop
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.tiling import Lane, Tile
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import asking, chain, even_lanes, uneven_lanes, wide_lane, world


def text(program: StepProgram) -> str:
    pieces = " ".join(str(m) for m in program.micro_batches)
    head = f"rank {program.rank}, samples: {pieces}\n"
    return head + "".join("  " + " ".join(str(part) for part in i) + "\n" for i in program.instructions)


def test_the_lists_of_a_pipeline(golden: Callable[[str, str], None]) -> None:
    workload = chain(3, 6)
    plan = make_plan(local_topology(3), workload, even_lanes(workload, 1, 3, 2), "three stages")
    lists = "".join(f"train {text(step_program(plan, r))}eval {text(eval_program(plan, r))}" for r in plan.ranks)
    golden("step_1x3.txt", lists)


def only(program: StepProgram, *opcodes: str) -> list[tuple[str | int, ...]]:
    return [i for i in program.instructions if i[0] in opcodes]


def test_buckets_are_reduced_as_soon_as_they_are_done_where_no_gradient_leaves() -> None:
    program = step_program(plan_uniform(chain(4), local_topology(4), 2, 2), Rank(0))
    codes = [i[0] for i in only(program, "BACKWARD", "REDUCE")]
    assert codes[-5:] == ["BACKWARD", "REDUCE", "BACKWARD", "REDUCE", "REDUCE"]


def test_no_bucket_is_reduced_before_the_last_gradient_has_left() -> None:
    program = step_program(plan_uniform(chain(4), local_topology(4), 2, 2), Rank(1))
    codes = [i[0] for i in only(program, "BACKWARD", "REDUCE", "SEND")]
    assert codes[-8:] == ["BACKWARD", "BACKWARD", "SEND", "SEND", "SEND", "REDUCE", "REDUCE", "REDUCE"]


def test_buckets_are_updated_in_order_of_use() -> None:
    program = step_program(plan_uniform(chain(4), local_topology(4), 2, 2), Rank(1))
    assert only(program, "REDUCE") == [("REDUCE", 3), ("REDUCE", 4), ("REDUCE", 2)]
    assert program.instructions[-1] == ("SNAPSHOT",)
    assert only(program, "VOTE", "UPDATE", "GATHER") == [
        ("VOTE",),
        ("UPDATE", 2),
        ("GATHER", 2),
        ("UPDATE", 3),
        ("GATHER", 3),
        ("GATHER", 4),
    ]


def test_one_rank_only_computes() -> None:
    plan = plan_uniform(asking(chain(2, 4), micro_batch=2), local_topology(1), 1, 1)
    assert [i[0] for i in step_program(plan, Rank(0)).instructions[:8]] == ["FORWARD"] * 2 + ["BACKWARD"] * 2 + [
        "FORWARD"
    ] * 2 + ["BACKWARD", "REDUCE"]
    assert {i[0] for i in eval_program(plan, Rank(0)).instructions} == {"FORWARD"}


def test_the_units_of_a_tile_need_not_adjoin() -> None:
    """As no lane deals them: rank 0 has the first and the last unit, rank 1 the one between."""
    unit = UnitCost(1e-3, 1e-3)
    values = (Value("h", 0, (1,), 8), Value("g", 1, (2,), 8))
    workload = Workload((unit,) * 3, values, (Bucket("b", 4, (0, 2)),), PlanOptions(1))
    plan = plan_uniform(workload, local_topology(2), 1, 2)
    mb = Span(0, 1)
    hops = (Hop(0, Rank(0), 0, Rank(1), 0, mb), Hop(1, Rank(1), 0, Rank(0), 0, mb))
    tiles = (Tile(Rank(0), Runs.of(Span(0, 1), Span(2, 3)), (mb,)), Tile(Rank(1), Runs.of(Span(1, 2)), (mb,)))
    plan.__dict__.update(tiles=tiles, _tile_of=dict(enumerate(tiles)), hops_of=lambda rank: hops)
    lists = [only(step_program(plan, tile.rank), "FORWARD", "BACKWARD", "SEND") for tile in tiles]
    assert [[(i[0], i[1]) for i in program] for program in lists] == [
        [("FORWARD", 0), ("SEND", 0), ("FORWARD", 2), ("BACKWARD", 2), ("SEND", 1), ("BACKWARD", 0)],
        [("FORWARD", 1), ("SEND", 1), ("BACKWARD", 1), ("SEND", 0)],
    ]
    assert [piece.edges for piece in tiles[0].work] == [(0, 1, 0, 1), (2, 3, 0, 1)]


def test_a_value_is_passed_on_from_user_to_user_and_its_gradient_back() -> None:
    unit = UnitCost(1e-3, 1e-3)
    workload = Workload((unit,) * 4, (Value("skip", 0, (1, 3), 8),), (Bucket("b", 4, (0,)),), PlanOptions(2))
    plan = make_plan(local_topology(4), workload, even_lanes(workload, 1, 4, 2), "skip")
    assert [(h.source, h.target) for h in plan.hops] == [(0, 1), (1, 3)]
    transfers = [[(i[0], i[3], i[7]) for i in only(step_program(plan, Rank(r)), "RECV", "SEND")] for r in range(4)]
    assert transfers == [
        [("SEND", 1, 0), ("RECV", 1, 1)],
        [("RECV", 0, 0), ("SEND", 3, 0), ("RECV", 3, 1), ("SEND", 0, 1)],
        [],
        [("RECV", 1, 0), ("SEND", 1, 1)],
    ]


def test_micro_batches_go_to_whom_they_are_dealt() -> None:
    workload = chain(4, 16)
    plan = make_plan(local_topology(5), workload, wide_lane(workload, 4), "wide")
    assert plan.tile(Rank(0)).micro_batches == (Span(0, 4), Span(4, 8))
    assert plan.tile(Rank(2)).micro_batches == (Span(12, 16),)
    assert plan.tile(Rank(4)).micro_batches == (Span(8, 12), Span(12, 16))
    assert [h for h in plan.hops if h.value == 1] == [
        Hop(1, Rank(0), 0, Rank(3), 0, Span(0, 4)),
        Hop(1, Rank(0), 1, Rank(3), 1, Span(4, 8)),
        Hop(1, Rank(1), 0, Rank(4), 0, Span(8, 12)),
        Hop(1, Rank(2), 0, Rank(4), 1, Span(12, 16)),
    ]
    sends = [i for i in only(step_program(plan, Rank(2)), "SEND") if i[1] == 1]
    assert [(i[2], i[3], i[4], i[5], i[6]) for i in sends] == [(0, 4, 1 << 56 | 1 << 32 | 1, 0, 4)]


@settings(deadline=None, max_examples=40)
@given(uneven_lanes())
def test_tags_tell_the_messages_of_a_link_apart(tiling: tuple[Workload, tuple[Lane, ...]]) -> None:
    workload, lanes = tiling
    plan = make_plan(local_topology(world(lanes)), workload, lanes, "random")
    for rank in plan.ranks:
        found = only(step_program(plan, rank), "RECV")
        assert len({(i[3], i[4]) for i in found}) == len(found)
        assert all(int(i[4]) >> 56 == 1 + int(i[7]) and (int(i[4]) >> 32) & 0xFFFFFF == i[1] for i in found)
        assert all(int(i[4]) & 0xFFFFFFFF == i[2] for i in found)


def test_a_tag_that_does_not_fit_is_refused() -> None:
    assert tag(1, 2, 3) == 1 << 56 | 2 << 32 | 3
    with pytest.raises(PlanError, match="micro-batch 16777216 do not fit a tag"):
        tag(1, 0, 1 << 24)
