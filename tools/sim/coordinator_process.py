"""A coordinator's process: the driver that a real one runs, the ends of the ranks' lifelines, and plans on a disk.

In: messages, exit words, ticks. Out: messages, swaps, and what it tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elaswave_fx.control.coordinator.driver import CoordinatorDriver
from elaswave_fx.control.coordinator.plan_cache import Planned
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol.coordinator_state import Following
from elaswave_fx.control.protocol.messages import Connected, Disconnected, Leave, ProbeStore, ReshapeWanted
from elaswave_fx.control.protocol.register import Register, StoreReply, Swap
from elaswave_fx.plan.work.topology import Rank
from tools.sim.bugs import Rules
from tools.sim.job import PLANNER, info_of


def all_but_leavers(register: Register, leaving: Mapping[Rank, Leave], complete: bool) -> Following | None:
    """Whoever was asked to leave goes with the next stop."""
    staying = tuple(rank for rank in register.members if rank not in leaving)
    return Following(staying, "") if leaving and staying else None


class CoordinatorProcess:
    """One coordinator. `disk`: the plans that were written, by their hashes; all coordinators of a job share it.
    `patience_s`: so long a last replica is waited for."""

    def __init__(self, now_s: float, disk: dict[int, Planned], rules: Rules, patience_s: float = math.inf) -> None:
        self._disk, self._rules = disk, rules
        self._lifelines: set[Rank] = set()
        self.driver = CoordinatorDriver(
            PLANNER, lambda epoch, plan_hash: disk[plan_hash], lambda: 0.0, now_s, rules.decide, patience_s=patience_s
        )
        if not rules.leavers_wait:
            self.driver.state = replace(self.driver.state, find_following=all_but_leavers)

    def handle(self, event: Any, now_s: float, due_s: float) -> tuple[membership.Act, ...]:
        """One event; the process should have looked at the clock at `due_s`."""
        self.driver.turn(now_s, due_s)
        if isinstance(event, ReshapeWanted):
            self.driver.reshape(event)
            return ()
        if isinstance(event, Connected):
            self._lifelines.add(event.rank)
            self.driver.infos[event.rank] = info_of(event.rank)
        elif isinstance(event, Disconnected):
            if event.rank not in self._lifelines:
                return ()  # it was open to the coordinator before this one
            self._lifelines.discard(event.rank)
        elif isinstance(event, ProbeStore) and not self._rules.store_is_read and self.driver.state.register is not None:
            event = StoreReply(self.driver.register, event)
        actions = self.driver.handle(event, now_s)
        for action in actions:
            if isinstance(action, Swap):
                plan_hash = action.new.key.plan_hash
                self._disk[plan_hash] = self.driver.plan(plan_hash)
        return actions
