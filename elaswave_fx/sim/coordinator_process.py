"""A coordinator's process: the machine, its plans, and deadlines measured as in a real run.

In: messages, exit words, ticks. Out: messages, swaps, and what it tells. `control/coordinator/service.py` is the same
with sockets and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elaswave_fx.control.coordinator.plan_cache import Planned
from elaswave_fx.control.coordinator.service import IDLE_S, LATE_S, TICK_S
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol.decide import Decide
from elaswave_fx.control.protocol.failure_detector import HeartbeatStats
from elaswave_fx.control.protocol.messages import (
    Activate,
    Connected,
    Disconnected,
    Exited,
    Heartbeat,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Assignment, BoxId
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.topology import Rank
from elaswave_fx.sim.job import PLANNER


@dataclass
class CoordinatorProcess:
    """One coordinator. `plans` are those that lie on disk, by their hashes: all coordinators of a job share them."""

    now: float
    plans: dict[int, Planned]
    decide: Decide
    heartbeats: HeartbeatStats = field(default_factory=HeartbeatStats)
    lifelines: set[Rank] = field(default_factory=set)

    def __post_init__(self) -> None:
        timeouts = self.heartbeats.timeouts(False, self.now)
        self.state, self.first_actions = membership.start(
            timeouts, self._replan, self.now, self.decide, self._wants_move
        )

    @property
    def pause_s(self) -> float:
        """Until the next look at the clock."""
        return IDLE_S if self.state.phase == membership.STEADY and self.state.proposal is None else TICK_S

    @property
    def retired(self) -> bool:
        """Whether another coordinator has taken over."""
        return self.state.phase == membership.RETIRED

    def handle(self, event: Any, now: float, late_s: float = 0.0) -> tuple[membership.Act, ...]:
        """One event; `late_s`: how much later than it should a tick came."""
        if late_s > LATE_S:
            self.heartbeats.gap(late_s, now)
        if isinstance(event, Heartbeat):
            self.heartbeats.heard(event, now)
        elif isinstance(event, Exited):
            self.heartbeats.forget(event.rank)
        elif isinstance(event, Tick):
            self.state = membership.with_timeouts(self.state, self.heartbeats.timeouts(self._started(), now))
        actions: tuple[membership.Act, ...] = ()
        if isinstance(event, Heartbeat) and event.rank not in self.lifelines:
            self.lifelines.add(event.rank)  # a rank opens it before its heartbeat
            actions = self._step(Connected(event.rank), now)
        elif isinstance(event, Disconnected):
            if event.rank not in self.lifelines:
                return ()
            self.lifelines.discard(event.rank)
        return (*actions, *self._step(event, now))

    def _step(self, event: membership.Event, now: float) -> tuple[membership.Act, ...]:
        before = self.state
        try:
            self.state, actions = membership.step(before, event, now)
        except PlanError as error:
            self.state, actions = membership.end(before, str(error))
        self._compare(before.register, self.state.register)
        return tuple(self._with_plan(action) for action in actions)

    def _started(self) -> bool:
        register = self.state.register
        return register is not None and (
            register.epoch > 0 or register.committed.version > register.activation.resume.version
        )

    def _compare(self, old: Register | None, new: Register | None) -> None:
        if old is None or new is None or old.epoch == new.epoch:
            return
        for rank in set(old.members) - set(new.members):
            self.heartbeats.forget(rank)

    def _with_plan(self, action: membership.Act) -> membership.Act:
        if not isinstance(action, Send) or not isinstance(action.message, Activate):
            return action
        message = action.message
        text = self.plans[message.activation.assignment.plan_hash].text
        return Send(action.target, Activate(message.ballot, message.activation, text))

    def _replan(
        self, members: tuple[Rank, ...], held: Mapping[BoxId, tuple[Rank, ...]], before: Assignment
    ) -> Assignment:
        planned = PLANNER.replan(self.plans[before.plan_hash], members, held)
        self.plans[planned.assignment.plan_hash] = planned
        return planned.assignment

    def _wants_move(self, register: Register) -> bool:
        held = {box_id: box.replica_ranks for box_id, box in numbered(register.activation.assignment.boxes)}
        return PLANNER.wants_move(self.plans[register.key.plan_hash], held)
