"""The next plan of a job whose ranks, or whose copies, have changed. Pure, and on the way from a loss to the next step.

In: the plan before, who goes on, who has a copy of which box now. Out: the plan of the next epoch; its boxes are those
of the first plan, handed to ranks that have a copy. PlanError if nothing fits the memory that is left.

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
from elaswave_fx.plan.plan import Goal, Plan, Predicted
from elaswave_fx.plan.predict.frequency import clock_words
from elaswave_fx.plan.replicas.deal_boxes import (
    CopySources,
    bucket_sharers,
    domain_words,
    fatal_domains,
    reassign_boxes,
)
from elaswave_fx.plan.replicas.goal_copies import copies_per_stall, goal_words
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Epoch, Host, Member, Rank, Topology, local_topology
from elaswave_fx.words import listed, number_ranges, rank_words, size_text

Copies = Mapping[BoxId, tuple[Rank, ...]]
"""Box -> the ranks that have a copy of it now."""


Joiners = Mapping[Rank, Member]
"""What the cards of ranks say that the plan before does not have."""


def replan(plan: Plan, members: tuple[Rank, ...], copies: Copies, count: int, joiners: Joiners | None = None) -> Plan:
    """The plan of the epoch after `plan` for `members`, with `count` copies of each box besides the owner's.

    With the same ranks lanes stay as they are, or become those of the plan's goal once that needs no more copies. Where
    a stall would come before the best lanes, others may be taken on the way to them: then they are the goal, by the
    mode that the workload has for `goals`. Fewer
    copies are kept where memory has no room for `count`. Ranks that are to leave stay where the others alone cannot go
    on. PlanError names a box without a copy, or the smallest number of ranks that would do.
    """
    return replan_like(plan, members, copies, count, None, joiners)[0]


def replan_like(
    plan: Plan, members: tuple[Rank, ...], copies: Copies, count: int, like: Choice | None,
    joiners: Joiners | None = None,
) -> tuple[Plan, Choice | None]:  # fmt: skip
    """As `replan`, and what the search has found, None where it did not search. `like`: what it has found after the
    loss of another rank of the same kind (`loss_kinds.py`); nothing else is looked at here, if that fits and takes no
    longer."""
    topology = _next_topology(plan, members, joiners)
    have = _copies_now(plan, topology.ranks, copies)
    found = _replan(plan, topology, have, count, like)
    if found is None and topology.leaving:
        found = _replan(plan, topology.with_leaving(()), have, count, like)
    if found is None:
        raise PlanError(_too_few(plan, topology))
    return found


def _replan(
    plan: Plan, topology: Topology, have: list[tuple[Rank, ...]], count: int, like: Choice | None
) -> tuple[Plan, Choice | None] | None:
    """The plan of that topology, and what its search has found; None if nothing fits."""
    before = replace(plan, workload=next_workload(plan, topology))
    search = LaneSearch(before, topology, have)
    most = min(count, len(topology.staying.members) - 1)
    for wanted in range(most, -1, -1):
        found = _next_lanes(before, search, wanted, like, is_short=wanted < most)
        if found is not None:
            found = search.with_clocks(found, wanted)
            room = () if wanted == most else (f"memory has room for {wanted} of {most} copies of each box",)
            given_up = _given_up(plan, found.plan)
            parts = (
                _changed(plan, found.plan),
                *found.because,
                *goal_words(found.plan),
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
    """The goals that the same ranks have begun and not reached, with that of the plan before if it is one: memory may
    have room for lanes, and not for copies on the way to them."""
    aim = before.goal
    if after.ranks != before.ranks:
        return ()
    if aim is None or after.goal is not None or after.lanes == aim.lanes:
        return before.given_up
    return (*before.given_up, aim.reason)


def terminal_plan(
    plan: Plan, members: tuple[Rank, ...], copies: Copies, why: str, joiners: Joiners | None = None
) -> Plan:
    """The last plan of a job that cannot go on: nobody computes, every box has an owner that can save it."""
    topology = _next_topology(plan, members, joiners)
    have = _copies_now(plan, topology.ranks, copies)
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
        goal=None,
    )


def wants_move(plan: Plan, copies: Copies, count: int) -> bool:
    """Whether `replan` with the same members would get nearer to the goal, change an owner, make a copy for one, or
    drop one that is not needed any more."""
    if plan.goal is not None:
        return True
    have = _copies_now(plan, plan.ranks, copies)
    sharers = bucket_sharers(plan.workload, plan.tiles)
    by = CopySources(plan.topology, have, count, places(plan, plan.topology), sharers=sharers)
    boxes = reassign_boxes(plan.boxes, by)
    return any(
        new.owner != old.owner or set(old.replica_ranks) != set(new.replica_ranks)
        for old, new in zip(plan.boxes, boxes, strict=True)
    )


def _next_lanes(plan: Plan, search: LaneSearch, copies: int, like: Choice | None, is_short: bool) -> Found | None:
    """The same lanes if nobody was lost or has come, and nobody who computes has left, or what leads to their goal;
    else the best ones, or what leads to these. None if nothing fits with that many copies. `plan`: that of before.
    `is_short`: these are fewer than are wanted; then those that are there stay, or their making would begin anew."""
    if plan.lanes and _only_leavers_went(plan, search.ranks):
        found = None if plan.goal is None else _nearer(plan, plan.goal, search, copies)
        leaver_computes = any(rank in search.leaving for lane in plan.lanes for rank in lane.ranks)
        if found is None and not leaver_computes:
            found = search.as_it_is(copies, keeps=is_short)
        if found is not None:
            return found
    if like is not None and (found := search.alike(copies, like)) is not None:
        return _on_the_way_to(plan, found, search, copies, like) or found
    found = search.best_lanes(copies)
    return None if found is None else _on_the_way_to(plan, found, search, copies) or found


def _is_asked(plan: Plan, lanes: tuple[Lane, ...]) -> bool:
    """Whether the user wants these lanes of the same ranks."""
    goal = plan.goal
    return (plan.is_asked and lanes == plan.lanes) or (goal is not None and goal.is_asked and lanes == goal.lanes)


def _only_leavers_went(plan: Plan, ranks: Sequence[Rank]) -> bool:
    """Whether these are the ranks of the plan, but for some that were to leave and had nothing to do any more."""
    gone = set(plan.ranks) - set(ranks)
    lanes = (*plan.lanes, *(plan.goal.lanes if plan.goal is not None else ()))
    return (
        set(ranks) <= set(plan.ranks)
        and gone <= set(plan.topology.leaving)
        and not any(rank in gone for lane in lanes for rank in lane.ranks)
    )


def _nearer(plan: Plan, goal: Goal, search: LaneSearch, copies: int) -> Found | None:
    """Lanes as before, while ranks get copies of what they will compute with; then the goal's. None if neither fits.
    Lanes of a larger batch than that of the ranks that stay are not gone on with, and none where goals are blocking."""
    samples = sum(samples_of_lanes(plan))
    goes_on = samples == plan.workload.samples and plan.workload.options.goals != "blocking"
    behind = search.fitting(plan.lanes, copies, goal) if goes_on else None
    if behind is not None and behind.goal is not None:
        return Found(behind, ("lanes as before",))
    reached = search.fitting(goal.lanes, copies)
    return None if reached is None else Found(reached, ("the goal is reached", goal.reason))


def _on_the_way_to(
    plan: Plan, found: Found, search: LaneSearch, copies: int, like: Choice | None = None
) -> Found | None:
    """Other lanes, to be left for those that were found once copies have caught up, or to stay where there are to be no
    goals; None if that is not better, or goals are blocking. `like`: as for `replan_like`."""
    if plan.workload.options.goals == "blocking":
        return None
    goal = Goal(found.plan.lanes, found.plan.predicted.step_s, found.because[0])
    objective = OnTheWay(goal.step_s, found.stall_s, found.stall_s * copies_per_stall(plan))
    total_s = found.stall_s + objective.catch_up_s + PAUSE_S
    if like is not None and like.on_the_way is None:  # nothing was better there either
        return None
    if found.stall_s <= PAUSE_S or total_s > plan.topology.life_s or found.choice is None:
        return None
    toward, known = search.toward(objective), None if like is None else like.on_the_way
    first = toward.best_lanes(copies) if known is None else toward.alike(copies, known)
    if first is None or objective.steps(first.plan.predicted.step_s, first.stall_s) <= objective.steps_without:
        return None
    stays = plan.workload.options.goals == "never"
    interim = search.fitting(first.plan.lanes, copies, None if stays else goal)
    if interim is None or (interim.goal is None and not stays):
        return None
    return replace(first, plan=interim, choice=found.choice._replace(on_the_way=first.choice))


def _next_topology(plan: Plan, members: Sequence[Rank], joiners: Joiners | None) -> Topology:
    """The members as they were known, or as their cards say. Without any cards (None) all ranks are of one machine, and
    one that was not known is as the first ones: on the host that is emulated for its number, with as much memory."""
    before, known = plan.topology, {m.rank: m for m in plan.topology.members}
    if joiners is None:
        memory = min((m.memory_bytes for m in before.members if m.memory_bytes is not None), default=None)
        joiners = {r: Member(r, Host(r // before.ranks_per_host), memory_bytes=memory) for r in members}
    alive = tuple(known.get(rank) or joiners[rank] for rank in sorted(members))
    leaving = tuple(rank for rank in before.leaving if rank in members)
    if len(leaving) == len(alive):  # somebody has to go on
        leaving = ()
    return replace(before.of(alive, leaving), epoch=Epoch(before.epoch + 1))


def _copies_now(plan: Plan, ranks: Sequence[Rank], copies: Copies) -> list[tuple[Rank, ...]]:
    alive = set(ranks)
    have = [tuple(sorted(alive.intersection(copies.get(number, ())))) for number, _ in numbered(plan.boxes)]
    for number, _ in numbered(plan.boxes):
        if not have[number]:
            raise PlanError(
                f"replan: {_box_name(plan, number)} has no copy among ranks {listed(ranks)}; "
                "an owner has a copy of what it owns"
            )
    return have


def _too_few(plan: Plan, topology: Topology) -> str:
    """Why nothing fits, and what would."""
    count, workload = len(topology.members), plan.workload
    is_bound = workload.options.policy != "elaswave" or not {"dataflow", "graph"} <= set(workload.options.axes)
    if is_bound and not any(True for _ in candidates(plan, topology)):
        axes = f", planner.axes={listed(workload.options.axes)}" if workload.options.policy == "elaswave" else ""
        why = POLICIES[workload.options.policy].no_answer
        return f"replan: policy={workload.options.policy}{axes} has no answer to this loss: {why}"
    unbounded = replace(topology, members=tuple(replace(m, memory_bytes=None) for m in topology.members))
    needs = [most_memory(p) for p in _without_copies(plan, unbounded)]
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
    """The fewest ranks, from `first` on, on which the job fits; at most as many as it had."""
    for count in range(first, len(plan.ranks)):
        topology = local_topology(count, plan.topology.ranks_per_host, memory)
        if any(fits_memory(candidate) for candidate in _without_copies(plan, topology)):
            return count
    return max(first, len(plan.ranks))


def _without_copies(plan: Plan, topology: Topology) -> Iterator[Plan]:
    """All shapes with all sizes of micro-batches, as a new job would start with them."""
    workload, shaper = plan.workload, LaneShaper(plan.workload, topology)
    for candidate in new_lanes(len(workload.units), workload.granules, topology.members):
        table = shaper.table(candidate.sketches, 0)
        for size in shaper.sizes(candidate.sketches):
            lanes = shaper.shape(candidate.sketches, size, table)
            if lanes is not None:
                yield make_plan(topology, workload, lanes, "", copies=0, times=shaper.times)


def _changed(before: Plan, after: Plan) -> str:
    """Who is gone, who has come, and who is to go."""
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
    """What became of the boxes."""
    moved = sum(old.owner != new.owner for old, new in zip(before.boxes, after.boxes, strict=True))
    if moved:
        yield f"{moved} of {len(after.boxes)} boxes get another owner"
    behind = sorted({rank for box in after.boxes for rank in box.catching_up})
    single = [number for number, ranks in enumerate(have) if len(ranks) == 1]
    if single:
        until = (
            f"until {rank_words(behind)} {_have(behind)} caught up" if behind else "and no rank is there for another"
        )
        yield f"{len(single)} of {len(have)} boxes ({number_ranges(single)}) have a single copy {until}"
    elif behind:
        yield f"{rank_words(behind)} {_have(behind)} to catch up"
    topology = after.topology
    if len(topology.machines) > 1:
        fatal = fatal_domains(topology, (box.replica_ranks for box in after.boxes))
        if fatal:
            yield f"the state is lost with {domain_words(topology, fatal)}, for no copy has room elsewhere"


def _box_name(plan: Plan, number: BoxId) -> str:
    box = plan.boxes[number]
    return f"box {number} (elements {box.span} of bucket {plan.workload.buckets[box.bucket].name})"


def _have(ranks: Sequence[Rank]) -> str:
    return "have" if len(ranks) > 1 else "has"
