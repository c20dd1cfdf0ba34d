"""assign_frequency: give every stage of a plan its clock.

    AssignFrequency(points, cap_w=900).apply(plan)  ->  plan.clocks == {0: 1500 MHz, 1: 1200 MHz, …}

The bottleneck's clock is raised while that shortens the step within the cap; or it passes a unit to another stage if
that is shorter (`plan/make/cuts_and_clocks.py`). Clocks of waiting ranks are lowered while the step stays as long.
Later plans, of other ranks, get their clocks in the same way (`plan/next/replan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.plan.check.check_plan import check_plan
from elaswave_fx.plan.make.cuts_and_clocks import with_cuts_and_clocks
from elaswave_fx.plan.plan import Plan
from elaswave_fx.plan.predict.frequency import clock_words
from elaswave_fx.plan.work.operating_points import OperatingPoint, Power


@dataclass(frozen=True)
class AssignFrequency:
    """Run no rank faster than the step needs, and the bottleneck as fast as power allows."""

    name: ClassVar[str] = "assign_frequency"
    points: tuple[OperatingPoint, ...]
    cap_w: float | None = None
    idle_w: float = 0.0
    clocked: float = 1.0

    def apply(self, plan: Plan) -> Plan:
        """A checked plan. Raise ConfigError for invalid operating points, and for a cap that is too low."""
        try:
            power = Power(self.points, self.cap_w, self.idle_w, self.clocked)
            found = with_cuts_and_clocks(plan, power)
        except PlanError as error:
            raise ConfigError(f"power: {error}") from error
        found = replace(found, reason="; ".join((found.reason, *clock_words(found))))
        check_plan(found)
        return found
