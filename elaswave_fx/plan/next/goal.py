"""What the same ranks should do next: better lanes, even shares, no copies that nobody needs. Pure.

In: a plan, with all of its copies there. Out: its goal, or the next plan on the way to it.

    goal(plan, plan.topology, count=1)   ->  Goal(lanes of three stages, a step of 410 ms, "units cut anew: ...")
    successor(plan, copies, count=1, …)  ->  the lanes as before, with copies for the goal's; then its lanes; then None
    the same, rank 2 leaves              ->  the same, for lanes without it; then a plan without it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.make.planner import are_uniform, shape_name, sketch, uniform
from elaswave_fx.plan.next.lane_candidates import Candidate
from elaswave_fx.plan.next.lane_search import Found, LaneSearch
from elaswave_fx.plan.next.objective import AtOnce, InBackground, Objective
from elaswave_fx.plan.next.policies import next_workload
from elaswave_fx.plan.next.replan import Copies, replan, wants_move
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.plan import Goal, Plan
from elaswave_fx.plan.predict.transition_memory import Short
from elaswave_fx.plan.replicas.goal_copies import copies_per_stall, copy_without_room
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Rank, Topology

WORTH = 1.03
"""A goal makes steps shorter by so much: copies travel for it, and everybody stops twice."""


def goal(plan: Plan, topology: Topology, count: int) -> Goal | None:
    """The lanes among all candidates by which most steps are committed, reached from `plan` as its workload says;
    None if they are not worth it. `topology`: the plan's ranks, with what they can do now. `count`: copies of a box."""
    if not plan.lanes:
        return None
    everywhere = [topology.ranks] * len(plan.boxes)
    copies = min(count, len(topology.members) - 1)
    search = LaneSearch(plan, topology, everywhere)
    now = search.as_it_is(copies)
    if now is None:
        return None
    now_s = search.with_clocks(now, copies).plan.predicted.step_s
    search = LaneSearch(plan, topology, everywhere, _objective(plan, topology, now_s)).without(plan.given_up)
    found = search.best_lanes(copies)
    if found is None:
        return None
    found = search.with_clocks(found, copies)
    if found.plan.predicted.step_s * WORTH > now_s:
        return None
    return _goal_of(found)


def _objective(plan: Plan, topology: Topology, now_s: float) -> Objective:
    """What a goal is chosen by, from steps of `now_s`: its stall passes behind them, unless goals are blocking."""
    if plan.workload.options.goals == "blocking":
        return AtOnce(topology.life_s)
    return InBackground(topology.life_s, now_s, copies_per_stall(plan))


def successor(plan: Plan, copies: Copies, count: int, request: ReplanRequest | None = None) -> Plan | None:
    """The next plan, now that the ranks have these copies; None if the plan can stay, or has to. It has the same ranks,
    or all but some that leave: those that have nothing to do, and of whose copies none is needed. Lanes that a user
    asked for were asked for ranks as they were.

    Until all copies are there that the plan wants, nothing changes but that a rank that is overdue goes, if others have
    copies of all that it has.
    """
    request = request or ReplanRequest()
    known = replace(plan, topology=plan.topology.with_speeds(request.speeds).with_leaving(()))
    following = _without_overdue(known, copies, count, request.overdue)
    if following is None and all(set(box.replica_ranks) <= set(copies[number]) for number, box in numbered(plan.boxes)):
        topology = next(_leaves(known, request.leaving, plan.topology.leaving, count))
        is_same = topology == plan.topology
        given_up = plan.given_up if is_same else ()
        known = replace(known, topology=topology, is_asked=plan.is_asked and is_same, given_up=given_up)
        known = known if request.reshape is None else _with_reshape_target(known, request.reshape, count)
        may_look = known.workload.options.goals != "never" or (request.reshape is not None and request.reshape.is_best)
        looks = may_look and not known.is_asked
        following = _successor(known, copies, count, looks)
        following = _with_trials(known, copies, count, request.probation) if following is None and looks else following
    if following is None:
        return None
    return replace(following, reason="; ".join((*speed_words(plan.topology, following.topology), following.reason)))


def reshape_target(plan: Plan, reshape: ReshapeRequest, count: int) -> Goal | None:
    """Lanes as a user wants them, of the first ranks, cut and shared as well as can be; None if there can be none, or
    they do not fit."""
    if reshape.dp is None or reshape.pp is None or why_never(plan, reshape) is not None:
        return None
    widths = uniform(reshape.dp, reshape.pp)
    topology = plan.topology
    members = topology.staying.members
    among = (Candidate(f"as it was asked for, {shape_name(widths)}", sketch(members, widths)),)
    search = LaneSearch(plan, topology, [plan.ranks] * len(plan.boxes), among=among)
    found = _with_most_copies(search, search.best_lanes, min(count, len(members) - 1))
    return None if found is None else replace(found, is_asked=True)


