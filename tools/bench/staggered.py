"""A step without a commit, simulated: what ReCycle's staggered optimizer would bring to a plan, in seconds.

With it a rank updates its parameters, and begins with its next step, as soon as all that read them have their gradients
(Gandhi et al., ReCycle, SOSP 2024). Nobody waits for the slowest stage of the step before, so steps overlap. Here no
rank begins a step that the one before is not committed for: it could not be done again. So this is a figure to hold
beside those of plans, and no plan.

    staggered_step_s(plan)  ->  2.41, where plan.predicted.step_s is 2.60
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elaswave_fx.plan.order.schedule import (
    Action,
    LaneKind,
    LinkOf,
    Location,
    Schedule,
    Task,
    Work,
    makespan_s,
    most_in_flight,
)
from elaswave_fx.plan.order.split_schedule import Room, split_schedules
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.lane_times import LaneTimes, fits, plan_work
from elaswave_fx.plan.replicas.holders import kept_elements
from elaswave_fx.plan.work.topology import Link, Rank

BEFORE, COUNTED = 3, 4
"""Steps in a row: so many until they overlap as they do from then on, and so many more that are measured."""


def staggered_step_s(plan: Plan) -> float:
    """Mean seconds of later steps, in the order of the plan or in the one with halves for which they are shortest.

    Exchange and update are those of the plan: a rank waits for its own in both. Lanes are the plan's too.
    """
    pipeline_s = min(_period_s(plan, schedule) for schedule in _schedules(plan))
    return pipeline_s + plan.predicted.exchange_s + plan.predicted.update_s


def _schedules(plan: Plan) -> Iterator[Schedule]:
    """The plan's own, and where halves are allowed those that fit the memory of all ranks."""
    yield {int(rank): order for rank, order in plan.schedule.items() if order}
    if plan.workload.options.schedule == "1f1b":
        return
    times, kept = LaneTimes(plan.workload, plan.topology), kept_elements(plan.boxes)
    first: dict[Location, tuple[Action, ...]] = {}
    rooms: dict[Location, Room] = {}
    for lane in plan.lanes:
        whole = times.whole_of(LaneKind.of(lane, plan.topology))
        first |= zip(map(int, lane.ranks), whole.orders, strict=True)
        rooms |= zip(map(int, lane.ranks), times.rooms(lane, kept), strict=True)
    work = plan_work(plan.workload, plan.topology, plan.lanes)
    bounds = {place: most_in_flight(order) for place, order in first.items()}
    for schedule in split_schedules(work, first, bounds, rooms, _link_of(plan)):
        if all(fits(order, rooms[place]) for place, order in schedule.items()):
            yield schedule


def _period_s(plan: Plan, schedule: Schedule) -> float:
    work = plan_work(plan.workload, plan.topology, plan.lanes, schedule)
    ends_s = [
        makespan_s(*_in_a_row(plan, work, schedule, count), _link_of(plan)) for count in (BEFORE, BEFORE + COUNTED)
    ]
    return (ends_s[1] - ends_s[0]) / COUNTED


def _in_a_row(plan: Plan, work: Work, schedule: Schedule, count: int) -> tuple[Work, Schedule]:
    """Take so many steps, each rank's one after the other; a rank begins one when all that read any of its parameters
    have ended the one before."""
    own = {place: sum(kind == "F" for kind, _ in order) for place, order in schedule.items()}
    readers = _readers(plan, schedule)
    tasks: list[Task] = []
    needs: dict[Task, dict[Task, int]] = {}
    seconds: dict[Task, float] = {}
    for step in range(count):

        def later(task: Task, step: int = step) -> Task:
            return task[0], task[1], task[2] + step * own[task[0]]

        for task in work.tasks:
            tasks.append(later(task))
            needs[later(task)] = {later(before): size for before, size in work.needs[task].items()}
            seconds[later(task)] = work.seconds[task] * plan.slowdown(Rank(task[0]))
        for place, order in schedule.items():
            if step:
                ends = (later((other, *schedule[other][-1]), step - 1) for other in readers[place])
                needs[later((place, *order[0]))] |= dict.fromkeys(ends, 0)
    orders = {
        place: tuple((kind, mb + step * own[place]) for step in range(count) for kind, mb in order)
        for place, order in schedule.items()
    }
    return Work(tuple(tasks), needs, seconds), orders


def _readers(plan: Plan, schedule: Schedule) -> Mapping[Location, set[Location]]:
    """Who computes with a parameter that a place computes with, itself included."""
    found: dict[Location, set[Location]] = {place: {place} for place in schedule}
    for ranks in plan.groups.values():
        for rank in ranks:
            found[rank].update(ranks)
    return found


def _link_of(plan: Plan) -> LinkOf:
    def link(a: Location, b: Location) -> Link:
        return plan.topology.link(Rank(a), Rank(b))

    return link
