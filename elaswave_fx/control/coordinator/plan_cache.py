"""The coordinator's interface to the planner, and its precomputed plans.

In: the text of a plan, the remaining ranks, the replica holders of each box. Out: `Planned`, the next plan.

    planning.replan(planning.read(text), members=(0, 2, 3), held={0: (2,), 1: (0, 3)})  ->  Planned(epoch 1)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from elaswave_fx.control.protocol.probation import DrainedRank, SlowRanks
from elaswave_fx.control.protocol.speed_meter import Expected
from elaswave_fx.control.protocol.types import Assignment
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.work.box import BoxId
from elaswave_fx.plan.work.topology import Member, Rank

if TYPE_CHECKING:
    from elaswave_fx.plan.plan import Plan

Held = Mapping[BoxId, tuple[Rank, ...]]
"""Box -> ranks with a replica of it."""


Joiners = Mapping[Rank, Member]
"""Members by their member info, for ranks that are not in the previous plan."""


Speeds = Mapping[Rank, float]
"""Speeds of ranks relative to the measured costs."""


@dataclass(frozen=True)
class Planned:
    """A plan with its text.

    `lines`: its changes, as text. `plan`, `choice`: the planner's own plan and the result of its search. `skipped`:
    samples at the end of every batch that no rank computes. `speeds`: those that differ from the plan before; `tried`:
    of these, the ranks on probation. `reshape`: the user's request that it carries out or begins. `aim`: purpose of the
    planned reconfiguration before it, as a clause. `layout`: its lanes, if the same ranks had others before.
    `most_ranks`: how many ranks can have work. `ends_job`: no step is possible with these ranks.
    """

    text: str
    assignment: Assignment
    reason: str
    plan: Any
    lines: tuple[str, ...] = ()
    choice: Any = None
    skipped: int = 0
    speeds: Speeds = field(default_factory=dict[Rank, float])
    tried: tuple[Rank, ...] = ()
    reshape: ReshapeRequest | None = None
    aim: str = ""
    layout: str = ""
    most_ranks: int = 1 << 30
    ends_job: bool = False


class Planning(Protocol):
    """A planner; pure: equal input gives equal output."""

    def read(self, text: str) -> Planned:
        """Read a plan. Raises PlanError if the text is none."""
        ...

    def replan(
        self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
        joiners: Joiners | None = None,
    ) -> Planned:  # fmt: skip
        """The plan of the next epoch; a terminal one if these ranks cannot train. `like`: the plan after the loss of
        another rank of the same kind, which saves the search for lanes."""
        ...

    def loss_kind(self, before: Planned, rank: Rank) -> Hashable:
        """A key that is equal for ranks whose losses have like plans."""
        ...

    def successor(self, before: Planned, held: Held, request: ReplanRequest) -> Planned | None:
        """The next plan, given these replicas, for the same members or all but draining ones; None: no change."""
        ...

    def why_not(self, before: Planned, reshape: ReshapeRequest, was_tried: bool) -> str | None:
        """Why no plan for the reshape is possible or, if it `was_tried`, why there is none."""
        ...

    def expected(self, planned: Planned) -> Mapping[Rank, Expected]:
        """The speeds and times that the plan assumes of its ranks."""
        ...

    def slow_ranks(self, planned: Planned) -> SlowRanks:
        """Ranks without work because they are slow, and ranks on probation; none if a user chose the layout."""
        ...


@dataclass(frozen=True)
class Planner:
    """The planner of `elaswave_fx.plan`, with `replicas` replicas of each box besides its owner's."""

    replicas: int

    def read(self, text: str) -> Planned:
        from elaswave_fx.plan.plan import Plan

        return _planned(Plan.from_json(text), text)

    def replan(
        self, before: Planned, members: tuple[Rank, ...], held: Held, like: Planned | None = None,
        joiners: Joiners | None = None,
    ) -> Planned:  # fmt: skip
        from elaswave_fx.plan.next import replan
        from elaswave_fx.plan.predict.transition import Transition

        choice = None if like is None else like.choice
        try:
            plan, choice = replan.replan_like(before.plan, members, held, self.replicas, choice, joiners)
            lines = Transition.of(before.plan, plan).lines()
        except PlanError as error:
            plan, lines = replan.terminal_plan(before.plan, members, held, str(error), joiners), ()
        return replace(_planned(plan, plan.to_json(), lines), choice=choice)

    def loss_kind(self, before: Planned, rank: Rank) -> Hashable:
        from elaswave_fx.plan.next.loss_kinds import loss_kind

        return loss_kind(before.plan, rank)

    def successor(self, before: Planned, held: Held, request: ReplanRequest) -> Planned | None:
        from elaswave_fx.plan.describe import shape_words
        from elaswave_fx.plan.next import target_layout
        from elaswave_fx.plan.predict.transition import Transition

        plan = target_layout.successor(before.plan, held, self.replicas, request)
        if plan is None:
            return None
        left = tuple(rank for rank in request.leaving if rank not in plan.ranks)
        last = replace(before.plan, topology=before.plan.topology.with_leaving(left))
        planned = _planned(plan, plan.to_json(), Transition.of(last, plan).lines())
        speeds, reshape = plan.topology.speeds_changed_from(before.plan.topology), request.reshape
        return replace(
            planned,
            speeds=speeds,
            tried=tuple(rank for rank in speeds if rank in plan.topology.on_trial),
            reshape=reshape if reshape is not None and target_layout.carries(before.plan, plan, reshape) else None,
            aim=target_layout.aim_words(before.plan, plan),
            layout=shape_words(plan) if plan.ranks == before.plan.ranks and plan.lanes != before.plan.lanes else "",
        )

    def why_not(self, before: Planned, reshape: ReshapeRequest, was_tried: bool) -> str | None:
        from elaswave_fx.plan.next.target_layout import why_never, why_nothing_follows

        plan: Plan = before.plan
        return why_nothing_follows(plan, reshape, self.replicas) if was_tried else why_never(plan, reshape)

    def expected(self, planned: Planned) -> Mapping[Rank, Expected]:
        plan: Plan = planned.plan
        busy_s = {rank: cost.busy_s for rank, cost in plan.predicted.ranks.items()}
        return {
            tile.rank: Expected(
                plan.topology.member(tile.rank).speed,
                busy_s.get(tile.rank, 0.0),
                tile.units,
                tile.rank in plan.topology.on_trial,
            )
            for tile in plan.tiles
        }

    def slow_ranks(self, planned: Planned) -> SlowRanks:
        plan: Plan = planned.plan
        if plan.is_asked or not plan.lanes:
            return SlowRanks()
        target = plan.lanes if plan.target is None else plan.target.lanes
        working = {rank for lanes in (plan.lanes, target) for lane in lanes for rank in lane.ranks}
        highest = max(plan.topology.member(rank).speed for rank in working)
        drained = {
            member.rank: DrainedRank(member.speed, highest)
            for member in plan.topology.staying.members
            if member.rank not in working and member.speed < highest
        }
        return SlowRanks(drained, frozenset(plan.topology.on_trial) - drained.keys())