def carries(before: Plan, following: Plan, reshape: ReshapeRequest) -> bool:
    """Whether the plan after `before` is for the reshape: its lanes, or its goal's, have the wanted shape, which the
    lanes of `before` had not; the best are other lanes of the same ranks. A plan that has to come first, for ranks
    that should have left by now, need not be one."""
    lanes = _lanes_to_come(following)
    if reshape.is_best:
        return following.ranks == before.ranks and lanes != _lanes_to_come(before)
    return _have_shape(lanes, reshape) and not _have_shape(before.lanes, reshape)


def aim_words(before: Plan, following: Plan) -> str:
    """What the planned stop between these plans is for, as a clause."""
    which = "the lanes that were asked for" if _comes_as_asked(following) else "other lanes"
    if following.lanes != before.lanes:
        return f"{which} are taken"
    if following.goal is not None and following.goal != before.goal:
        return f"copies begin for {which}"
    return "owners move"


def why_never(plan: Plan, reshape: ReshapeRequest) -> str | None:
    """What is wrong with a reshape, whatever memory ranks have; None if nothing is. The user has written it."""
    if reshape.is_best or reshape.dp is None or reshape.pp is None:
        return None
    ranks, work = len(plan.topology.staying.ranks), plan.workload
    if reshape.dp * reshape.pp > ranks:
        return f"{reshape.words()}: takes {reshape.dp * reshape.pp} ranks, and the job has {ranks}"
    if reshape.pp > len(work.units):
        return f"parallel.pp={reshape.pp}: the model has {len(work.units)} units; nearest valid: {len(work.units)}"
    if reshape.dp > work.granules:
        return f"parallel.dp={reshape.dp}: a step has {work.granules} granules; nearest valid: {work.granules}"
    return None


def why_nothing_follows(plan: Plan, reshape: ReshapeRequest, count: int) -> str:
    """Why a reshape, which could be, leads to no other plan. Some ranks may leave before it could be carried out."""
    if reshape.is_best:
        return f"no other lanes are known that make steps {WORTH - 1:.0%} shorter"
    goal = reshape_target(plan, reshape, count)
    short = None if goal is None else _without_room(plan, goal)
    if short is not None:
        return f"{reshape.words()}: {short.words}"
    if goal is not None and goal.reason in plan.given_up:
        why = "memory has no room for all copies at once, nor for the lanes with fewer"
        return f"{reshape.words()}: was given up, for {why}"
    return f"{reshape.words()}: " + (
        "the job has these lanes" if _have_shape(plan.lanes, reshape) else "the ranks that stay have no room for them"
    )


def speed_words(before: Topology, after: Topology) -> Iterator[str]:
    """Which ranks have another speed than before, or are tried at one."""
    for rank, speed in after.speeds_changed_from(before).items():
        tried = "was too slow for any work and is tried at" if rank in after.on_trial else "has"
        yield f"rank {rank} {tried} a speed of {speed:g}, not {before.member(rank).speed:g}"


def _leaves(plan: Plan, leaving: Sequence[Rank], before: Sequence[Rank], count: int) -> Iterator[Topology]:
    """With as many leavers as can be spared, first those that were leaving before; at last with none."""
    in_turn = sorted(leaving, key=lambda rank: (rank not in before, rank))
    for number in range(min(len(in_turn), len(plan.ranks) - 1), 0, -1):
        topology = plan.topology.with_leaving(in_turn[:number])
        if lanes_without(replace(plan, topology=topology), count) is not None:
            yield topology
    yield plan.topology


def lanes_without(plan: Plan, count: int) -> Goal | None:
    """What the ranks that stay do best when those that leave have gone; the lanes as they are, if they have these to
    themselves. None if they cannot go on alone."""
    staying = plan.topology.staying
    search = LaneSearch(
        replace(plan, workload=next_workload(plan, plan.topology)), plan.topology, [plan.ranks] * len(plan.boxes)
    )
    idle = plan.lanes and all(rank in staying.ranks for lane in plan.lanes for rank in lane.ranks)
    find = search.as_it_is if idle else search.without(plan.given_up).best_lanes
    return _with_most_copies(search, find, min(count, len(staying.members) - 1))


def _with_most_copies(search: LaneSearch, find: Callable[[int], Found | None], most: int) -> Goal | None:
    """The lanes that `find` finds for as many copies of each box as fit, at most so many; None if none fit."""
    for copies in range(most, -1, -1):
        found = find(copies)
        if found is not None:
            return _goal_of(search.with_clocks(found, copies))
    return None


def _goal_of(found: Found) -> Goal:
    return Goal(found.plan.lanes, found.plan.predicted.step_s, found.because[0])


