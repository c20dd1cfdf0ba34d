"""Who keeps a replica of which box in the first plan, and what that takes in memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.describe import fatal_words
from elaswave_fx.plan.lower.step import step_program
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import plan_uniform
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.memory import per_parameter
from elaswave_fx.plan.replicas.holders import (
    ALIGNMENT,
    BOXES,
    cut_bucket,
    deal_owners,
    fatal_losses,
    least_elements,
    with_readers,
)
from elaswave_fx.plan.work.box import Box
from elaswave_fx.plan.work.cost import Bucket
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.tiling import tiles_of
from elaswave_fx.plan.work.topology import Rank, local_topology
from tests.plan.samples import chain, even_lanes


def planned(dp: int, pp: int, replicas: int = 1, ranks_per_host: int = 2, units: int = 8) -> Plan:
    topology = local_topology(dp * pp, ranks_per_host)
    plan = plan_uniform(chain(units, 24), topology, dp, pp, replicas)
    check_plan(plan)
    return plan


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_replicas_lie_on_other_hosts_where_there_are_any(dp: int, pp: int, replicas: int, ranks_per_host: int) -> None:
    plan = planned(dp, pp, replicas, ranks_per_host)
    host = {m.rank: m.host for m in plan.topology.members}
    for box in plan.boxes:
        elsewhere = [r for r in plan.ranks if host[r] != host[box.owner]]
        assert len(box.holders) == min(replicas, len(plan.ranks) - 1)
        assert sum(host[r] != host[box.owner] for r in box.holders) == min(replicas, len(elsewhere))
        assert not box.catching_up


def test_holders_read_the_bucket_where_another_host_does() -> None:
    plan = planned(2, 2)
    assert all(box.holders[0] in box.readers for box in plan.boxes)


@pytest.mark.parametrize(("dp", "pp", "hosts_of"), [(6, 1, 2), (4, 1, 1), (3, 1, 1), (5, 1, 1), (4, 4, 2), (2, 2, 2)])
def test_few_losses_at_once_are_fatal_and_all_ranks_hold_as_much(dp: int, pp: int, hosts_of: int) -> None:
    plan = planned(dp, pp, units=24, ranks_per_host=hosts_of)
    held: Counter[Rank] = Counter()
    for box in plan.boxes:
        held[box.holders[0]] += len(box.span)
    owned = [sum(len(b.span) for b in plan.boxes if b.owner == rank) for rank in plan.ranks]
    assert max(held.values()) - min(held.values()) <= max(owned) - min(owned) + max(len(b.span) for b in plan.boxes)
    odd_ring = 3 * pp if dp % 2 else 0
    assert len(fatal_losses(plan.boxes)) == (dp * pp - odd_ring) // 2 + odd_ring


def test_stages_with_equal_first_and_last_ranks_are_dealt_apart() -> None:
    """Each bucket has two boxes: who has got none of its own stage's buckets gets one of the next."""
    runs = [tuple(map(Rank, ranks)) for ranks in (*[(0, 2, 4)] * 3, *[(0, 3, 4)] * 2, (1, 3, 5))]
    boxes = deal_owners(chain(6), runs)
    assert {box.owner for box in boxes if box.bucket in (3, 4)} == {0, 3, 4}


def test_losses_that_cost_the_state_are_those_of_all_replicas() -> None:
    plan = planned(3, 2, replicas=2)
    fatal = fatal_losses(plan.boxes)
    for size in range(1, 6):
        for lost in itertools.combinations(plan.ranks, size):
            is_lost = any(set(box.replica_ranks) <= set(lost) for box in plan.boxes)
            assert is_lost == any(set(least) <= set(lost) for least in fatal), lost
    syncing = tuple(replace(box, catching_up=box.holders) for box in plan.boxes)
    assert fatal_losses(syncing) == tuple((rank,) for rank in plan.ranks)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            (2, 2, 1, 2),
            "any single rank can fail; losing ranks 0, 2 or ranks 1, 3 together loses state (2 of 6 combinations); "
            "then it ends",
        ),
        ((2, 1, 1, 2), "state survives as long as one rank does"),
        ((2, 1, 0, 2), "losing rank 0 or rank 1 loses state; then it ends"),
        (
            (4, 1, 1, 4),
            "any single rank can fail; losing ranks 0, 1 or ranks 2, 3 together loses state (2 of 6 combinations), "
            "and so does losing all of host 0; then it ends",
        ),
    ],
)
def test_it_is_said_which_losses_cost_the_state(shape: tuple[int, int, int, int], words: str) -> None:
    assert fatal_words(planned(*shape), "it ends") == words


def test_the_second_replica_lies_on_a_third_host() -> None:
    host = {m.rank: m.host for m in local_topology(6).members}
    for box in planned(3, 2, replicas=2).boxes:
        assert len({host[r] for r in (box.owner, *box.holders)}) == 3


def test_replicas_count_in_memory_like_what_is_owned() -> None:
    with_replicas, without = planned(2, 2), planned(2, 2, replicas=0)
    state = with_replicas.workload.state_bytes_per_element
    for rank in with_replicas.ranks:
        held = sum(len(b.span) for b in with_replicas.boxes if rank in b.holders)
        more = with_replicas.predicted.ranks[rank].memory_bytes - without.predicted.ranks[rank].memory_bytes
        assert more == state * held > 0
    records = sum(cost.copied_bytes for cost in with_replicas.predicted.ranks.values())
    assert records == 4 * sum(b.numel for b in with_replicas.workload.buckets)
    assert not any(cost.copied_bytes for cost in without.predicted.ranks.values())


