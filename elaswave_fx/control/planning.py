"""The planner as the coordinator uses it: texts of plans in, what the protocol needs of them out.

In: the text of a plan, the ranks that go on, who has a copy of which box. Out: `Planned`, the next plan.

    planning.replan(planning.read(text), members=(0, 2, 3), held={0: (2,), 1: (0, 3)})  ->  Planned(epoch 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elaswave_fx.control.words import Assignment, BoxId
from elaswave_fx.plan.topology import Rank

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
        """The plan of the next epoch; PlanError if there is none for so few, with the number that would do."""
        ...

    def wants_move(self, before: Planned, held: Held) -> bool:
        """Whether planning anew for the same members would move owners or drop copies."""
        ...


@dataclass(frozen=True)
class Planner:
    """The planner of `elaswave_fx.plan`, with `copies` copies of each box besides its owner's."""

    copies: int

    def read(self, text: str) -> Planned:
        from elaswave_fx.control.assignment import assignment_of
        from elaswave_fx.plan.plan import Plan

        plan = Plan.from_json(text)
        return Planned(text, assignment_of(plan), plan.reason, plan)

    def replan(self, before: Planned, members: tuple[Rank, ...], held: Held) -> Planned:
        from elaswave_fx.control.assignment import assignment_of
        from elaswave_fx.plan import replan
        from elaswave_fx.plan.transition import Transition

        plan = replan.replan(before.plan, members, {int(box): ranks for box, ranks in held.items()}, self.copies)
        lines = Transition.of(before.plan, plan).lines()
        return Planned(plan.to_json(), assignment_of(plan), plan.reason, plan, tuple(lines))

    def wants_move(self, before: Planned, held: Held) -> bool:
        from elaswave_fx.plan import replan

        return replan.wants_move(before.plan, {int(box): ranks for box, ranks in held.items()}, self.copies)