def _without_overdue(plan: Plan, copies: Copies, count: int, overdue: Sequence[Rank]) -> Plan | None:
    """The plan of the others, who have copies of everything, maybe fewer than are wanted; None if there is none."""
    leaving = plan.topology.with_leaving(overdue) if set(overdue) < set(plan.ranks) else plan.topology
    if not leaving.leaving or lanes_without(replace(plan, topology=leaving), count) is None:
        return None
    left = _copies_of(leaving.staying.ranks, copies)
    if not all(left.values()):
        return None
    try:
        return replan(replace(plan, topology=leaving), leaving.staying.ranks, left, count)
    except PlanError:  # nothing fits with the copies where they are: the ranks have to stay
        return None


def _without_leavers(plan: Plan, copies: Copies, count: int) -> Plan | None:
    """The plan of the ranks that stay, if nothing is needed of the others any more."""
    leaving, staying = plan.topology.leaving, plan.topology.staying.ranks
    left = _copies_of(staying, copies)
    computes = any(rank in leaving for lane in plan.lanes for rank in lane.ranks)
    if not leaving or computes or not all(left.values()):
        return None
    following = replan(plan, staying, left, count)
    # Where copies are made in waves, some boxes have fewer than are wanted, for now.
    enough = min(min(count, len(staying) - 1) + 1, max(len(box.replica_ranks) for box in following.boxes))
    return following if all(len(ranks) >= enough for ranks in left.values()) else None


def _copies_of(ranks: Sequence[Rank], copies: Copies) -> dict[BoxId, tuple[Rank, ...]]:
    return {number: tuple(rank for rank in have if rank in ranks) for number, have in copies.items()}


def _successor(plan: Plan, copies: Copies, count: int, looks: bool) -> Plan | None:
    """`looks`: for a better goal than the plan has."""
    following = _without_leavers(plan, copies, count)
    if following is not None:
        return following
    if any(rank in plan.topology.leaving for lane in _lanes_to_come(plan) for rank in lane.ranks):
        plan = replace(plan, goal=lanes_without(plan, count))
    # Where memory is short, there may be no room for what is wanted: then nothing follows.
    if wants_move(plan, copies, count):
        following = replan(plan, plan.ranks, copies, count)
        if _differs(plan, following):
            return following
    found = goal(plan, plan.topology, count) if looks else None
    if found is None:
        return None
    following = replan(replace(plan, goal=found), plan.ranks, copies, count)
    return following if _differs(plan, following) else None


def _with_trials(plan: Plan, copies: Copies, count: int, speeds: Mapping[Rank, float]) -> Plan | None:
    """The next plan if these ranks had these speeds; None if it had no work for any of them. Of those for whom it has
    none, nothing is assumed."""
    if not speeds:
        return None
    following = _successor(replace(plan, topology=plan.topology.with_trials(speeds)), copies, count, looks=True)
    if following is None:
        return None
    working = {rank for lane in _lanes_to_come(following) for rank in lane.ranks}
    idle = {rank: plan.topology.member(rank).speed for rank in speeds if rank not in working}
    if len(idle) == len(speeds):
        return None
    return replace(following, topology=following.topology.with_speeds(idle))


def _with_reshape_target(plan: Plan, reshape: ReshapeRequest, count: int) -> Plan:
    """The plan, of which the reshape is the goal; as it is where it has these lanes, or they do not fit, or copies for
    them, or they were given up."""
    if reshape.is_best:
        return replace(plan, is_asked=False)
    goal = reshape_target(plan, reshape, count)
    if (
        goal is None
        or goal.lanes == plan.lanes
        or goal.reason in plan.given_up
        or _without_room(plan, goal) is not None
    ):
        return plan
    return replace(plan, goal=goal)


def _without_room(plan: Plan, goal: Goal) -> Short | None:
    """A copy for which no rank would ever have room; none is made where goals are blocking."""
    return None if plan.workload.options.goals == "blocking" else copy_without_room(goal, plan)


def _have_shape(lanes: Sequence[Lane], reshape: ReshapeRequest) -> bool:
    """Whether these are the lanes of a reshape that names its own, wherever they are cut."""
    return are_uniform(lanes, reshape.dp or 0, reshape.pp or 0)


def _comes_as_asked(plan: Plan) -> bool:
    return plan.is_asked if plan.goal is None else plan.goal.is_asked


def _lanes_to_come(plan: Plan) -> tuple[Lane, ...]:
    return plan.lanes if plan.goal is None else plan.goal.lanes


def _differs(one: Plan, other: Plan) -> bool:
    """In who computes what, owns what, or has copies of what."""
    return (one.lanes, one.goal) != (other.lanes, other.goal) or any(
        a.owner != b.owner or set(a.replica_ranks) != set(b.replica_ranks)
        for a, b in zip(one.boxes, other.boxes, strict=True)
    )
