"""The independent checker rejects every kind of planted violation, with its message."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_instructions, check_plan, plan_violations
from elaswave_fx.plan.lower.step import Instruction, eval_program, step_program
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.next.replan import terminal_plan
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.spans import Runs, Span
from elaswave_fx.plan.work.tiling import Stage, Tile
from elaswave_fx.plan.work.topology import Host, Member, Rank, local_topology
from tests.plan.samples import asking, chain, even_lanes, lane, wide_lane


def good(granule: int = 1, batch_coupled: bool = False) -> Plan:
    """2 x 2 lanes over 4 units and 16 samples, micro-batches of 2."""
    workload = chain(4, 16, granule, batch_coupled=batch_coupled)
    return make_plan(local_topology(4), workload, even_lanes(workload, 2, 2, 2), "good")


def with_tile(plan: Plan, rank: int, **changes: object) -> Plan:
    tiles = tuple(replace(t, **changes) if t.rank == rank else t for t in plan.tiles)  # type: ignore[arg-type]
    return deriving(plan, tiles=tiles)


def deriving(plan: Plan, **wrong: object) -> Plan:
    """The plan, as if other tiles or hops followed from its lanes."""
    found = replace(plan)
    found.__dict__.update(wrong)
    return found


def with_lane(plan: Plan, number: int, **changes: object) -> Plan:
    lanes = tuple(replace(e, **changes) if i == number else e for i, e in enumerate(plan.lanes))  # type: ignore[arg-type]
    return replace(plan, lanes=lanes)


def with_member(plan: Plan, rank: int) -> Plan:
    members = (*plan.topology.members, Member(Rank(rank), Host(1)))
    return replace(plan, topology=replace(plan.topology, members=members))


def of_two_ranks(stage: Stage, deal: tuple[int, int]) -> Stage:
    return replace(stage, ranks=(*stage.ranks, Rank(4)), deal=deal)


def with_hop(plan: Plan, index: int, **changes: object) -> Plan:
    hops = list(plan.hops)
    hops[index] = hops[index]._replace(**changes)  # type: ignore[arg-type]
    return deriving(plan, hops=tuple(hops))


def with_layout(plan: Plan, *parts: tuple[int, int, int]) -> Plan:
    """The bucket u0 in boxes of other (owner, lo, hi)."""
    first = tuple(Box(0, Span(lo, hi), Rank(r), readers=plan.groups["u0"]) for r, lo, hi in parts)
    return replace(plan, boxes=first + tuple(b for b in plan.boxes if b.bucket != 0))


def with_box(plan: Plan, number: int, **changes: object) -> Plan:
    boxes = tuple(replace(b, **changes) if i == number else b for i, b in enumerate(plan.boxes))  # type: ignore[arg-type]
    return replace(plan, boxes=boxes)


def with_schedule(plan: Plan, rank: int, text: str) -> Plan:
    order = tuple((a[0], int(a[1:])) for a in text.split())
    return replace(plan, schedule={**plan.schedule, Rank(rank): order})


def without_hop(plan: Plan, index: int) -> Plan:
    return deriving(plan, hops=plan.hops[:index] + plan.hops[index + 1 :])


def with_memory(plan: Plan, size: int) -> Plan:
    members = tuple(Member(m.rank, m.host, m.speed, size) for m in plan.topology.members)
    return replace(plan, topology=replace(plan.topology, members=members))


def with_bound(plan: Plan, rank: int, in_flight: int) -> Plan:
    ranks = dict(plan.predicted.ranks)
    ranks[Rank(rank)] = replace(ranks[Rank(rank)], in_flight=in_flight)
    return replace(plan, predicted=replace(plan.predicted, ranks=ranks))


def in_halves() -> Plan:
    """One pipeline of two stages over 4 units and 8 samples, with backward passes in halves."""
    workload = chain(4, 8)
    units = tuple(replace(unit, weights_share=0.5, held_bytes=30) for unit in workload.units)
    workload = asking(replace(workload, units=units), schedule="split")
    return make_plan(local_topology(2), workload, even_lanes(workload, 1, 2, 2), "halves")


PLANTED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "two tiles": (
        lambda p: deriving(p, tiles=(*p.tiles, p.tiles[0])),
        "plan 0: tiles are of ranks [0, 1, 2, 3, 0]; each rank has one, in rank order",
    ),
    "dead rank": (
        lambda p: replace(p, topology=replace(p.topology, members=p.topology.members[:3])),
        "plan 0: rank 3 has a tile but is not alive",
    ),
    "empty tile": (
        lambda p: with_lane(
            with_member(p, 4), 0, stages=(of_two_ranks(p.lanes[0].stages[0], (0, 4)), p.lanes[0].stages[1])
        ),
        "plan 0: rank 0 has units [0, 2) and samples none; the tile of a lane is not empty",
    ),
    "tile of no units": (
        lambda p: with_lane(with_member(p, 4), 0, stages=(*p.lanes[0].stages, Stage(Span(4, 4), (Rank(4),), (4,)))),
        "plan 0: rank 4 has units none and samples [0, 2) [2, 4) [4, 6) [6, 8); the tile of a lane is not empty",
    ),
    "outside": (
        lambda p: with_lane(p, 1, micro_batches=(*p.lanes[1].micro_batches[:3], Span(14, 18))),
        "plan 0: rank 2 has units [0, 2) and samples [8, 10) [10, 12) [12, 14) [14, 18); a tile lies in the plane",
    ),
    "hole": (
        lambda p: with_lane(p, 0, micro_batches=(*p.lanes[0].micro_batches[:3], Span(6, 7))),
        "plan 0: unit 0 x samples [7, 8) is covered by no tile; tiles cover the plane exactly once",
    ),
    "overlap": (
        lambda p: with_lane(p, 0, micro_batches=(*p.lanes[0].micro_batches[:3], Span(6, 9))),
        "plan 0: unit 0 x samples [8, 9) is covered by 2 tiles",
    ),
    "micro-batches out of order": (
        lambda p: with_lane(p, 0, micro_batches=(Span(2, 4), Span(0, 2), Span(4, 6), Span(6, 8))),
        "plan 0: micro-batch 1 of rank 0 is [0, 2), after one that ends at 4; micro-batches ascend",
    ),
    "rank in two lanes": (
        lambda p: with_lane(p, 1, stages=(replace(p.lanes[1].stages[0], ranks=(Rank(1),)), p.lanes[1].stages[1])),
        "plan 0: rank 1 has 2 tiles; a rank has one",
    ),
    "tile that no lane gives": (
        lambda p: with_tile(p, 0, micro_batches=(Span(0, 2), Span(2, 4), Span(4, 6))),
        "plan 0: rank 0 has a tile of units [0, 2) and samples [0, 2) [2, 4) [4, 6), and its lane gives it units "
        "[0, 2) and samples [0, 2) [2, 4) [4, 6) [6, 8); tiles follow from lanes",
    ),
    "tiles of each other": (
        lambda p: with_tile(with_tile(p, 0, units=Span(2, 4)), 1, units=Span(0, 2)),
        "plan 0: rank 0 has a tile of units [2, 4) and samples [0, 2) [2, 4) [4, 6) [6, 8), and its lane gives it "
        "units [0, 2)",
    ),
    "tile of a stranger": (
        lambda p: deriving(p, tiles=(*p.tiles, replace(p.tiles[0], rank=Rank(9)))),
        "plan 0: rank 9 has a tile but is in no lane and not alive; tiles follow from lanes",
    ),
    "tile left out": (
        lambda p: deriving(p, tiles=p.tiles[:3]),
        "plan 0: rank 3 is in a lane and has no tile; tiles follow from lanes",
    ),
    "stages apart": (
        lambda p: with_lane(p, 1, stages=(p.lanes[1].stages[0], replace(p.lanes[1].stages[1], units=Span(3, 4)))),
        "plan 0: lane 1 has a stage of units [3, 4) where 2 comes next; stages follow each other",
    ),
    "lane without its last unit": (
        lambda p: with_lane(p, 0, stages=p.lanes[0].stages[:1]),
        "plan 0: lane 0 ends at unit 2 of 4; a lane has all units",
    ),
    "micro-batch dealt to nobody": (
        lambda p: with_lane(p, 0, stages=(replace(p.lanes[0].stages[0], deal=(3,)), p.lanes[0].stages[1])),
        "plan 0: lane 0 deals (3,) of its 4 micro-batches to the ranks (0,) of units [0, 2); a stage deals every",
    ),
    "owner without a tile": (
        lambda p: with_layout(p, (7, 0, 50), (2, 50, 100)),
        "plan 0: box [0, 50) of bucket u0 is owned by rank 7, which has no tile; owners and holders take part",
    ),
    "unowned": (
        lambda p: with_layout(p, (0, 0, 50), (2, 60, 100)),
        "plan 0: bucket u0 has elements [50, 60) in 0 boxes; boxes cover a bucket exactly once",
    ),
    "owned twice": (
        lambda p: with_layout(p, (0, 0, 60), (2, 50, 100)),
        "plan 0: bucket u0 has elements [50, 60) in 2 boxes",
    ),
    "beyond the bucket": (
        lambda p: with_layout(p, (0, 0, 50), (2, 50, 101)),
        "plan 0: bucket u0 has the box [50, 101) of rank 2 outside of [0, 100)",
    ),
    "box of no bucket": (
        lambda p: with_box(p, 1, bucket=9),
        "plan 0: box 1 is of bucket 9; there are buckets 0..4",
    ),
    "boxes out of order": (
        lambda p: with_layout(p, (0, 50, 100), (2, 0, 50)),
        "plan 0: boxes are not in order of bucket and span; a box is known by its place",
    ),
    "owner holds": (
        lambda p: with_box(p, 0, holders=(Rank(0),)),
        "plan 0: box [0, 64) of bucket u0 is owned and held by rank 0; a holder is another rank than the owner",
    ),
    "held twice": (
        lambda p: with_box(p, 0, holders=(Rank(2), Rank(2))),
        "plan 0: box [0, 64) of bucket u0 is held by (2, 2); a rank holds a box once",
    ),
    "held by a stranger": (
        lambda p: with_box(p, 0, holders=(Rank(9),)),
        "plan 0: box [0, 64) of bucket u0 is held by rank 9, which has no tile",
    ),
    "syncing but no holder": (
        lambda p: with_box(p, 0, catching_up=(Rank(1),)),
        "plan 0: box [0, 64) of bucket u0 is awaited by (1,) and held by (2,); those that sync are holders",
    ),
    "readers": (
        lambda p: with_box(p, 0, readers=(Rank(0), Rank(1))),
        "plan 0: box [0, 64) of bucket u0 is read by (0, 1); users of its bucket run on (0, 2)",
    ),
    "missing hop": (
        lambda p: without_hop(p, 0),
        "plan 0: value h1 into micro-batch 0 of rank 1 arrives 0 times; once is due",
    ),
    "repeated hop": (
        lambda p: deriving(p, hops=(p.hops[0], *p.hops)),
        "plan 0: value h1 into micro-batch 0 of rank 1 arrives 2 times",
    ),
    "hop of other samples": (
        lambda p: with_hop(p, 0, samples=Span(0, 1)),
        "plan 0: hop of value h1 from rank 0 to rank 1: samples [0, 1) are not those of micro-batch 0 of rank 0, [0,",
    ),
    "hop of no micro-batch": (
        lambda p: with_hop(p, 0, source_micro_batch=9),
        "plan 0: hop of value h1 from rank 0 to rank 1: rank 0 has no micro-batch 9",
    ),
    "hop to nobody": (
        lambda p: with_hop(p, 0, target=Rank(0), target_micro_batch=0),
        "plan 0: hop of value h1 from rank 0 to rank 0: it joins two different ranks",
    ),
    "unneeded hop": (
        lambda p: with_hop(p, 0, value=0),
        "plan 0: hop of value h0 from rank 0 to rank 1: the target needs no piece of it",
    ),
    "hop of another lane": (
        lambda p: with_hop(p, 0, source=Rank(2)),
        "plan 0: hop of value h1 from rank 2 to rank 1: samples [0, 2) are not those of micro-batch 0 of rank 2, [8,",
    ),
    "hop backwards": (
        lambda p: with_hop(p, 0, source=Rank(1), target=Rank(0)),
        "plan 0: hop of value h1 from rank 1 to rank 0: the target needs no piece of it",
    ),
    "schedule of a stranger": (
        lambda p: replace(p, schedule={**p.schedule, Rank(9): ()}),
        "plan 0: rank 9 has a schedule and no tile",
    ),
    "lanes at the end": (
        lambda p: replace(p, terminal_reason="no ranks"),
        "plan 0: 2 lanes, and no step can be taken: no ranks; nobody computes then",
    ),
    "micro-batch left out": (
        lambda p: with_schedule(p, 1, "F0 B0 F1 B1 F2 B2"),
        "plan 0: schedule of rank 1 has B3 0 times",
    ),
    "backward first": (
        lambda p: with_schedule(p, 1, "B0 F0 F1 B1 F2 B2 F3 B3"),
        "plan 0: schedule of rank 1 has B0 before F0",
    ),
    "beyond the bound": (
        lambda p: with_schedule(p, 1, "F0 F1 B0 B1 F2 B2 F3 B3"),
        "plan 0: schedule of rank 1 holds 2 micro-batches in flight; its bound is 1",
    ),
    "memory": (
        lambda p: with_memory(p, 5000),
        "plan 0: rank 0 needs 5280 bytes and has 5000; a tile fits in the memory of its rank",
    ),
    "deadlock": (
        lambda p: with_bound(
            with_schedule(with_schedule(p, 0, "F0 B0 F1 B1 F2 B2 F3 B3"), 1, "F0 F1 B0 B1 F2 B2 F3 B3"), 1, 2
        ),
        "plan 0: training: deadlock: rank 0 at BACKWARD 1 0, rank 1 at FORWARD 2 1 wait for each other",
    ),
}


HALVES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "weight half left out": (
        lambda p: with_schedule(p, 1, "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3"),
        "plan 0: schedule of rank 1 has W3 0 times; every micro-batch goes forward once and backward once, whole or in",
    ),
    "weight half twice": (
        lambda p: with_schedule(p, 1, "F0 I0 W0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"),
        "plan 0: schedule of rank 1 has W0 2 times",
    ),
    "whole and in halves": (
        lambda p: with_schedule(p, 1, "F0 B0 F1 I1 W1 F2 I2 W2 F3 I3 W3"),
        "plan 0: schedule of rank 1 has B0 1 times",
    ),
    "weight half first": (
        lambda p: with_schedule(p, 1, "F0 W0 I0 F1 I1 W1 F2 I2 W2 F3 I3 W3"),
        "plan 0: schedule of rank 1 has W0 before I0; weight halves follow input halves",
    ),
    "input half first": (
        lambda p: with_schedule(p, 1, "I0 F0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"),
        "plan 0: schedule of rank 1 has I0 before F0; backward follows forward",
    ),
    "all weight halves last": (
        lambda p: with_schedule(p, 0, "F0 F1 I0 F2 I1 F3 I2 I3 W0 W1 W2 W3"),
        "plan 0: schedule of rank 0 leaves 4 micro-batches between the halves of backward; its bound is 1",
    ),
    "memory": (
        lambda p: with_memory(p, 5000),
        "plan 0: rank 0 needs 8560 bytes and has 5000; a tile fits in the memory of its rank",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HALVES)
def test_a_planted_violation_of_halves_is_named(kind: str) -> None:
    plant, message = HALVES[kind]
    check_plan(in_halves())
    with pytest.raises(PlanError, match="^" + re.escape(message)):
        check_plan(plant(in_halves()))


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_violation_is_named(kind: str) -> None:
    plant, message = PLANTED[kind]
    with pytest.raises(PlanError, match="^" + re.escape(message)) as caught:
        check_plan(plant(good()))
    assert "\n" not in str(caught.value)


def test_a_good_plan_passes() -> None:
    check_plan(good())
    check_plan(with_memory(good(), 5520))
    workload = chain(4, 16)
    check_plan(make_plan(local_topology(5), workload, wide_lane(workload), "wide"))


def test_a_tile_has_any_number_of_spans() -> None:
    workload = chain(2, 18)
    odd, even = (tuple(Span(i, i + 1) for i in range(first, 18, 2)) for first in (0, 1))
    plan = make_plan(local_topology(2), workload, (lane([((0,), (0, 2))], odd), lane([((1,), (0, 2))], even)), "combs")
    check_plan(plan)
    assert [len(tile.work) for tile in plan.tiles] == [9, 9]


def test_granules_are_not_split() -> None:
    plan = with_lane(good(granule=2), 0, micro_batches=(Span(0, 3), Span(3, 4), Span(4, 6), Span(6, 8)))
    assert next(plan_violations(plan)) == (
        "micro-batch 0 of rank 0 is [0, 3); micro-batches begin and end at granules of 2"
    )


def test_batch_coupled_programs_run_one_granule_at_a_time() -> None:
    plan = good(granule=2, batch_coupled=True)
    check_plan(plan)
    three = tuple(replace(stage, deal=(3,)) for stage in plan.lanes[0].stages)
    joined = with_lane(plan, 0, stages=three, micro_batches=(Span(0, 4), Span(4, 6), Span(6, 8)))
    assert next(plan_violations(joined)) == (
        "micro-batch 0 of rank 0 has 4 samples; batch-coupled programs and exact sums take one granule of 2 at a time"
    )


def test_a_value_without_samples_arrives_once() -> None:
    workload = chain(4, 16)
    plan = make_plan(local_topology(5), workload, wide_lane(workload, 4), "wide")
    bias = next(i for i, v in enumerate(workload.values) if v.name == "bias")
    arriving = next(i for i, h in enumerate(plan.hops) if h.value == bias)
    assert "value bias into micro-batch 0 of rank 3 arrives 0 times" in " ".join(
        plan_violations(without_hop(plan, arriving))
    )


def test_hops_join_neighbouring_users() -> None:
    workload = chain(4, 8)
    plan = make_plan(local_topology(4), workload, even_lanes(workload, 1, 4, 8), "deep")
    skip = next(i for i, v in enumerate(workload.values) if v.name == "skip")
    last = next(i for i, h in enumerate(plan.hops) if (h.value, h.target) == (skip, 3))
    with pytest.raises(PlanError, match="hop of value skip from rank 0 to rank 3: it is due from rank 2; hops join"):
        check_plan(with_hop(plan, last, source=Rank(0)))


def with_idle_member(plan: Plan, *tile: Tile, schedule: str = "") -> Plan:
    """One more member, in no lane, with this tile."""
    found = with_schedule(with_member(plan, 7), 7, schedule)
    return deriving(found, tiles=(*plan.tiles, *tile))


def test_a_member_in_no_lane_has_an_empty_tile() -> None:
    nothing = Tile(Rank(7), Runs(), ())
    assert list(plan_violations(with_idle_member(good(), nothing))) == []
    lists = {rank: step_program(good(), rank).instructions for rank in good().ranks}
    check_instructions(with_idle_member(good(), nothing), {**lists, Rank(7): (("VOTE",), ("SNAPSHOT",))})
    with pytest.raises(PlanError, match="rank 7 ends without SNAPSHOT"):
        check_instructions(with_idle_member(good(), nothing), lists)
    for units, samples, words in ((Runs.of(Span(0, 2)), (), "none"), (Runs(), (Span(0, 2),), r"\[0, 2\)")):
        (message,) = plan_violations(with_idle_member(good(), Tile(Rank(7), units, samples)))
        assert re.match(f"rank 7 has a tile of units .* and samples {words}, and its lane gives it units", message)
    assert list(plan_violations(with_idle_member(good(), nothing, schedule="F0 B0"))) == [
        "schedule of rank 7 has B0 1 times; every micro-batch goes forward once and backward once, whole or in halves"
    ]


def test_the_last_plan_of_a_job_has_nobody_who_computes() -> None:
    plan = good()
    last = terminal_plan(plan, (Rank(0), Rank(2)), {n: (Rank(2),) for n in range(len(plan.boxes))}, "the end")  # type: ignore[misc]
    check_plan(last)
    with pytest.raises(PlanError, match="unit 0 x samples .* is covered by no tile"):
        check_plan(replace(last, terminal_reason=""))


Edit = Callable[[list[Instruction]], None]


def _at(instructions: list[Instruction], *head: int | str) -> int:
    return next(i for i, found in enumerate(instructions) if found[: len(head)] == head)


def _drop(*head: int | str) -> Edit:
    return lambda instructions: instructions.__delitem__(_at(instructions, *head))


def _move_to(position: int, *head: int | str) -> Edit:
    return lambda instructions: instructions.insert(position, instructions.pop(_at(instructions, *head)))


def _change(index: int, by: int, *head: int | str) -> Edit:
    def edit(instructions: list[Instruction]) -> None:
        at = _at(instructions, *head)
        found = list(instructions[at])
        found[index] = int(found[index]) + by
        instructions[at] = tuple(found)

    return edit


def _insert(position: int, *instruction: int | str) -> Edit:
    return lambda instructions: instructions.insert(position, instruction)


EDITS: dict[str, tuple[int, Edit, str]] = {
    "receive left out": (1, _drop("RECV", 1), "FORWARD 2 0: the value h1 of micro-batch 0 is not posted exactly once"),
    "receive too late": (1, _move_to(99, "RECV", 1), "the value h1 of micro-batch 0 is not posted exactly once"),
    "receive twice": (1, _insert(0, "RECV", 1, 0, 0, 5, 0, 2, 0), "is not posted exactly once"),
    "send left out": (0, _drop("SEND", 1), "deadlock: rank 0 at BACKWARD 1 0, rank 1 at FORWARD 2 0 wait"),
    "size": (0, _change(6, -1, "SEND", 1), "rank 0 sends 100 bytes to rank 1 under tag"),
    "slice": (0, _change(6, 1, "SEND", 1), "[0, 3) is not within the 2 samples of the micro-batch"),
    "tag": (0, _change(4, 1 << 10, "SEND", 1), "deadlock"),
    "peer": (0, _change(3, 7, "SEND", 1), "rank 8 is no peer"),
    "send too early": (0, _move_to(0, "SEND", 1), "value h1 of micro-batch 0 is read before unit 1 ran"),
    "forward order": (0, _move_to(0, "FORWARD", 1), "units run forward in ascending order"),
    "forward twice": (0, _insert(1, "FORWARD", 0, 0), "each unit of the tile runs once for each micro-batch"),
    "foreign unit": (0, _insert(0, "FORWARD", 2, 0), "each unit of the tile runs once for each micro-batch"),
    "backward order": (1, _drop("BACKWARD", 3), "units run backward in descending order"),
    "backward first": (1, _move_to(0, "BACKWARD", 3), "each unit of the tile runs backward once, after its forward"),
    "gradient too early": (1, _move_to(7, "SEND", 1, 0, 0, 2 << 56 | 1 << 32), "leaves before unit 2 has added to it"),
    "gradient not awaited": (0, _drop("RECV", 1), "the gradient of value h1 of micro-batch 0 is not posted exactly"),
    "bias not awaited": (0, _drop("RECV", 5), "the gradient of value bias of micro-batch 0 is not posted exactly once"),
    "mask has no gradient": (0, _insert(0, "RECV", 4, 0, 1, 5, 0, 2, 1), "the value has no gradient here"),
    "reduce too early": (0, _move_to(9, "REDUCE", 0), "unit 0 has yet to add micro-batch"),
    "reduce left out": (0, _drop("REDUCE", 4), "reduction of every bucket (missing: [4])"),
    "foreign reduce": (0, _insert(0, "REDUCE", 2), "the rank neither reads nor owns anything of that bucket"),
    "update before vote": (0, _drop("VOTE"), "UPDATE 0: parameters change only after the vote"),
    "update left out": (0, _drop("UPDATE", 0), "GATHER 0: an owner updates before it gathers"),
    "update by a reader": (1, _insert(-1, "UPDATE", 4), "the rank owns nothing of that bucket"),
    "gather left out": (0, _drop("GATHER", 1), "the snapshot follows the vote and the gather of every bucket"),
    "vote twice": (0, _insert(-1, "VOTE"), "it is done once a step"),
    "no snapshot": (0, _drop("SNAPSHOT"), "rank 0 ends without SNAPSHOT"),
    "list cut short": (1, lambda i: i.__delitem__(slice(9, None)), "deadlock"),
    "operands": (0, _insert(0, "FORWARD", 0), "there is no such instruction with that number of operands"),
    "opcode": (0, _insert(0, "JUMP", 0), "there is no such instruction"),
    "unwanted send": (0, _insert(-1, "SEND", 1, 0, 1, 77, 0, 2, 0), "what rank 1 never receives; pieces match"),
    "all at once": (
        1,
        lambda i: i.__setitem__(slice(None), sorted(i, key=lambda x: x[0] != "RECV" or x[-1] != 0)),
        "3 micro-batches are posted or in flight; the bound is 2",
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_a_planted_fault_in_an_instruction_list_is_named(kind: str) -> None:
    rank, edit, message = EDITS[kind]
    plan = make_plan(local_topology(2), chain(4, 8), even_lanes(chain(4, 8), 1, 2, 2), "one pipeline")
    lists = {r: list(step_program(plan, r).instructions) for r in plan.ranks}
    check_instructions(plan, lists)
    edit(lists[Rank(rank)])
    with pytest.raises(PlanError, match="^plan 0: training: .*" + re.escape(message)):
        check_instructions(plan, lists)


def test_what_both_sides_agree_on_is_still_what_is_due() -> None:
    """Ranks 0 and 2 send the values of their first micro-batches to the second ranks of each other's lanes, and those
    expect them there."""
    plan = good()
    lists = {r: list(step_program(plan, r).instructions) for r in plan.ranks}
    peers = {0: (1, 3), 1: (0, 2), 2: (3, 1), 3: (2, 0)}
    for rank, (own, other) in peers.items():
        at = _at(lists[Rank(rank)], "SEND" if rank in (0, 2) else "RECV", 1, 0, own)
        lists[Rank(rank)][at] = tuple(other if i == 3 else each for i, each in enumerate(lists[Rank(rank)][at]))
    with pytest.raises(PlanError, match="the value h1 of micro-batch 0 goes to rank 1; values go from user to user"):
        check_instructions(plan, lists)


def test_equal_tags_of_other_samples_are_found() -> None:
    """The first two micro-batches swap their tags on the way; they are equally large, and everything arrives."""
    plan = make_plan(local_topology(2), chain(4, 8), even_lanes(chain(4, 8), 1, 2, 2), "one pipeline")
    lists = {r: list(step_program(plan, r).instructions) for r in plan.ranks}
    first, second = (_at(lists[Rank(0)], "SEND", 1, mb) for mb in (0, 1))
    a, b = lists[Rank(0)][first], lists[Rank(0)][second]
    lists[Rank(0)][first], lists[Rank(0)][second] = (*a[:4], b[4], *a[5:]), (*b[:4], a[4], *b[5:])
    with pytest.raises(PlanError, match=r"rank 0 sends samples \[0, 2\) of h1 of its micro-batch 1 to rank 1 under tag "
                       r".*, which expects that of its micro-batch 0; both sides mean the same samples"):  # fmt: skip
        check_instructions(plan, lists)


def test_equal_tags_of_other_values_are_found() -> None:
    """Two values of equally many bytes change places on the way."""
    workload = replace(chain(4, 8), values=tuple(replace(v, bytes_per_sample=100) for v in chain(4, 8).values))
    plan = make_plan(local_topology(2), workload, even_lanes(workload, 1, 2, 2), "one pipeline")
    lists = {r: list(step_program(plan, r).instructions) for r in plan.ranks}
    first, second = _at(lists[Rank(0)], "SEND", 1, 0), _at(lists[Rank(0)], "SEND", 3, 0)
    a, b = lists[Rank(0)][first], lists[Rank(0)][second]
    lists[Rank(0)][first], lists[Rank(0)][second] = (*a[:4], b[4], *a[5:]), (*b[:4], a[4], *b[5:])
    with pytest.raises(PlanError, match=r"rank 0 sends samples \[0, 2\) of .* to rank 1 under tag .*, which expects "
                       r"samples \[0, 2\) of .*; both sides agree on what travels"):  # fmt: skip
        check_instructions(plan, lists)


HALF_EDITS: dict[str, tuple[int, Edit, str]] = {
    "weights first": (1, _move_to(0, "BACKWARD_WEIGHTS", 3), "the weight half of a unit runs once, after its input"),
    "weights twice": (1, _insert(-8, "BACKWARD_WEIGHTS", 2, 0), "the weight half of a unit runs once, after its input"),
    "weights left out": (1, _drop("BACKWARD_WEIGHTS", 2, 0), "REDUCE 2: unit 2 has yet to add micro-batch 0 to that"),
    "weight order": (1, _drop("BACKWARD_WEIGHTS", 3, 0), "weight halves run in descending order of units"),
    "reduced before": (0, _move_to(20, "REDUCE", 0), "unit 0 has yet to add micro-batch"),
    "halves and whole": (1, _insert(5, "BACKWARD", 3, 0), "each unit of the tile runs backward once"),
    "gradient too early": (1, _move_to(5, "SEND", 1, 0, 0, 2 << 56 | 1 << 32), "before unit 2 has added to it"),
    "inputs left out": (0, _drop("BACKWARD_INPUTS", 0, 3), "the weight half of a unit runs once, after its input half"),
}


@pytest.mark.parametrize("kind", HALF_EDITS)
def test_a_planted_fault_in_a_list_of_halves_is_named(kind: str) -> None:
    rank, edit, message = HALF_EDITS[kind]
    plan = in_halves()
    lists = {r: list(step_program(plan, r).instructions) for r in plan.ranks}
    check_instructions(plan, lists)
    edit(lists[Rank(rank)])
    with pytest.raises(PlanError, match="^plan 0: training: .*" + re.escape(message)):
        check_instructions(plan, lists)


def test_evaluation_has_no_backward() -> None:
    plan = good()
    lists = {r: list(eval_program(plan, r).instructions) for r in plan.ranks}
    check_instructions(plan, lists, "evaluation")
    lists[Rank(0)].append(("VOTE",))
    with pytest.raises(PlanError, match=r"evaluation: rank 0, instruction .*VOTE: evaluation only receives, sends and"):
        check_instructions(plan, lists, "evaluation")
