"""Owners follow the ranks: as they come and go, those that read a box own as much of what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.planner import plan_lanes
from elaswave_fx.plan.next.replan import replan, wants_move
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.replicas.holders import ReplicaSources, bucket_sharers, reassign_boxes
from elaswave_fx.plan.replicas.owners import UNEVEN, largest_deviation
from elaswave_fx.plan.work.box import Box, numbered
from elaswave_fx.plan.work.cost import Bucket, UnitCost, Value, Workload
from elaswave_fx.plan.work.options import PlanOptions
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank, local_topology

BOXES = 24
"""Of a bucket: enough for six ranks to share them."""


IN_ORDER = {Rank(rank): rank for rank in range(8)}


def job(units: int = 4) -> Workload:
    return Workload(
        tuple(UnitCost(1e-3, 2e-3) for _ in range(units)),
        tuple(Value(f"h{unit}", unit, (unit + 1,), 64) for unit in range(units - 1)),
        tuple(Bucket(f"b{unit}", 32 * BOXES, (unit,)) for unit in range(units)),
        PlanOptions(48),
        least_elements=32,
    )


def deviation_of(plan: Plan) -> float:
    """By how much the owned shares of a plan differ from even ones, at most."""
    sharers = bucket_sharers(plan.workload, plan.tiles)
    return largest_deviation(plan.boxes, lambda box: sharers[box.bucket])


def settle(plan: Plan, count: int) -> tuple[Plan, int]:
    """Plan again with all replicas complete until nothing wants to move; how often that took."""
    for rounds in range(6):
        have = {number: box.replica_ranks for number, box in numbered(plan.boxes)}
        if not wants_move(plan, have, count):
            return plan, rounds
        plan = replan(plan, plan.ranks, have, count)
        check_plan(plan)
    raise AssertionError("replicas move for ever")


def change(plan: Plan, members: int, count: int) -> Plan:
    """To so many ranks, of which those that stay have all their replicas; checked."""
    ranks = tuple(map(Rank, range(members)))
    have = {n: tuple(r for r in box.replica_ranks if r < members) for n, box in numbered(plan.boxes)}
    if not all(have.values()):  # all of them are lost: a rollback, in which everybody has everything
        have = dict.fromkeys(have, ranks)
    after = replan(plan, ranks, have, count)
    check_plan(after)
    return after


@pytest.mark.parametrize("count", [0, 1, 2])
def test_ranks_that_come_own_as_much_as_others_and_so_do_those_that_are_left(count: int) -> None:
    plan = plan_lanes(job(), local_topology(1), [(1,)], replicas=count)
    for members in (2, 4, 6, 5, 3, 1):
        after = change(plan, members, count)
        for old, new in zip(plan.boxes, after.boxes, strict=True):
            known = members >= len(plan.ranks)
            assert not known or new.owner in old.replica_ranks, "an owner has a replica from the start"
        plan, rounds = settle(after, count)
        assert deviation_of(plan) <= UNEVEN, (members, plan.reason)
        assert rounds <= 2
        assert all(len(box.holders) == min(count, members - 1) for box in plan.boxes)


def stage(owners: list[int], readers: int, holders: tuple[int, ...] = ()) -> list[Box]:
    """Boxes of ten elements, with these owners, that so many ranks read."""
    return [
        Box(0, Span(10 * n, 10 * n + 10), Rank(owner), tuple(map(Rank, holders)), (), tuple(map(Rank, range(readers))))
        for n, owner in enumerate(owners)
    ]


def test_a_replica_that_is_there_takes_over_at_once_and_one_that_is_not_later() -> None:
    held = stage([0] * 8, 2, holders=(1,))
    now = reassign_boxes(held, ReplicaSources(local_topology(2, 1), [(Rank(0), Rank(1))] * 8, 1, IN_ORDER))
    assert sum(box.owner == 1 for box in now) in (3, 4) and not any(box.catching_up for box in now)
    alone = stage([0] * 8, 2)
    later = reassign_boxes(alone, ReplicaSources(local_topology(2, 1), [(Rank(0),)] * 8, 0, IN_ORDER))
    assert all(box.owner == 0 for box in later)
    assert [box.catching_up for box in later].count((1,)) in (3, 4), "only what it is to own"


def test_the_old_owner_keeps_its_replica_until_the_new_holders_are_in_sync() -> None:
    boxes = stage([0] * 8, 3, holders=(1,))
    syncing = reassign_boxes(boxes, ReplicaSources(local_topology(3, 1), [(Rank(0), Rank(1))] * 8, 1, IN_ORDER))
    future = [box for box in syncing if box.catching_up]
    assert future and all({0, 1, 2} == {*box.replica_ranks} and box.catching_up == (2,) for box in future)
    have = [tuple(sorted(box.replica_ranks)) for box in syncing]
    done = reassign_boxes(syncing, ReplicaSources(local_topology(3, 1), have, 1, IN_ORDER))
    assert sum(box.owner == 2 for box in done) == len(future)
    assert all(len(box.holders) == 1 and not box.catching_up for box in done)


def test_boxes_that_are_too_few_stay_where_they_are() -> None:
    boxes = stage([0, 1], 3, holders=(2,))
    after = reassign_boxes(
        boxes, ReplicaSources(local_topology(3, 1), [(Rank(b.owner), Rank(2)) for b in boxes], 1, IN_ORDER)
    )
    assert [box.owner for box in after] == [0, 1] and largest_deviation(after, lambda box: box.readers) == 1.0


def test_a_first_plan_is_at_rest() -> None:
    """Also where a bucket has users on several stages: owners are even among those that they were dealt to."""
    work = job(6)
    tied = (Bucket("ends", 32 * BOXES, (0, 5)), *work.buckets)
    for buckets in (work.buckets, tied):
        for widths in ([(1, 1)] * 2, [(1, 1, 1, 1)] * 4, [(2, 1)], [(1,)] * 5):
            workload = replace(work, buckets=buckets)
            ranks = sum(map(sum, widths))
            plan = plan_lanes(workload, local_topology(ranks), widths)
            have = {number: box.replica_ranks for number, box in numbered(plan.boxes)}
            assert not wants_move(plan, have, 1), (widths, len(buckets))
