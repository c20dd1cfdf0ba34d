"""A coordinator's process: the driver that a real one runs, the ends of the ranks' lifelines, and plans on a disk.

In: messages, exit words, ticks. Out: messages, swaps, and what it tells.
"""

from __future__ import annotations

from typing import Any

from elaswave_fx.control.coordinator.driver import CoordinatorDriver
from elaswave_fx.control.coordinator.plan_cache import Planned
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol.decide import Decide
from elaswave_fx.control.protocol.messages import Connected, Disconnected
from elaswave_fx.control.protocol.register import Swap
from elaswave_fx.plan.topology import Rank
from elaswave_fx.sim.job import PLANNER


class CoordinatorProcess:
    """One coordinator. `disk`: the plans that were written, by their hashes; all coordinators of a job share it."""

    def __init__(self, now_s: float, disk: dict[int, Planned], decide: Decide) -> None:
        self._disk = disk
        self._lifelines: set[Rank] = set()
        self.driver = CoordinatorDriver(PLANNER, lambda epoch, plan_hash: disk[plan_hash], lambda: 0.0, now_s, decide)

    def handle(self, event: Any, now_s: float, due_s: float) -> tuple[membership.Act, ...]:
        """One event; the process should have looked at the clock at `due_s`."""
        self.driver.turn(now_s, due_s)
        if isinstance(event, Connected):
            self._lifelines.add(event.rank)
        elif isinstance(event, Disconnected):
            if event.rank not in self._lifelines:
                return ()  # it was open to the coordinator before this one
            self._lifelines.discard(event.rank)
        actions = self.driver.handle(event, now_s)
        for action in actions:
            if isinstance(action, Swap):
                plan_hash = action.new.key.plan_hash
                self._disk[plan_hash] = self.driver.plan(plan_hash)
        return actions