def test_a_refusal_counts_replicas_and_names_them() -> None:
    limit = max(c.memory_bytes for c in planned(2, 1, replicas=0).predicted.ranks.values())
    topology = local_topology(2, 1, limit)
    plan_uniform(chain(8, 24), topology, 2, 1, 0)
    lean = replace(planned(2, 1).workload, state_bytes_per_element=100)
    with pytest.raises(ConfigError, match=r"parallel.pp=1: does not fit in memory: .* with copies.count=1, a rank has"):
        plan_uniform(lean, topology, 2, 1)


def test_layouts_are_owners_and_spans() -> None:
    plan = planned(2, 2)
    assert plan.layouts["u0"] == ((0, Span(0, 64)), (2, Span(64, 100)))
    handed_over = replace(plan, boxes=tuple(replace(b, owner=Rank(3), holders=()) for b in plan.boxes))
    assert handed_over.layouts["u0"] == ((3, Span(0, 64)), (3, Span(64, 100)))


def test_an_owner_that_does_not_read_the_bucket_takes_part_in_its_sum() -> None:
    workload = chain(4, 8)
    lanes = even_lanes(workload, 1, 2, 4)
    owned = [Box(i, Span(0, b.numel), Rank(1)) for i, b in enumerate(workload.buckets)]
    boxes = with_readers(owned, workload, tiles_of(lanes))
    plan = make_plan(local_topology(2), workload, lanes, "all owned by the last stage", boxes=boxes)
    check_plan(plan)
    lists = [step_program(plan, rank).instructions for rank in plan.ranks]
    assert lists[1][:2] == (("REDUCE", 0), ("REDUCE", 1))
    assert lists[1][-5:] == (("UPDATE", 0), ("GATHER", 0), ("UPDATE", 1), ("GATHER", 1), ("SNAPSHOT",))
    assert not any(i[0] == "UPDATE" for i in lists[0])
    numel = [b.numel for b in workload.buckets]
    assert plan.predicted.ranks[Rank(0)].reduced_bytes == 4 * (numel[0] + numel[1] + numel[4])
    assert plan.predicted.ranks[Rank(1)].gathered_bytes == 4 * (numel[0] + numel[1] + numel[4])


def test_memory_per_parameter_counts_every_replica() -> None:
    plan, alone = planned(2, 2), planned(2, 2, replicas=0)
    ours, bare = per_parameter(plan), per_parameter(alone)
    base = plan.workload.state_bytes_per_element - 4
    assert (ours["state"], ours["copies"], bare["copies"]) == (base, base, 0)
    assert (ours["records"], bare["records"], per_parameter(plan, "state")["records"]) == (8, 4, 4)
    assert ours["parameters"] == bare["parameters"] >= 2 * min(bucket.element_bytes for bucket in plan.workload.buckets)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(100, 10**6))
def test_boxes_of_a_bucket_are_equal_aligned_and_not_too_small(numel: int, least: int) -> None:
    spans = cut_bucket(numel, least)
    assert [span.lo for span in spans] == [0, *(span.hi for span in spans[:-1])] and spans[-1].hi == numel
    assert all(span.lo % ALIGNMENT == 0 for span in spans)
    count, sizes = len(spans), {len(span) for span in spans}
    assert count == 1 or max(sizes) - min(sizes) < 2 * ALIGNMENT
    assert count == 1 or min(sizes) > least - 2 * ALIGNMENT
    # Twice as many would be too small: no bucket is cut more coarsely than it must be.
    assert 2 * count * max(least, ALIGNMENT) > numel
    assert (count & -count) in (count, count // 3)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 300_000), min_size=3, max_size=12))
def test_boxes_are_those_of_the_program_and_shared_evenly(dp: int, pp: int, sizes: list[int]) -> None:
    shape = chain(len(sizes), 24)
    buckets = tuple(Bucket(f"u{i}", numel, (i,)) for i, numel in enumerate(sizes))
    workload = replace(shape, buckets=buckets, least_elements=least_elements(sum(sizes)))
    plan = plan_uniform(workload, local_topology(dp * pp), dp, pp)
    check_plan(plan)
    alone = plan_uniform(workload, local_topology(1), 1, 1)
    assert [(b.bucket, b.span) for b in plan.boxes] == [(b.bucket, b.span) for b in alone.boxes]
    for stage in {tile.units for tile in plan.tiles}:
        ranks = [tile.rank for tile in plan.tiles if tile.units == stage]
        owned = [sum(len(box.span) for box in plan.boxes if box.owner == rank) for rank in ranks]
        rounding = ALIGNMENT * len(plan.boxes)  # a box is cut at a multiple of it
        assert max(owned) - min(owned) <= max(len(box.span) for box in plan.boxes) + rounding
    for index in range(len(sizes)):
        owners = [box.owner for box in plan.boxes if box.bucket == index]
        assert owners == sorted(owners), "a rank owns one run of a bucket"


def test_a_large_program_has_boxes_for_eight_times_its_ranks() -> None:
    numel = 10_000_000
    spans = cut_bucket(numel, least_elements(10 * numel))
    assert BOXES // 2 <= 10 * len(spans) <= BOXES
    small = [65536, 768, 131072]
    assert [len(cut_bucket(numel, least_elements(sum(small)))) for numel in small] == [8, 1, 16]
