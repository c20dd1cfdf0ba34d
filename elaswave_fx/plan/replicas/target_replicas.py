"""Replicas that a target layout needs: boxes that its ranks will compute with, and do not compute with yet.

In: a plan, its target layout, the replica holders of each box. Out: box -> ranks that need a replica. Replicas are made
in waves, as there is room (`transition_memory.py`). Boxes without one are sent as parameters when the lanes are taken.

    replicas_for(target, plan, have)  ->  {12: (3,), 13: (3,)}: rank 3 will run the unit of boxes 12 and 13
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.plan.plan import Plan, TargetLayout
from elaswave_fx.plan.predict.transition_memory import Short, needed_without_replicas, room_for_replicas, without_room
from elaswave_fx.plan.replicas.holders import with_readers
from elaswave_fx.plan.work.box import Box, numbered
from elaswave_fx.plan.work.cost import GRADIENT_BYTES
from elaswave_fx.plan.work.tiling import tiles_of
from elaswave_fx.plan.work.topology import Rank

LEAST_FREE = 0.1
"""Least fraction of a link assumed to be free for replica sync."""

ByBox = Mapping[int, tuple[Rank, ...]]


def replicas_for(target: TargetLayout, plan: Plan, have: Sequence[tuple[Rank, ...]]) -> ByBox:
    """Replicas that ranks need for `target` while they compute as in `plan`; empty if none has to be made."""
    after = with_readers(plan.boxes, plan.workload, tiles_of(target.lanes))
    found: defaultdict[int, list[Rank]] = defaultdict(list)
    is_complete = True
    for number, (now, then) in enumerate(zip(plan.boxes, after, strict=True)):
        for rank in then.readers:
            if rank in now.readers:
                continue
            is_complete = is_complete and rank in have[number]
            found[number].append(rank)
    return {} if is_complete else {number: tuple(ranks) for number, ranks in found.items()}


def replicas_read_anew(before: Sequence[Box], after: Sequence[Box], have: Sequence[tuple[Rank, ...]]) -> ByBox:
    """Replicas for new readers of boxes, which make the parameters from them."""
    found: dict[int, tuple[Rank, ...]] = {}
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.readers != new.readers:
            ranks = tuple(r for r in new.readers if r not in old.readers and r in have[number])
            if ranks:
                found[number] = ranks
    return found


def sync_per_stall(plan: Plan) -> float:
    """Seconds to sync a state beside the steps of a plan, over seconds to transfer its parameters alone."""
    work, predicted = plan.workload, plan.predicted
    free = 1.0 - predicted.exchange_s / predicted.step_s if predicted.step_s else 1.0
    states = (work.state_bytes_per_element - GRADIENT_BYTES) * sum(bucket.numel for bucket in work.buckets)
    return states / max(1, sum(bucket.work_bytes for bucket in work.buckets)) / max(free, LEAST_FREE)


def target_words(plan: Plan) -> Iterator[str]:
    """The target layout and the replicas for it, in words."""
    if plan.target is not None:
        syncing = sum(len(box.catching_up) for _, box in numbered(plan.boxes))
        yield (
            f"the target layout is {plan.target.reason}, a step of {plan.target.step_s * 1e3:.3g} ms, once {syncing} "
            "replicas of boxes are in sync"
        )


def replica_without_room(target: TargetLayout, plan: Plan) -> Short | None:
    """A replica of the target layout that never has room, for a plan whose replicas are in sync; None if all can be
    made, in one wave or more."""
    missing = replicas_for(target, plan, [box.replica_ranks for box in plan.boxes])
    boxes: list[Box] = []
    for number, box in numbered(plan.boxes):
        syncing = tuple(rank for rank in missing.get(number, ()) if rank not in box.replica_ranks)
        boxes.append(replace(box, holders=(*box.holders, *syncing), catching_up=syncing))
    room = room_for_replicas(plan.topology, needed_without_replicas(plan))
    return without_room(boxes, plan.workload, room)
