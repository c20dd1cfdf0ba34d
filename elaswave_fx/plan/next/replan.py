"""The next plan of a job whose ranks or replicas have changed. Pure; it runs between a failure and the next step.

In: the previous plan, the remaining ranks, the replica holders of each box. Out: the plan of the next epoch; its boxes
are those of the first plan, handed to ranks that have a replica. PlanError if nothing fits the remaining memory.

    replan(plan, (0, 2, 3), {0: (0,), 1: (2, 3), ...}, count=1)
    reason: lost rank 1; the hurt lane is cut anew, 1 deep; predicted step ... ; beaten: stages keep their units ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.lanes.shape_lanes import LaneShaper
from elaswave_fx.plan.make.derive import make_plan
from elaswave_fx.plan.make.planner import fits_memory, most_memory
from elaswave_fx.plan.next.lane_candidates import new_lanes, places, samples_of_lanes
from elaswave_fx.plan.next.lane_search import Choice, Found, LaneSearch
from elaswave_fx.plan.next.objective import PAUSE_S, OnTheWay
from elaswave_fx.plan.next.policies import POLICIES, candidates, next_workload
from elaswave_fx.plan.plan import Plan, Predicted, TargetLayout
from elaswave_fx.plan.predict.frequency import clock_words
from elaswave_fx.plan.replicas.holders import (
    ReplicaSources,
    bucket_sharers,
    domain_words,
    fatal_domains,
    reassign_boxes,
)
from elaswave_fx.plan.replicas.target_replicas import sync_per_stall, target_words
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Epoch, Host, Member, Rank, Topology, local_topology
from elaswave_fx.words import listed, number_ranges, rank_words, size_text

Replicas = Mapping[BoxId, tuple[Rank, ...]]
"""Box -> the ranks that have a replica now."""


Joiners = Mapping[Rank, Member]
"""Member info of ranks that the previous plan does not know."""


def replan(
    plan: Plan, members: tuple[Rank, ...], replicas: Replicas, count: int, joiners: Joiners | None = None
) -> Plan:
    """The plan of the epoch after `plan` for `members`, with `count` replicas of each box besides the owner's.

    With the same ranks lanes stay, or become the target layout's once its replicas are in sync. Where the best lanes
    would begin with a stall, intermediate lanes may come first; the best lanes are then the target layout, by the mode
    `goals` of the workload. Fewer replicas are kept where memory has no room for `count`. Leaving ranks stay where the
    others cannot continue alone. PlanError names a box without a replica, or the smallest sufficient number of ranks.
    """
    return replan_like(plan, members, replicas, count, None, joiners)[0]


def replan_like(
    plan: Plan, members: tuple[Rank, ...], replicas: Replicas, count: int, like: Choice | None,
    joiners: Joiners | None = None,
) -> tuple[Plan, Choice | None]:  # fmt: skip
    """`replan`, with the result of its search, None where there was none. `like`: the result after the failure of
    another rank of the same kind (`loss_kinds.py`). If that fits and takes no longer, nothing else is searched."""
    topology = _next_topology(plan, members, joiners)
    have = _replicas_now(plan, topology.ranks, replicas)
    found = _replan(plan, topology, have, count, like)
    if found is None and topology.leaving:
        found = _replan(plan, topology.with_leaving(()), have, count, like)
    if found is None:
        raise PlanError(_too_few(plan, topology))
    return found


def _replan(
    plan: Plan, topology: Topology, have: list[tuple[Rank, ...]], count: int, like: Choice | None
) -> tuple[Plan, Choice | None] | None:
    """The plan of the topology, with the result of its search; None if nothing fits."""
    before = replace(plan, workload=next_workload(plan, topology))
    search = LaneSearch(before, topology, have)
    most = min(count, len(topology.staying.members) - 1)
    for wanted in range(most, -1, -1):
        found = _next_lanes(before, search, wanted, like, is_short=wanted < most)
        if found is not None:
            found = search.with_clocks(found, wanted)
            room = () if wanted == most else (f"memory has room for {wanted} of {most} replicas of each box",)
            given_up = _given_up(plan, found.plan)
            parts = (
                _changed(plan, found.plan),
                *found.because,
                *target_words(found.plan),
                *(f"given up, for memory has no room on the way: {each}" for each in given_up[len(plan.given_up) :]),
                *((found.plan.reason,) if found.plan.reason else ()),
                *clock_words(found.plan),
                *_box_words(plan, found.plan, have),
                *room,
            )
            is_asked = topology.ranks == plan.ranks and _is_asked(plan, found.plan.lanes)
            following = replace(found.plan, reason="; ".join(parts), is_asked=is_asked, given_up=given_up)
            return following, found.choice
    return None


def _given_up(before: Plan, after: Plan) -> tuple[str, ...]:
    """Target layouts that the same ranks began and did not reach, including the previous plan's: memory may have room
    for the lanes, but not for replicas on the way to them."""
    aim = before.target
    if after.ranks != before.ranks:
        return ()
    if aim is None or after.target is not None or after.lanes == aim.lanes:
        return before.given_up
    return (*before.given_up, aim.reason)


def terminal_plan(
    plan: Plan, members: tuple[Rank, ...], replicas: Replicas, why: str, joiners: Joiners | None = None
) -> Plan:
    """The last plan of a job that cannot continue: no rank computes, and every box has an owner that can save it."""
    topology = _next_topology(plan, members, joiners)
    have = _replicas_now(plan, topology.ranks, replicas)
    boxes = tuple(
        replace(box, owner=box.owner if box.owner in ranks else ranks[0], holders=(), catching_up=(), readers=())
        for box, ranks in zip(plan.boxes, have, strict=True)
    )
    return replace(
        plan,
        topology=topology,
        lanes=(),
        boxes=boxes,
        schedule=dict.fromkeys(topology.ranks, ()),
        predicted=Predicted(0.0, 0.0, {}),
        reason=why,
        terminal_reason=why,
        clocks={},
        target=None,
    )


def wants_move(plan: Plan, replicas: Replicas, count: int) -> bool:
    """Whether `replan` with the same members would approach the target layout, change an owner, or make or drop a
    replica."""
    if plan.target is not None:
        return True
    have = _replicas_now(plan, plan.ranks, replicas)
    sharers = bucket_sharers(plan.workload, plan.tiles)
    by = ReplicaSources(plan.topology, have, count, places(plan, plan.topology), sharers=sharers)
    boxes = reassign_boxes(plan.boxes, by)
    return any(
        new.owner != old.owner or set(old.replica_ranks) != set(new.replica_ranks)
        for old, new in zip(plan.boxes, boxes, strict=True)
    )


def _next_lanes(plan: Plan, search: LaneSearch, replicas: int, like: Choice | None, is_short: bool) -> Found | None:
    """The same lanes, or the next ones toward their target, if the only change is ranks that left without work; else
    the best lanes, or intermediate ones. None if nothing fits with that many replicas.

    `is_short`: `replicas` are fewer than requested. Existing replicas then stay, or syncing them would start over.
    """
    if plan.lanes and _only_leavers_went(plan, search.ranks):
        found = None if plan.target is None else _nearer(plan, plan.target, search, replicas)
        leaver_computes = any(rank in search.leaving for lane in plan.lanes for rank in lane.ranks)
        if found is None and not leaver_computes:
            found = search.as_it_is(replicas, keeps=is_short)
        if found is not None:
            return found
    if like is not None and (found := search.alike(replicas, like)) is not None:
        return _on_the_way_to(plan, found, search, replicas, like) or found
    found = search.best_lanes(replicas)
    return None if found is None else _on_the_way_to(plan, found, search, replicas) or found


def _is_asked(plan: Plan, lanes: tuple[Lane, ...]) -> bool:
    """Whether the user requested these lanes of the same ranks."""
    target = plan.target
    return (plan.is_asked and lanes == plan.lanes) or (target is not None and target.is_asked and lanes == target.lanes)


def _only_leavers_went(plan: Plan, ranks: Sequence[Rank]) -> bool:
    """Whether these are the plan's ranks, but for leavers that had no work any more."""
    gone = set(plan.ranks) - set(ranks)
    lanes = (*plan.lanes, *(plan.target.lanes if plan.target is not None else ()))
    return (
        set(ranks) <= set(plan.ranks)
        and gone <= set(plan.topology.leaving)
        and not any(rank in gone for lane in lanes for rank in lane.ranks)
    )


