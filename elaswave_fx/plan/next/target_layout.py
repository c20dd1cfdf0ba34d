"""Target layouts of unchanged ranks: better lanes, even shares, no superfluous replicas. Pure.

In: a plan whose replicas are all in sync. Out: its target layout (`TargetLayout`), or the next plan on the way to it.

    better_target(plan, plan.topology, 1)  ->  TargetLayout(lanes of three stages, a step of 410 ms, "units cut anew…")
    successor(plan, replicas, count=1, …)  ->  the same lanes, with replicas for the target's; then its lanes; then None
    the same, rank 2 leaves                ->  the same, for lanes without it; then a plan without it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from elaswave_fx.errors import PlanError
from elaswave_fx.plan.make.planner import are_uniform, lane_shapes, shape_name, uniform
from elaswave_fx.plan.next.lane_candidates import Candidate
from elaswave_fx.plan.next.lane_search import Found, LaneSearch
from elaswave_fx.plan.next.objective import AtOnce, InBackground, Objective
from elaswave_fx.plan.next.policies import next_workload
from elaswave_fx.plan.next.replan import Replicas, replan, wants_move
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.plan import Plan, TargetLayout
from elaswave_fx.plan.predict.transition_memory import Short
from elaswave_fx.plan.replicas.target_replicas import replica_without_room, sync_per_stall
from elaswave_fx.plan.work.box import BoxId, numbered
from elaswave_fx.plan.work.tiling import Lane
from elaswave_fx.plan.work.topology import Rank, Topology

WORTH = 1.03
"""Minimal speedup of a target layout's steps: it costs replica traffic and two stops of all ranks."""


def better_target(plan: Plan, topology: Topology, count: int) -> TargetLayout | None:
    """The candidate lanes that commit most steps, reached from `plan` in its workload's mode; None if they are not
    worth it. `topology`: the plan's ranks with their present speeds. `count`: replicas of a box."""
    if not plan.lanes:
        return None
    everywhere = [topology.ranks] * len(plan.boxes)
    replicas = min(count, len(topology.members) - 1)
    search = LaneSearch(plan, topology, everywhere)
    now = search.as_it_is(replicas)
    if now is None:
        return None
    now_s = search.with_clocks(now, replicas).plan.predicted.step_s
    search = LaneSearch(plan, topology, everywhere, _objective(plan, topology, now_s)).without(plan.given_up)
    found = search.best_lanes(replicas)
    if found is None:
        return None
    found = search.with_clocks(found, replicas)
    if found.plan.predicted.step_s * WORTH > now_s:
        return None
    return _target_of(found)


def _objective(plan: Plan, topology: Topology, now_s: float) -> Objective:
    """The objective for steps of `now_s`: a background target stalls no step, a blocking one does."""
    if plan.workload.options.goals == "blocking":
        return AtOnce(topology.life_s)
    return InBackground(topology.life_s, now_s, sync_per_stall(plan))


def successor(plan: Plan, replicas: Replicas, count: int, request: ReplanRequest | None = None) -> Plan | None:
    """The next plan, given the ranks' present replicas; None if the plan stays.

    It has the same ranks, or drops leaving ranks that have no work and no needed replica. A change of ranks voids
    requested lanes. Until all replicas of the plan are in sync, the only change is that an overdue rank is dropped, if
    other ranks have replicas of all its boxes.
    """
    request = request or ReplanRequest()
    known = replace(plan, topology=plan.topology.with_speeds(request.speeds).with_leaving(()))
    following = _without_overdue(known, replicas, count, request.overdue)
    if following is None and all(
        set(box.replica_ranks) <= set(replicas[number]) for number, box in numbered(plan.boxes)
    ):
        topology = next(_leaves(known, request.leaving, plan.topology.leaving, count))
        is_same = topology == plan.topology
        given_up = plan.given_up if is_same else ()
        known = replace(known, topology=topology, is_asked=plan.is_asked and is_same, given_up=given_up)
        known = known if request.reshape is None else _with_reshape_target(known, request.reshape, count)
        may_look = known.workload.options.goals != "never" or (request.reshape is not None and request.reshape.is_best)
        looks = may_look and not known.is_asked
        following = _successor(known, replicas, count, looks)
        following = (
            _with_trials(known, replicas, count, request.probation) if following is None and looks else following
        )
    if following is None:
        return None
    return replace(following, reason="; ".join((*speed_words(plan.topology, following.topology), following.reason)))


