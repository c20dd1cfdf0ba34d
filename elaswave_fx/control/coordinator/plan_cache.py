"""The planner as the coordinator uses it: texts of plans in, what the protocol needs of them out.

In: the text of a plan, the ranks that go on, who has a copy of which box. Out: `Planned`, the next plan.

    planning.replan(planning.read(text), members=(0, 2, 3), held={0: (2,), 1: (0, 3)})  ->  Planned(epoch 1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from elaswave_fx.control.protocol.types import Assignment
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import BoxId
from elaswave_fx.plan.topology import Rank

if TYPE_CHECKING:
    from elaswave_fx.plan.plan import Plan

Held = Mapping[BoxId, tuple[Rank, ...]]
"""Ranks with a copy of each box."""


@dataclass(frozen=True)
class Planned:
    """A plan with its text. `lines`: what changes with it, in words; `plan` is the planner's own."""

    text: str
    assignment: Assignment
    reason: str
    plan: Any
    lines: tuple[str, ...] = ()


class Planning(Protocol):
    """A planner. Pure: equal input, equal output."""

    def read(self, text: str) -> Planned:
        """The plan of a text; PlanError if it is none."""
        ...

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        """The plan of the next epoch; a terminal one if none is possible for so few."""
        ...

    def wants_move(self, before: Planned, held: Held) -> bool:
        """Whether planning anew for the same members would move owners or drop copies."""
        ...


@dataclass(frozen=True)
class Planner:
    """The planner of `elaswave_fx.plan`, with `copies` copies of each box besides its owner's."""

    copies: int

    def read(self, text: str) -> Planned:
        from elaswave_fx.plan.plan import Plan

        return _planned(Plan.from_json(text), text)

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        from elaswave_fx.plan import replan
        from elaswave_fx.plan.transition import Transition

        try:
            plan = replan.replan(before.plan, members, held, self.copies)
            lines = Transition.of(before.plan, plan).lines()
        except PlanError as error:
            plan, lines = replan.terminal_plan(before.plan, members, held, str(error)), ()
        return _planned(plan, plan.to_json(), lines)

    def wants_move(self, before: Planned, held: Held) -> bool:
        from elaswave_fx.plan import replan

        return replan.wants_move(before.plan, held, self.copies)


def _planned(plan: Plan, text: str, lines: tuple[str, ...] = ()) -> Planned:
    from elaswave_fx.plan.plan import plan_hash

    return Planned(text, Assignment(plan.ranks, plan.tiles, plan.boxes, plan_hash(text)), plan.reason, plan, lines)


Think = Callable[[Callable[[], None]], object]
"""Has a piece of planning done: at once, or by a thread."""


def at_once(work: Callable[[], None]) -> None:
    """Without a thread."""
    work()


class PlanCache:
    """Plans for the loss of each single rank, made while nothing else is to be done, and used if they fit.

    In: the plan in force and who has which copy. Out: for exactly that loss the same plan as without, only sooner. One
    plan is made at a time; `think` decides where, and all else is of one thread.
    """

    def __init__(self, planning: Planning, think: Think = at_once) -> None:
        self._planning, self._think = planning, think
        self._about: tuple[int, _Held] | None = None
        self._open: list[Rank] = []
        self._made: dict[tuple[tuple[Rank, ...], _Held], Future[Planned]] = {}
        self._last: Future[Planned] = Future()
        self._last.cancel()

    def precompute_next(self, before: Planned, held: Held) -> bool:
        """Have one more plan made, unless one is under way; False when all are made. Starts over when the plan, or who
        has what, has changed."""
        about = (before.assignment.plan_hash, _frozen(held))
        if about != self._about:
            self._about, self._made = about, {}
            self._open = list(before.assignment.members)
        if not self._last.done():
            return True
        if not self._open:
            return False
        lost = self._open.pop()
        members = tuple(rank for rank in before.assignment.members if rank != lost)
        left = {box: tuple(rank for rank in ranks if rank != lost) for box, ranks in held.items()}
        if members and all(left.values()):
            self._last = self._made[members, _frozen(left)] = Future()
            self._think(partial(_fulfil, self._last, partial(self._planning.replan, before, members, left)))
        return True

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        """As `Planning.replan`; waits for a plan that is under way."""
        made = self._made.get((members, _frozen(held)))
        if made is not None and self._about is not None and self._about[0] == before.assignment.plan_hash:
            return made.result()
        return self._planning.replan(before, members, held)


def _fulfil(promise: Future[Planned], work: Callable[[], Planned]) -> None:
    """What the work raises is raised to whoever asks for the plan."""
    try:
        promise.set_result(work())
    except Exception as error:  # noqa: BLE001
        promise.set_exception(error)


_Held = tuple[tuple[BoxId, tuple[Rank, ...]], ...]


def _frozen(held: Held) -> _Held:
    return tuple((box, tuple(sorted(ranks))) for box, ranks in sorted(held.items()))