def _planned(plan: Plan, text: str, lines: tuple[str, ...] = ()) -> Planned:
    from elaswave_fx.plan.plan import plan_hash

    assignment = Assignment(plan.ranks, plan.boxes, plan_hash(text))
    return Planned(
        text, assignment, plan.reason, plan, lines, skipped=plan.workload.skipped,
        most_ranks=_most_ranks(plan), ends_job=bool(plan.terminal_reason),
    )  # fmt: skip


def _most_ranks(plan: Plan) -> int:
    """A granule of a unit for each rank. If samples cannot move to other ranks, joiners get none."""
    work = plan.workload
    takes_more = work.options.policy != "elaswave" or "dataflow" in work.options.axes
    return len(work.units) * work.granules if takes_more else len(plan.ranks)


def skipped_by_plan(planning: Planning, texts: Iterable[str]) -> dict[str, int]:
    """Plan name in ledger lines -> number of skipped samples. Raises PlanError if a text is no plan."""
    planned = (planning.read(text) for text in texts)
    return {f"{each.assignment.plan_hash:016x}": each.skipped for each in planned}


Think = Callable[[Callable[[], None]], object]
"""Runs a piece of planning: immediately, or in a thread."""


def at_once(work: Callable[[], None]) -> None:
    work()


class PlanCache:
    """Plans for the loss of each single rank, and for the same members, precomputed in idle time.

    In: the plan in force and the replica holders. Out: for exactly that loss the plan that `replan` would make, only
    sooner; for the same members, or all except draining ones, with all replicas, the better plan. A search is made once
    for each kind of rank. One plan is made at a time; `think` decides where. Everything else is for one thread.
    """

    def __init__(self, planning: Planning, think: Think = at_once) -> None:
        self._planning, self._think = planning, think
        self._about: tuple[int, _Held] | None = None
        self._open: list[Rank] = []
        self._made: dict[tuple[tuple[Rank, ...], _Held], Future[Planned]] = {}
        self._of_kind: dict[Hashable, Future[Planned]] = {}
        self._next: tuple[int, Held, ReplanRequest, Future[Planned | None]] | None = None
        self._last: Future[Any] = Future()
        self._last.cancel()

    def precompute_next(self, before: Planned, held: Held) -> bool:
        """Have one more plan made, unless one is in progress; return False when all are made. Starts over if the plan
        or the replica holders changed."""
        about = (before.assignment.plan_hash, _frozen(held))
        if about != self._about:
            self._begin(before, about)
        if not self._last.done():
            return True
        if not self._open:
            return False
        lost = self._open.pop()
        members = tuple(rank for rank in before.assignment.members if rank != lost)
        left = {box: tuple(rank for rank in ranks if rank != lost) for box, ranks in held.items()}
        if members and all(left.values()):
            found: Future[Planned] = Future()
            kind = self._planning.loss_kind(before, lost)
            like = self._like(kind)
            self._last = self._made[members, _frozen(left)] = found
            self._of_kind.setdefault(kind, found)
            self._think(partial(_fulfil, found, partial(self._planning.replan, before, members, left, like)))
        return True

    def successor(self, before: Planned, held: Held, request: ReplanRequest) -> Planned | None:
        """Like `Planning.successor`; None while unknown."""
        return self._successor(before, held, request)[1]

    def has_no_successor(self, before: Planned, held: Held, request: ReplanRequest) -> bool:
        is_known, planned = self._successor(before, held, request)
        return is_known and planned is None

    def _successor(self, before: Planned, held: Held, request: ReplanRequest) -> tuple[bool, Planned | None]:
        about = (before.assignment.plan_hash, held, request)
        if self._next is None or self._next[:3] != about:
            if not self._last.done():
                return False, None
            found: Future[Planned | None] = Future()
            self._last, self._next = found, (*about, found)
            self._think(partial(_fulfil, found, partial(self._planning.successor, before, held, request)))
        made = self._next[3]
        return made.done(), made.result() if made.done() else None

    def ahead(
        self, before: Planned, members: tuple[Rank, ...], held: Held, joiners: Joiners | None = None
    ) -> Planned | None:
        """The plan with some new members; None while it is not made, and if there is none."""
        about = (before.assignment.plan_hash, _frozen(held))
        if about != self._about:
            self._begin(before, about)
        made = self._made.get((members, about[1]))
        if made is None and self._last.done():
            self._last = self._made[members, about[1]] = made = Future()
            self._think(partial(_fulfil, made, partial(self._planning.replan, before, members, held, None, joiners)))
        there = made is not None and made.done() and made.exception() is None
        return made.result() if made is not None and there else None

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held, joiners: Joiners | None = None) -> Planned:
        """Like `Planning.replan`, or the successor if known; waits for a plan in progress."""
        if self._next is not None and self._next[0] == before.assignment.plan_hash and self._next[3].done():
            replicas, planned = self._next[1], self._next[3].result()
            if planned is not None and planned.assignment.members == members:
                left = {box: tuple(rank for rank in ranks if rank in members) for box, ranks in replicas.items()}
                if _frozen(left) == _frozen(held):
                    return planned
        if self._about is None or self._about[0] != before.assignment.plan_hash:
            return self._planning.replan(before, members, held, None, joiners)
        made = self._made.get((members, _frozen(held)))
        if made is not None:
            return made.result()
        lost = set(before.assignment.members) - set(members)
        like = self._like(self._planning.loss_kind(before, lost.pop())) if len(lost) == 1 else None
        return self._planning.replan(before, members, held, like, joiners)

    def _begin(self, before: Planned, about: tuple[int, _Held]) -> None:
        """Start over; one rank of each kind comes first."""
        self._about, self._made, self._of_kind = about, {}, {}
        members = before.assignment.members
        first = set({self._planning.loss_kind(before, rank): rank for rank in members}.values())
        self._open = sorted(members, key=lambda rank: (rank in first, rank))

    def _like(self, kind: Hashable) -> Planned | None:
        """The plan after the loss of another rank of the kind, if it is made."""
        known = self._of_kind.get(kind)
        there = known is not None and known.done() and known.exception() is None
        return known.result() if known is not None and there else None


_Plan = TypeVar("_Plan")


def _fulfil(promise: Future[_Plan], work: Callable[[], _Plan]) -> None:
    """Set the result; an error of the work is raised to the caller who needs the plan."""
    try:
        promise.set_result(work())
    except Exception as error:  # noqa: BLE001
        promise.set_exception(error)


_Held = tuple[tuple[BoxId, tuple[Rank, ...]], ...]


def _frozen(held: Held) -> _Held:
    return tuple((box, tuple(sorted(ranks))) for box, ranks in sorted(held.items()))
