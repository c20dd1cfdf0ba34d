"""The coordinator machine with what it needs of a process: deadlines that follow what it hears, plans, and a rhythm.

In: events, and when they came. Out: actions, in which `Activate` has its plan; the caller performs them. Sockets, files
and the clock are the caller's, so that `service.py` and the simulator run the same.

    driver = CoordinatorDriver(planning, read_plan=…, clock=perf_counter, now_s=0.0)
    driver.turn(now_s, due_s); driver.handle(event, now_s)  ->  (Send(2, Activate(…, plan="…")), …)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from elaswave_fx.control.coordinator.plan_cache import PlanCache, Planned, Planning, Think, at_once
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol.decide import Decide, decide
from elaswave_fx.control.protocol.failure_detector import HeartbeatStats
from elaswave_fx.control.protocol.messages import Activate, Exited, Heartbeat, Send, Tick
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.types import Assignment, BoxId
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.topology import Epoch, Rank

TICK_S, IDLE_S = 0.05, 0.2
"""Between two looks at the clock: while something is under way, and else."""

LATE_S = 0.15
"""A look that comes so much later than it should was held up, as the heartbeats of ranks may have been."""

THINK_AFTER_S = 0.5
"""Of an epoch without trouble, before plans for the next loss are made."""

ReadPlan = Callable[[Epoch, int], Planned]
"""The plan of an epoch, with that hash, as a coordinator before this one has written it."""


class CoordinatorDriver:
    """One coordinator process, but for its effects. `clock`: seconds, for the time that planning takes."""

    def __init__(
        self,
        planning: Planning,
        read_plan: ReadPlan,
        clock: Callable[[], float],
        now_s: float,
        decide: Decide = decide,
        think: Think = at_once,
    ) -> None:
        """`first_actions` are to be performed before anything else. `think` has plans made for losses that may come."""
        self._planning, self._read_plan, self._clock = planning, read_plan, clock
        self._plan_cache = PlanCache(planning, think)
        self._plans: dict[int, Planned] = {}
        self._heartbeats = HeartbeatStats()
        self._moves: tuple[int, bool] | None = None
        self._thought_of: tuple[int, frozenset[Rank]] | None = None  # plan and copies for which all losses are planned
        self._activates: tuple[Activate, Activate] | None = None  # the last one as decided, and with its plan
        self._turn_s = now_s
        self._steady_s = 0.0
        self._thinks = False
        self.plan_ms = 0.0
        self.state, self.first_actions = membership.start(
            self._heartbeats.timeouts(False, now_s), self._replan, now_s, decide, self._wants_move
        )

    @property
    def pause_s(self) -> float:
        """Until the next look at the clock."""
        return IDLE_S if self._is_quiet and not self._thinks else TICK_S

    @property
    def retired(self) -> bool:
        """Whether another coordinator has taken over."""
        return self.state.phase == membership.RETIRED

    @property
    def register(self) -> Register:
        """As this coordinator knows it; it must have read the store."""
        assert self.state.register is not None
        return self.state.register

    @property
    def _is_quiet(self) -> bool:
        return self.state.phase == membership.STEADY and self.state.proposal is None

    def turn(self, now_s: float, due_s: float) -> None:
        """The process gets on; it should have looked at the clock at `due_s` at the latest."""
        if now_s - due_s > LATE_S:
            self._heartbeats.gap(now_s - self._turn_s, now_s)
        self._turn_s = now_s

    def handle(self, event: membership.Event, now_s: float) -> tuple[membership.Act, ...]:
        """One event, and all that follows from it. A planner that finds no plan ends the job."""
        if isinstance(event, Heartbeat):
            self._heartbeats.heard(event, now_s)
        elif isinstance(event, Exited):
            self._heartbeats.forget(event.rank)
        elif isinstance(event, Tick):
            self.state = membership.with_timeouts(self.state, self._heartbeats.timeouts(self._started(), now_s))
        before = self.state
        try:
            self.state, actions = membership.step(before, event, now_s)
        except PlanError as error:
            self.state, actions = membership.end(before, str(error))
        self._forget_the_past(before.register, self.state.register)
        return tuple(self._with_plan(action) for action in actions)

    def _started(self) -> bool:
        register = self.state.register
        return register is not None and (
            register.epoch > 0 or register.committed.version > register.activation.resume.version
        )

    def _forget_the_past(self, old: Register | None, new: Register | None) -> None:
        if old is None or new is None or old.epoch == new.epoch:
            return
        self._plans = {key: plan for key, plan in self._plans.items() if key == new.key.plan_hash}
        for rank in set(old.members) - set(new.members):
            self._heartbeats.forget(rank)

    # --- Plans ---

    def plan(self, plan_hash: int) -> Planned:
        """The plan with that hash: made here, or of an epoch that was found in the store."""
        if plan_hash not in self._plans:
            self._plans[plan_hash] = self._read_plan(self.register.epoch, plan_hash)
        return self._plans[plan_hash]

    def think_ahead(self, now_s: float) -> None:
        """Have one plan made for a loss that may come, once the epoch has settled; to be called with every tick."""
        if not self._is_quiet:
            self._steady_s, self._thinks = now_s, False
            return
        if now_s - self._steady_s < THINK_AFTER_S:
            return
        heard = self.state.detector.heard
        complete = frozenset(rank for rank, last in heard.items() if last.heartbeat.complete)
        about = self.register.key.plan_hash, complete
        if about == self._thought_of:
            return
        held = {
            box_id: tuple(rank for rank in box.replica_ranks if rank not in box.catching_up or rank in complete)
            for box_id, box in numbered(self.register.activation.assignment.boxes)
        }
        self._thinks = self._plan_cache.precompute_next(self.plan(self.register.key.plan_hash), held)
        self._thought_of = None if self._thinks else about

    def _with_plan(self, action: membership.Act) -> membership.Act:
        """The same value for every rank, so that it is encoded once."""
        if not isinstance(action, Send) or not isinstance(action.message, Activate):
            return action
        message = action.message
        if self._activates is None or self._activates[0] is not message:
            text = self.plan(message.activation.assignment.plan_hash).text
            self._activates = (message, replace(message, plan=text))
        return Send(action.target, self._activates[1])

    def _replan(
        self, members: tuple[Rank, ...], held: Mapping[BoxId, tuple[Rank, ...]], before: Assignment
    ) -> Assignment:
        began = self._clock()
        planned = self._plan_cache.replan(self.plan(before.plan_hash), members, held)
        self.plan_ms = 1e3 * (self._clock() - began)
        self._plans[planned.assignment.plan_hash] = planned
        return planned.assignment

    def _wants_move(self, register: Register) -> bool:
        """Asked with every tick while nothing is under way; the answer changes with the plan only."""
        plan_hash = register.key.plan_hash
        if self._moves is None or self._moves[0] != plan_hash:
            held = {box_id: box.replica_ranks for box_id, box in numbered(register.activation.assignment.boxes)}
            self._moves = (plan_hash, self._planning.wants_move(self.plan(plan_hash), held))
        return self._moves[1]