def _nearer(plan: Plan, target: TargetLayout, search: LaneSearch, replicas: int) -> Found | None:
    """The present lanes while replicas of the target sync, then the target's lanes; None if neither fits. Lanes for a
    larger batch than the staying ranks' are not kept, and none are where goals are blocking."""
    samples = sum(samples_of_lanes(plan))
    goes_on = samples == plan.workload.samples and plan.workload.options.goals != "blocking"
    syncing = search.fitting(plan.lanes, replicas, target) if goes_on else None
    if syncing is not None and syncing.target is not None:
        return Found(syncing, ("lanes as before",))
    reached = search.fitting(target.lanes, replicas)
    return None if reached is None else Found(reached, ("the target layout is reached", target.reason))


def _on_the_way_to(
    plan: Plan, found: Found, search: LaneSearch, replicas: int, like: Choice | None = None
) -> Found | None:
    """Intermediate lanes, left for those of `found` once replicas are in sync; they stay if goals are "never". None if
    they are no better, or if goals are blocking. `like`: as for `replan_like`."""
    if plan.workload.options.goals == "blocking":
        return None
    target = TargetLayout(found.plan.lanes, found.plan.predicted.step_s, found.because[0])
    objective = OnTheWay(target.step_s, found.stall_s, found.stall_s * sync_per_stall(plan))
    total_s = found.stall_s + objective.sync_s + PAUSE_S
    if like is not None and like.on_the_way is None:  # no intermediate lanes were better there either
        return None
    if found.stall_s <= PAUSE_S or total_s > plan.topology.life_s or found.choice is None:
        return None
    toward, known = search.toward(objective), None if like is None else like.on_the_way
    first = toward.best_lanes(replicas) if known is None else toward.alike(replicas, known)
    if first is None or objective.steps(first.plan.predicted.step_s, first.stall_s) <= objective.steps_without:
        return None
    stays = plan.workload.options.goals == "never"
    interim = search.fitting(first.plan.lanes, replicas, None if stays else target)
    if interim is None or (interim.target is None and not stays):
        return None
    return replace(first, plan=interim, choice=found.choice._replace(on_the_way=first.choice))


