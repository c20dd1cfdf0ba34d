"""What syncing replicas need, and waves of replicas that keep to a bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.next.replan import replan
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.next.target_layout import successor, why_nothing_follows
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.transition import Transition
from elaswave_fx.plan.predict.transition_memory import (
    EXPECTED_RECORDS,
    LAG_STEPS,
    UNDER_WAY_BYTES,
    Needs,
    Short,
    first_wave,
    made_ahead,
    needed_without_replicas,
    room_for_replicas,
    transition_memory,
    without_room,
)
from elaswave_fx.plan.work.box import Box, BoxId, numbered
from elaswave_fx.plan.work.cost import Bucket
from elaswave_fx.plan.work.spans import Span
from elaswave_fx.plan.work.topology import Rank
from tests.plan.samples import asking
from tests.plan.test_reshape_requests import shape
from tests.plan.test_target_layout import change, job

REPLICA, SENT = 12 + 4 * (EXPECTED_RECORDS + 1), 12 + 4 * (LAG_STEPS + 1)
"""Bytes of an element that comes, and of one that goes, with master and two moments."""


def bounded(plan: Plan, switch_bytes: int | None) -> Plan:
    return replace(plan, topology=replace(plan.topology, switch_bytes=switch_bytes))


def square(elements: int = 80_000) -> Plan:
    return job(2, 2, units=8, samples=4, room=None, elements=elements)


def with_replicas(plan: Plan, *targets: tuple[int, int]) -> Plan:
    """The plan, in which a rank gets a replica of a box, for each (box, rank)."""
    boxes = list(plan.boxes)
    for number, rank in targets:
        box = boxes[number]
        assert rank not in box.replica_ranks
        boxes[number] = replace(box, holders=(*box.holders, Rank(rank)), catching_up=(*box.catching_up, Rank(rank)))
    return replace(plan, boxes=tuple(boxes))


def carried_out(plan: Plan, reshape: ReshapeRequest | None) -> Iterator[Plan]:
    """The plans from the reshape on, each with all replicas of the one before."""
    request = ReplanRequest(reshape=reshape)
    for _ in range(100):
        replicas = {number: box.replica_ranks for number, box in numbered(plan.boxes)}
        following = successor(plan, replicas, 1, request)
        if following is None:
            return
        check_plan(following)
        yield following
        plan, request = following, ReplanRequest()
    raise AssertionError("plans follow each other for ever")


def test_what_comes_and_what_goes_is_counted() -> None:
    plan = square()
    assert set(transition_memory(plan).values()) == {Needs()}
    box, size = plan.boxes[0], len(plan.boxes[0].span)
    target = next(rank for rank in plan.ranks if rank not in box.replica_ranks)
    needs = transition_memory(with_replicas(plan, (0, target)))
    assert needs[target] == Needs(replicas=12 * size, records=4 * (EXPECTED_RECORDS + 1) * size)
    assert needs[box.owner] == Needs(in_flight=SENT * size)
    assert all(needs[rank] == Needs() for rank in plan.ranks if rank not in (target, box.owner))


def test_an_owner_sends_a_bounded_number_of_bytes_at_once() -> None:
    plan = square(elements=2_000_000)
    numbers = [number for number, box in numbered(plan.boxes) if box.owner == 0]
    target = next(rank for rank in plan.ranks if rank not in plan.boxes[numbers[0]].replica_ranks)
    sent = with_replicas(plan, *((number, target) for number in numbers))
    largest = 12 * max(len(plan.boxes[number].span) for number in numbers)
    total = 12 * sum(len(plan.boxes[number].span) for number in numbers)
    assert UNDER_WAY_BYTES + largest < total
    catch_up = 4 * (LAG_STEPS + 1) * total // 12
    assert transition_memory(sent)[Rank(0)].in_flight == UNDER_WAY_BYTES + largest + catch_up


def test_of_buffers_a_record_has_all_granules() -> None:
    plan = square()
    first = plan.boxes[0].bucket
    buckets = list(plan.workload.buckets)
    buckets[first] = Bucket("buffers", buckets[first].numel, buckets[first].users, whole=True)
    plan = replace(plan, workload=replace(plan.workload, buckets=tuple(buckets)))
    target = next(rank for rank in plan.ranks if rank not in plan.boxes[0].replica_ranks)
    needs = transition_memory(with_replicas(plan, (0, target)))[target]
    assert needs.records == 4 * plan.workload.granules * (EXPECTED_RECORDS + 1) * len(plan.boxes[0].span)


def test_parameters_of_new_readers_are_counted_for_the_stop() -> None:
    plans = [square(), *carried_out(square(), ReshapeRequest(4, 1))]
    for before, after in pairwise(plans):
        found = {rank: needs.parameters for rank, needs in transition_memory(after, before).items()}
        gained = {
            rank: sum(8 * 10_000 * 4 for _ in units) for rank, units in Transition.of(before, after).gained.items()
        }
        assert found == {rank: gained.get(rank, 0) for rank in after.ranks}
    assert any(Transition.of(a, b).gained for a, b in pairwise(plans))


def test_memory_is_made_ahead_for_units_that_come_if_a_rank_has_it_beside_what_it_has() -> None:
    changes = pairwise([square(), *carried_out(square(), ReshapeRequest(4, 1))])
    before, plan = next(change for change in changes if Transition.of(*change).gained)
    rank, units = next(iter(Transition.of(before, plan).gained.items()))
    found = made_ahead(before, plan, rank)
    assert [plan.workload.buckets[number].users[0] for number in found] == sorted(units)
    takes = before.predicted.ranks[rank].memory_bytes + 2 * 4 * sum(plan.workload.buckets[n].numel for n in found)
    for limit, made in ((takes, found), (takes - 1, [])):
        members = [replace(m, memory_bytes=limit) if m.rank == rank else m for m in before.topology.members]
        bound = replace(before, topology=replace(before.topology, members=tuple(members)))
        assert made_ahead(bound, plan, rank) == made
    assert made_ahead(plan, plan, rank) == []


def test_a_wave_has_first_what_has_fewest_replicas() -> None:
    plan, ranks = square(), (Rank(0), Rank(1), Rank(2))
    boxes = (
        Box(0, Span(0, 100), ranks[0], (ranks[1], ranks[2]), (ranks[2],)),
        Box(0, Span(100, 200), ranks[0], (ranks[2],), (ranks[2],)),
        Box(0, Span(200, 300), ranks[0], (ranks[1], ranks[2]), (ranks[2],)),
    )
    assert first_wave(boxes, plan.workload, {}) == boxes
    wave = first_wave(boxes, plan.workload, {Rank(2): 2 * 100 * REPLICA})
    assert wave[:2] == boxes[:2] and wave[2] == replace(boxes[2], holders=(ranks[1],), catching_up=())
    only = first_wave(boxes, plan.workload, {Rank(2): 100 * REPLICA})
    assert [box.catching_up for box in only] == [(), (ranks[2],), ()]
    assert [box.catching_up for box in first_wave(boxes, plan.workload, {Rank(0): 200 * SENT - 1})] == [
        (),
        (ranks[2],),
        (),
    ]
    assert not any(box.catching_up for box in first_wave(boxes, plan.workload, {Rank(0): 100 * SENT - 1}))


def test_what_has_no_room_is_named_with_the_bytes_that_it_lacks() -> None:
    plan = square()
    boxes = (Box(0, Span(0, 100), Rank(0), (Rank(1),), (Rank(1),)),)
    assert without_room(boxes, plan.workload, {Rank(1): 100 * REPLICA}) is None
    short = without_room(boxes, plan.workload, {Rank(1): 100 * REPLICA - 1})
    assert short == Short(BoxId(0), Rank(1), 100 * REPLICA, 100 * REPLICA - 1)
    assert short is not None and short.words.endswith(": 1 bytes short")
    assert without_room(boxes, plan.workload, {Rank(0): 1000}) == Short(BoxId(0), Rank(0), 100 * SENT, 1000)


@pytest.mark.parametrize("after", [(4, 1), (1, 4)])
def test_a_change_keeps_to_the_bound_in_waves_and_ends_as_without_one(after: tuple[int, int]) -> None:
    free = list(carried_out(square(), ReshapeRequest(*after)))
    most = max(needs.sync_bytes for plan in free for needs in transition_memory(plan).values())
    bound = most // 3
    start = bounded(square(), bound)
    plans = list(carried_out(start, ReshapeRequest(*after)))
    waves = [plan for plan in plans if plan.target is not None]
    assert len(waves) >= 3 and all(shape(plan) == (2, 2) for plan in waves)
    assert any("are made now, for which there is room" in plan.reason for plan in waves)
    assert all(needs.sync_bytes <= bound for plan in plans for needs in transition_memory(plan).values())
    reached = plans[len(waves)]
    assert shape(reached) == shape(free[-1]) and Transition.of(waves[-1], reached).parameter_bytes == 0
    assert plans[-1].lanes == free[-1].lanes and all(len(box.replica_ranks) == 2 for box in plans[-1].boxes)


def test_waves_free_what_was_there_before() -> None:
    """A replica that the target needs takes the place of another, so that later waves have the room of earlier ones."""
    plan = square()
    bound = max(REPLICA, SENT) * len(plan.boxes[0].span) * 4
    plans = [plan for plan in carried_out(bounded(plan, bound), ReshapeRequest(4, 1)) if plan.target is not None]
    assert len(plans) >= 3
    for before, after in pairwise(plans):
        here = [number for number, box in numbered(before.boxes) if box.catching_up]
        dropped = [
            number
            for number in here
            if len(after.boxes[number].replica_ranks) < len(before.boxes[number].replica_ranks)
        ]
        assert dropped, "of some boxes an old replica goes"
        for old, new in zip(before.boxes, after.boxes, strict=True):
            assert len(new.local_materializers) >= 2 and new.local_materializers <= set(old.replica_ranks)


@pytest.mark.parametrize("lost", range(4))
def test_lost_replicas_are_made_in_waves(lost: int) -> None:
    bound = REPLICA * len(square().boxes[0].span) * 3
    first = change(bounded(square(), bound), *(rank for rank in range(4) if rank != lost))
    plans = [first, *carried_out(first, ReshapeRequest())]
    assert sum(any(box.catching_up for box in plan.boxes) for plan in plans) >= 2
    assert all(needs.sync_bytes <= bound for plan in plans for needs in transition_memory(plan).values())
    assert all(len(box.replica_ranks) == 2 for box in plans[-1].boxes)


@pytest.mark.parametrize("lost", range(4))
def test_a_loss_between_waves_is_answered_within_the_bound(lost: int) -> None:
    plan = square()
    bound = REPLICA * len(plan.boxes[0].span) * 6
    for wave in [each for each in carried_out(bounded(plan, bound), ReshapeRequest(4, 1)) if each.target is not None]:
        left = tuple(rank for rank in wave.ranks if rank != lost)
        here = {number: tuple(sorted(box.local_materializers & set(left))) for number, box in numbered(wave.boxes)}
        first = replan(wave, left, here, 1)
        check_plan(first)
        plans = [first, *carried_out(first, None)]
        assert all(needs.sync_bytes <= bound for each in plans for needs in transition_memory(each).values())
        assert all(len(box.replica_ranks) == 2 for box in plans[-1].boxes)


def test_the_memory_of_ranks_bounds_what_is_on_its_way() -> None:
    tight = job(4, 4, 32, 16, 1.2)
    first = change(tight, *(rank for rank in range(16) if rank != 5))
    for plan in (first, *carried_out(first, ReshapeRequest())):
        room = room_for_replicas(plan.topology, needed_without_replicas(plan))
        needs = transition_memory(plan)
        assert all(needs[rank].sync_bytes <= room[rank] for rank in plan.ranks)


def test_a_reshape_for_which_one_box_has_no_room_is_refused_with_the_bytes_that_it_lacks() -> None:
    plan = square()
    size = max(len(box.span) for box in plan.boxes)
    reshape, enough = ReshapeRequest(4, 1), max(REPLICA, SENT) * size
    assert list(carried_out(bounded(plan, enough), reshape))
    tight = bounded(plan, enough - 100)
    assert list(carried_out(tight, reshape)) == []
    why = why_nothing_follows(tight, reshape, 1)
    assert why.startswith("parallel.dp=4 parallel.pp=1: a replica of box ") and why.endswith(": 100 bytes short")
    at_once = replace(tight, workload=asking(tight.workload, goals="blocking"))
    assert shape(next(carried_out(at_once, reshape))) == (1, 1, 1, 1), "no replicas are made where goals are blocking"


def test_the_checker_counts_by_itself() -> None:
    first = next(plan for plan in carried_out(square(), ReshapeRequest(4, 1)) if plan.target is not None)
    needs = {rank: need.sync_bytes for rank, need in transition_memory(first).items()}
    rank = max(needs, key=lambda rank: needs[rank])
    check_plan(bounded(first, needs[rank]))
    with pytest.raises(PlanError, match=f"rank {rank} needs {needs[rank]} bytes for syncing replicas"):
        check_plan(bounded(first, needs[rank] - 1))

    def with_room(size: int) -> Plan:
        members = tuple(replace(m, memory_bytes=size if m.rank == rank else None) for m in first.topology.members)
        return replace(first, topology=replace(first.topology, members=members))

    enough = needed_without_replicas(first)[rank] + needs[rank]
    check_plan(with_room(enough))
    with pytest.raises(PlanError, match=f"rank {rank} has no room for syncing replicas"):
        check_plan(with_room(enough - 1))