def reshape_target(plan: Plan, reshape: ReshapeRequest, count: int) -> TargetLayout | None:
    """The requested lanes on the first ranks, with the best cuts and shares; None if they are impossible or do not
    fit."""
    if reshape.dp is None or reshape.pp is None or why_never(plan, reshape) is not None:
        return None
    widths = uniform(reshape.dp, reshape.pp)
    topology = plan.topology
    members = topology.staying.members
    among = (Candidate(f"as it was asked for, {shape_name(widths)}", lane_shapes(members, widths)),)
    search = LaneSearch(plan, topology, [plan.ranks] * len(plan.boxes), among=among)
    found = _with_most_replicas(search, search.best_lanes, min(count, len(members) - 1))
    return None if found is None else replace(found, is_asked=True)


def carries(before: Plan, following: Plan, reshape: ReshapeRequest) -> bool:
    """Whether the plan after `before` carries out the reshape: its lanes, or its target's, have the requested shape,
    and those of `before` had not. A request for the best layout needs other lanes of the same ranks. A plan that
    first drops overdue ranks need not carry it out."""
    lanes = _lanes_to_come(following)
    if reshape.is_best:
        return following.ranks == before.ranks and lanes != _lanes_to_come(before)
    return _have_shape(lanes, reshape) and not _have_shape(before.lanes, reshape)


def aim_words(before: Plan, following: Plan) -> str:
    """The purpose of the planned reconfiguration between these plans, as a clause."""
    which = "the requested layout" if _comes_as_asked(following) else "another layout"
    if following.lanes != before.lanes:
        return f"{which} is taken"
    if following.target is not None and following.target != before.target:
        return f"replicas begin to sync for {which}"
    return "owners move"


def why_never(plan: Plan, reshape: ReshapeRequest) -> str | None:
    """Why a reshape is invalid with any memory, as a message to the user; None if it is valid."""
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
    """Why a valid reshape leads to no other plan. Ranks may leave before it can be carried out."""
    if reshape.is_best:
        return f"no other layout is known that makes steps {WORTH - 1:.0%} shorter"
    target = reshape_target(plan, reshape, count)
    short = None if target is None else _without_room(plan, target)
    if short is not None:
        return f"{reshape.words()}: {short.words}"
    if target is not None and target.reason in plan.given_up:
        why = "memory has no room for all replicas at once, nor for the lanes with fewer"
        return f"{reshape.words()}: was given up, for {why}"
    return f"{reshape.words()}: " + (
        "the job has these lanes" if _have_shape(plan.lanes, reshape) else "the ranks that stay have no room for them"
    )


def speed_words(before: Topology, after: Topology) -> Iterator[str]:
    """Ranks whose speed has changed or is assumed for a trial."""
    for rank, speed in after.speeds_changed_from(before).items():
        tried = "was too slow for any work and is tried at" if rank in after.on_trial else "has"
        yield f"rank {rank} {tried} a speed of {speed:g}, not {before.member(rank).speed:g}"


def _leaves(plan: Plan, leaving: Sequence[Rank], before: Sequence[Rank], count: int) -> Iterator[Topology]:
    """Topologies with as many leavers as can be spared, earlier leavers first; the last one has none."""
    in_turn = sorted(leaving, key=lambda rank: (rank not in before, rank))
    for number in range(min(len(in_turn), len(plan.ranks) - 1), 0, -1):
        topology = plan.topology.with_leaving(in_turn[:number])
        if lanes_without(replace(plan, topology=topology), count) is not None:
            yield topology
    yield plan.topology


def lanes_without(plan: Plan, count: int) -> TargetLayout | None:
    """The best lanes of the ranks that stay; the present lanes if only these ranks compute in them. None if these ranks
    cannot continue alone."""
    staying = plan.topology.staying
    search = LaneSearch(
        replace(plan, workload=next_workload(plan, plan.topology)), plan.topology, [plan.ranks] * len(plan.boxes)
    )
    idle = plan.lanes and all(rank in staying.ranks for lane in plan.lanes for rank in lane.ranks)
    find = search.as_it_is if idle else search.without(plan.given_up).best_lanes
    return _with_most_replicas(search, find, min(count, len(staying.members) - 1))


def _with_most_replicas(search: LaneSearch, find: Callable[[int], Found | None], most: int) -> TargetLayout | None:
    """The lanes that `find` returns for the most replicas per box that fit, up to `most`; None if none fit."""
    for replicas in range(most, -1, -1):
        found = find(replicas)
        if found is not None:
            return _target_of(search.with_clocks(found, replicas))
    return None


def _target_of(found: Found) -> TargetLayout:
    return TargetLayout(found.plan.lanes, found.plan.predicted.step_s, found.because[0])


