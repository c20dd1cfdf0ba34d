"""Who keeps a copy of which box in the first plan, and what that takes in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_fx.errors import ConfigError
from elaswave_fx.plan.box import Box, Span
from elaswave_fx.plan.check import check_plan
from elaswave_fx.plan.copies import with_readers
from elaswave_fx.plan.derive import make_plan
from elaswave_fx.plan.memory import per_parameter
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.planner import Parallel, plan_uniform
from elaswave_fx.plan.step import step_program
from elaswave_fx.plan.topology import Rank, local_topology
from tests.plan.samples import chain, even_columns


def planned(dp: int, pp: int, copies: int = 1, ranks_per_host: int = 2, units: int = 8) -> Plan:
    topology = local_topology(dp * pp, ranks_per_host)
    plan = plan_uniform(chain(units, 24), topology, Parallel(dp, pp, copies=copies))
    check_plan(plan)
    return plan


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
def test_copies_lie_on_other_hosts_where_there_are_any(dp: int, pp: int, copies: int, ranks_per_host: int) -> None:
    plan = planned(dp, pp, copies, ranks_per_host)
    host = {m.rank: m.host for m in plan.topology.members}
    for box in plan.boxes:
        elsewhere = [r for r in plan.ranks if host[r] != host[box.owner]]
        assert len(box.holders) == min(copies, len(plan.ranks) - 1)
        assert sum(host[r] != host[box.owner] for r in box.holders) == min(copies, len(elsewhere))
        assert not box.catching_up


def test_holders_read_the_bucket_where_another_host_does() -> None:
    plan = planned(2, 2)
    assert all(box.holders[0] in box.readers for box in plan.boxes)


def test_copies_of_one_rank_spread_over_several_holders() -> None:
    plan = planned(6, 1, units=24)
    held: Counter[Rank] = Counter()
    holders_of: dict[Rank, Counter[Rank]] = {r: Counter() for r in plan.ranks}
    for box in plan.boxes:
        held[box.holders[0]] += len(box.span)
        holders_of[box.owner][box.holders[0]] += len(box.span)
    assert max(held.values()) - min(held.values()) <= max(len(b.span) for b in plan.boxes)
    assert all(len(spread) == 4 for spread in holders_of.values())


def test_the_second_copy_lies_on_a_third_host() -> None:
    host = {m.rank: m.host for m in local_topology(6).members}
    for box in planned(3, 2, copies=2).boxes:
        assert len({host[r] for r in (box.owner, *box.holders)}) == 3


def test_copies_count_in_memory_like_what_is_owned() -> None:
    with_copies, without = planned(2, 2), planned(2, 2, copies=0)
    state = with_copies.workload.state_bytes_per_element
    for rank in with_copies.ranks:
        held = sum(len(b.span) for b in with_copies.boxes if rank in b.holders)
        more = with_copies.predicted.ranks[rank].memory_bytes - without.predicted.ranks[rank].memory_bytes
        assert more == state * held > 0
    records = sum(cost.copied_bytes for cost in with_copies.predicted.ranks.values())
    assert records == 4 * sum(b.numel for b in with_copies.workload.buckets)
    assert not any(cost.copied_bytes for cost in without.predicted.ranks.values())


def test_a_refusal_counts_copies_and_names_them() -> None:
    limit = max(c.memory_bytes for c in planned(2, 1, copies=0).predicted.ranks.values())
    topology = local_topology(2, 1, limit)
    plan_uniform(chain(8, 24), topology, Parallel(2, 1, copies=0))
    lean = replace(planned(2, 1).workload, state_bytes_per_element=100)
    with pytest.raises(ConfigError, match=r"parallel.pp=1: does not fit in memory: .* with copies.count=1, a rank has"):
        plan_uniform(lean, topology, Parallel(2, 1))


def test_layouts_are_owners_and_spans() -> None:
    plan = planned(2, 2)
    assert plan.layouts["u0"] == ((0, Span(0, 50)), (2, Span(50, 100)))
    handed_over = replace(plan, boxes=tuple(replace(b, owner=Rank(3), holders=()) for b in plan.boxes))
    assert handed_over.layouts["u0"] == ((3, Span(0, 50)), (3, Span(50, 100)))


def test_an_owner_that_does_not_read_the_bucket_takes_part_in_its_sum() -> None:
    workload = chain(4, 8)
    tiles = even_columns(workload, 1, 2, 4)
    owned = [Box(i, Span(0, b.numel), Rank(1)) for i, b in enumerate(workload.buckets)]
    boxes = with_readers(owned, workload, tiles)
    plan = make_plan(local_topology(2), workload, tiles, "all owned by the last stage", boxes=boxes)
    check_plan(plan)
    lists = [step_program(plan, rank).instructions for rank in plan.ranks]
    assert lists[1][:2] == (("REDUCE", 0), ("REDUCE", 1))
    assert lists[1][-5:] == (("UPDATE", 0), ("GATHER", 0), ("UPDATE", 1), ("GATHER", 1), ("SNAPSHOT",))
    assert not any(i[0] == "UPDATE" for i in lists[0])
    numel = [b.numel for b in workload.buckets]
    assert plan.predicted.ranks[Rank(0)].reduced_bytes == 4 * (numel[0] + numel[1] + numel[4])
    assert plan.predicted.ranks[Rank(1)].gathered_bytes == 4 * (numel[0] + numel[1] + numel[4])


def test_memory_per_parameter_counts_every_copy() -> None:
    plan, alone = planned(2, 2), planned(2, 2, copies=0)
    ours, bare = per_parameter(plan), per_parameter(alone)
    base = plan.workload.state_bytes_per_element - 4
    assert (ours["state"], ours["copies"], bare["copies"]) == (base, base, 0)
    assert (ours["records"], bare["records"], per_parameter(plan, "state")["records"]) == (8, 4, 4)
    assert ours["parameters"] == bare["parameters"] >= 2 * plan.workload.work_bytes_per_element