def _next_topology(plan: Plan, members: Sequence[Rank], joiners: Joiners | None) -> Topology:
    """The members as known, or as in their member info. Without any (None), all ranks are of one machine: an unknown
    rank gets the emulated host of its number, and the least memory of the others."""
    before, known = plan.topology, {m.rank: m for m in plan.topology.members}
    if joiners is None:
        memory = min((m.memory_bytes for m in before.members if m.memory_bytes is not None), default=None)
        joiners = {r: Member(r, Host(r // before.ranks_per_host), memory_bytes=memory) for r in members}
    alive = tuple(known.get(rank) or joiners[rank] for rank in sorted(members))
    leaving = tuple(rank for rank in before.leaving if rank in members)
    if len(leaving) == len(alive):  # at least one rank has to stay
        leaving = ()
    return replace(before.of(alive, leaving), epoch=Epoch(before.epoch + 1))


def _replicas_now(plan: Plan, ranks: Sequence[Rank], replicas: Replicas) -> list[tuple[Rank, ...]]:
    alive = set(ranks)
    have = [tuple(sorted(alive.intersection(replicas.get(number, ())))) for number, _ in numbered(plan.boxes)]
    for number, _ in numbered(plan.boxes):
        if not have[number]:
            raise PlanError(
                f"replan: {_box_name(plan, number)} has no replica among ranks {listed(ranks)}; "
                "an owner has a replica of what it owns"
            )
    return have


def _too_few(plan: Plan, topology: Topology) -> str:
    """Why nothing fits, and what would be enough."""
    count, workload = len(topology.members), plan.workload
    is_bound = workload.options.policy != "elaswave" or not {"dataflow", "graph"} <= set(workload.options.axes)
    if is_bound and not any(True for _ in candidates(plan, topology)):
        axes = f", lab.axes={listed(workload.options.axes)}" if workload.options.policy == "elaswave" else ""
        why = POLICIES[workload.options.policy].no_answer
        return f"replan: lab.policy={workload.options.policy}{axes} has no answer to this loss: {why}"
    unbounded = replace(topology, members=tuple(replace(m, memory_bytes=None) for m in topology.members))
    needs = [most_memory(p) for p in _without_replicas(plan, unbounded)]
    if not needs:
        return (
            f"replan: {count} ranks cannot share {len(workload.units)} units x {workload.granules} granules; "
            f"at most {len(workload.units) * workload.granules} ranks have something to do"
        )
    memory = min(m.memory_bytes for m in topology.members if m.memory_bytes is not None)
    return (
        f"replan: {count} rank{'s' if count > 1 else ''} cannot hold the job: a rank needs {size_text(min(needs))} and "
        f"has {size_text(memory)}; the smallest number of ranks that would do is {_smallest(plan, count + 1, memory)}"
    )


def _smallest(plan: Plan, first: int, memory: int) -> int:
    """The fewest ranks, `first` or more, that fit the job; at most as many as the plan has."""
    for count in range(first, len(plan.ranks)):
        topology = local_topology(count, plan.topology.ranks_per_host, memory)
        if any(fits_memory(candidate) for candidate in _without_replicas(plan, topology)):
            return count
    return max(first, len(plan.ranks))


def _without_replicas(plan: Plan, topology: Topology) -> Iterator[Plan]:
    """All shapes with all sizes of micro-batches, as for a new job."""
    workload, shaper = plan.workload, LaneShaper(plan.workload, topology)
    for candidate in new_lanes(len(workload.units), workload.granules, topology.members):
        table = shaper.table(candidate.shapes, 0)
        for size in shaper.sizes(candidate.shapes):
            lanes = shaper.shape(candidate.shapes, size, table)
            if lanes is not None:
                yield make_plan(topology, workload, lanes, "", replicas=0, times=shaper.times)


def _changed(before: Plan, after: Plan) -> str:
    """Ranks that failed, left, joined or are leaving."""
    gone = [r for r in before.ranks if r not in after.ranks]
    changes = (
        ("lost", [r for r in gone if r not in before.topology.leaving]),
        ("left by", [r for r in gone if r in before.topology.leaving]),
        ("joined by", [r for r in after.ranks if r not in before.ranks]),
        ("to be left by", after.topology.leaving),
    )
    words = [f"{what} {rank_words(ranks)}" for what, ranks in changes if ranks]
    return ", ".join(words) or "the same ranks"


def _box_words(before: Plan, after: Plan, have: Sequence[tuple[Rank, ...]]) -> Iterator[str]:
    """Changes of the boxes' owners and replicas."""
    moved = sum(old.owner != new.owner for old, new in zip(before.boxes, after.boxes, strict=True))
    if moved:
        yield f"{moved} of {len(after.boxes)} boxes get another owner"
    syncing = sorted({rank for box in after.boxes for rank in box.catching_up})
    single = [number for number, ranks in enumerate(have) if len(ranks) == 1]
    if single:
        until = (
            f"until {rank_words(syncing)} {_have(syncing)} caught up" if syncing else "and no rank is there for another"
        )
        yield f"{len(single)} of {len(have)} boxes ({number_ranges(single)}) have a single copy {until}"
    elif syncing:
        yield f"{rank_words(syncing)} {_have(syncing)} to sync"
    topology = after.topology
    if len(topology.machines) > 1:
        fatal = fatal_domains(topology, (box.replica_ranks for box in after.boxes))
        if fatal:
            yield f"the state is lost with {domain_words(topology, fatal)}, for no replica has room elsewhere"


def _box_name(plan: Plan, number: BoxId) -> str:
    box = plan.boxes[number]
    return f"box {number} (elements {box.span} of bucket {plan.workload.buckets[box.bucket].name})"


def _have(ranks: Sequence[Rank]) -> str:
    return "have" if len(ranks) > 1 else "has"