def _without_overdue(plan: Plan, replicas: Replicas, count: int, overdue: Sequence[Rank]) -> Plan | None:
    """The plan without overdue ranks, maybe with fewer replicas than requested; None unless the others have replicas of
    everything."""
    leaving = plan.topology.with_leaving(overdue) if set(overdue) < set(plan.ranks) else plan.topology
    if not leaving.leaving or lanes_without(replace(plan, topology=leaving), count) is None:
        return None
    left = _replicas_of(leaving.staying.ranks, replicas)
    if not all(left.values()):
        return None
    try:
        return replan(replace(plan, topology=leaving), leaving.staying.ranks, left, count)
    except PlanError:  # nothing fits with the replicas where they are: the ranks have to stay
        return None


def _without_leavers(plan: Plan, replicas: Replicas, count: int) -> Plan | None:
    """The plan of the ranks that stay, if the others hold nothing that is needed."""
    leaving, staying = plan.topology.leaving, plan.topology.staying.ranks
    left = _replicas_of(staying, replicas)
    computes = any(rank in leaving for lane in plan.lanes for rank in lane.ranks)
    if not leaving or computes or not all(left.values()):
        return None
    following = replan(plan, staying, left, count)
    # Where replicas are made in waves, some boxes have fewer than requested for now.
    enough = min(min(count, len(staying) - 1) + 1, max(len(box.replica_ranks) for box in following.boxes))
    return following if all(len(ranks) >= enough for ranks in left.values()) else None


def _replicas_of(ranks: Sequence[Rank], replicas: Replicas) -> dict[BoxId, tuple[Rank, ...]]:
    return {number: tuple(rank for rank in have if rank in ranks) for number, have in replicas.items()}


def _successor(plan: Plan, replicas: Replicas, count: int, looks: bool) -> Plan | None:
    """`looks`: whether to search for a better target layout than the plan's."""
    following = _without_leavers(plan, replicas, count)
    if following is not None:
        return following
    if any(rank in plan.topology.leaving for lane in _lanes_to_come(plan) for rank in lane.ranks):
        plan = replace(plan, target=lanes_without(plan, count))
    # Where memory is short, there may be no room for the requested replicas: then there is no successor.
    if wants_move(plan, replicas, count):
        following = replan(plan, plan.ranks, replicas, count)
        if _differs(plan, following):
            return following
    found = better_target(plan, plan.topology, count) if looks else None
    if found is None:
        return None
    following = replan(replace(plan, target=found), plan.ranks, replicas, count)
    return following if _differs(plan, following) else None


def _with_trials(plan: Plan, replicas: Replicas, count: int, speeds: Mapping[Rank, float]) -> Plan | None:
    """The next plan if these ranks had these speeds; None if it had no work for any of them. Ranks without work in it
    keep their known speed."""
    if not speeds:
        return None
    following = _successor(replace(plan, topology=plan.topology.with_trials(speeds)), replicas, count, looks=True)
    if following is None:
        return None
    working = {rank for lane in _lanes_to_come(following) for rank in lane.ranks}
    idle = {rank: plan.topology.member(rank).speed for rank in speeds if rank not in working}
    if len(idle) == len(speeds):
        return None
    return replace(following, topology=following.topology.with_speeds(idle))


def _with_reshape_target(plan: Plan, reshape: ReshapeRequest, count: int) -> Plan:
    """The plan with the reshape as its target layout; unchanged if it has these lanes, if they or their replicas do not
    fit, or if they were given up."""
    if reshape.is_best:
        return replace(plan, is_asked=False)
    target = reshape_target(plan, reshape, count)
    if (
        target is None
        or target.lanes == plan.lanes
        or target.reason in plan.given_up
        or _without_room(plan, target) is not None
    ):
        return plan
    return replace(plan, target=target)


def _without_room(plan: Plan, target: TargetLayout) -> Short | None:
    """A replica for which no rank would ever have room. None where goals are blocking, as no replicas are made then."""
    return None if plan.workload.options.goals == "blocking" else replica_without_room(target, plan)


def _have_shape(lanes: Sequence[Lane], reshape: ReshapeRequest) -> bool:
    """Whether the lanes have the shape that the reshape names, with any cut."""
    return are_uniform(lanes, reshape.dp or 0, reshape.pp or 0)


def _comes_as_asked(plan: Plan) -> bool:
    return plan.is_asked if plan.target is None else plan.target.is_asked


def _lanes_to_come(plan: Plan) -> tuple[Lane, ...]:
    return plan.lanes if plan.target is None else plan.target.lanes


def _differs(one: Plan, other: Plan) -> bool:
    """Whether the plans differ in work, ownership or replicas."""
    return (one.lanes, one.target) != (other.lanes, other.target) or any(
        a.owner != b.owner or set(a.replica_ranks) != set(b.replica_ranks)
        for a, b in zip(one.boxes, other.boxes, strict=True)
    )
