"""The coordinator machine with its process-level parts: adaptive deadlines, plans, and the tick interval.

In: events and their times. Out: actions for the caller, with plans in `Activate`. Sockets, files and the clock are the
caller's, so `service.py` and the simulator run the same code.

    driver = CoordinatorDriver(planning, read_plan=…, clock=perf_counter, now_s=0.0)
    driver.turn(now_s, due_s); driver.handle(event, now_s)  ->  (Send(2, Activate(…, plan="…")), …)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from elaswave_fx.control.coordinator.plan_cache import (
    Held,
    Joiners,
    PlanCache,
    Planned,
    Planning,
    Speeds,
    Think,
    at_once,
)
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol.coordinator_state import Following
from elaswave_fx.control.protocol.decide import Decide, decide
from elaswave_fx.control.protocol.failure_detector import HeartbeatStats
from elaswave_fx.control.protocol.member_info import MemberInfo, member_of
from elaswave_fx.control.protocol.messages import (
    Activate,
    Exited,
    Gone,
    Granted,
    Heartbeat,
    Leave,
    Prepare,
    Refused,
    ReshapeWanted,
    Send,
    Tick,
)
from elaswave_fx.control.protocol.probation import Probation
from elaswave_fx.control.protocol.register import Register
from elaswave_fx.control.protocol.speed_meter import SpeedMeter, steadied
from elaswave_fx.control.protocol.types import STOPPED, Assignment, BoxId, Certificate, Version
from elaswave_fx.control.store.ledger import busy_seconds
from elaswave_fx.errors import PlanError
from elaswave_fx.plan.next.replan_request import ReplanRequest, ReshapeRequest
from elaswave_fx.plan.work.box import numbered
from elaswave_fx.plan.work.topology import Epoch, Rank

TICK_S, IDLE_S = 0.05, 0.2
"""Tick intervals: during a transition or a computation ahead, and otherwise."""

LATE_S = 0.15
"""Delay of a tick that shows that this process was held up; heartbeats may have been, too."""

THINK_AFTER_S = 0.5
"""Time in a steady epoch before plans for the next loss are made."""

ReadPlan = Callable[[Epoch, int], Planned]
"""(epoch, plan hash) -> the plan that an earlier coordinator has written."""


class CoordinatorDriver:
    """One coordinator process without its effects. `clock`: seconds, for the duration of planning."""

    def __init__(
        self,
        planning: Planning,
        read_plan: ReadPlan,
        clock: Callable[[], float],
        now_s: float,
        decide: Decide = decide,
        think: Think = at_once,
        while_planning: Callable[[], AbstractContextManager[object]] = nullcontext,
        patience_s: float = math.inf,
    ) -> None:
        """`first_actions` must be performed before anything else. `think` runs planning for possible losses.
        `while_planning`: entered while ranks wait for a plan. `patience_s`: longest wait for a last replica."""
        self._planning, self._read_plan, self._clock = planning, read_plan, clock
        self._plan_cache, self._while_planning = PlanCache(planning, think), while_planning
        self._plans: dict[int, Planned] = {}
        self._heartbeats = HeartbeatStats()
        self._thought_of: tuple[int, frozenset[Rank]] | None = None  # plan and in-sync ranks with all losses planned
        self._next_planned: Planned | None = None  # plan of the next planned reconfiguration
        self._with_text: tuple[Activate | Prepare, Activate | Prepare] | None = None  # the last one, and with plan
        self._turn_s = self._now_s = now_s
        self._steady_s = 0.0
        self._thinks = False
        self._meter: tuple[int, Version, SpeedMeter] | None = None  # of that plan: newest measured version
        self._all_replicas: tuple[int, Held] | None = None  # of that plan, once all replicas are in sync
        self._speeds: Speeds = {}  # of ranks that differ from the plan
        self._probation = Probation()  # of ranks without work because they are slow
        self._reshape: tuple[int, ReshapeRequest] | None = None  # (connection, request) of a user
        self.answers: deque[tuple[int, Granted | Refused]] = deque()  # to connections without a number
        self._request = ReplanRequest()  # the one for the next plan
        self.infos: dict[Rank, MemberInfo] = {}  # received infos; the caller adds them
        self.plan_ms = 0.0
        self.state, self.first_actions = membership.start(
            self._heartbeats.timeouts(False, now_s), self._replan, now_s, decide, self._find_following,
            self._why_needed, self._most_members, self._may_join, patience_s,
        )  # fmt: skip

    @property
    def pause_s(self) -> float:
        return IDLE_S if self._is_quiet and not self._thinks else TICK_S

    @property
    def retired(self) -> bool:
        return self.state.phase == membership.RETIRED

    @property
    def register(self) -> Register:
        """The register as this coordinator knows it; requires that the store was read."""
        assert self.state.register is not None
        return self.state.register

    @property
    def _is_quiet(self) -> bool:
        return self.state.phase == membership.STEADY and self.state.proposal is None

    def turn(self, now_s: float, due_s: float) -> None:
        """Record a turn of the process; `due_s` is when its tick was due at the latest."""
        if now_s - due_s > LATE_S:
            self._heartbeats.gap(now_s - self._turn_s, now_s)
        self._turn_s = now_s

    def handle(self, event: membership.Event, now_s: float) -> tuple[membership.Act, ...]:
        """Handle one event and its consequences. A planner without a plan ends the job."""
        self._now_s = now_s
        if isinstance(event, Heartbeat):
            self._heartbeats.heard(event, now_s)
            self._measure(event.lines)
        elif isinstance(event, Exited | Gone):
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

    @property
    def is_awaited(self) -> bool:
        """Whether ranks have left their step and wait for the next epoch."""
        over = self.state.phase in (membership.OVER, membership.RETIRED)
        heard = self.state.detector.heard.values()
        return not over and any(last.heartbeat.phase == STOPPED for last in heard)

    def end(self, reason: str) -> tuple[membership.Act, ...]:
        """End the job; waiting ranks are notified."""
        self.state, actions = membership.end(self.state, reason)
        return actions

    def reshape(self, wanted: ReshapeWanted) -> None:
        """Take a user's reshape request. It is answered when a plan for it is in force, or cannot be made."""
        self._refuse_reshape("another one has come")
        self._reshape = (wanted.connection, wanted.reshape)
        if self.state.phase == membership.OVER:
            self._refuse_reshape(f"the job is over: {self.state.over}")

    def _refuse_reshape(self, reason: str | None) -> None:
        if self._reshape is not None and reason is not None:
            self.answers.append((self._reshape[0], Refused(reason)))
            self._reshape = None

    def _started(self) -> bool:
        register = self.state.register
        return register is not None and (
            register.epoch > 0 or register.committed.version > register.activation.resume.version
        )

    def _forget_the_past(self, old: Register | None, new: Register | None) -> None:
        if old is None or new is None or old.epoch == new.epoch:
            return
        self._plans = {key: plan for key, plan in self._plans.items() if key == new.key.plan_hash}
        self._next_planned = None
        planned = self._plans.get(new.key.plan_hash)
        if self._reshape is not None and planned is not None and planned.reshape == self._reshape[1]:
            self.answers.append((self._reshape[0], Granted(planned.reason)))
            self._reshape = None
        for rank in set(old.members) - set(new.members):
            self._heartbeats.forget(rank)

    # --- Plans ---

    def plan(self, plan_hash: int) -> Planned:
        """Return the plan with that hash: made here, or read from the store."""
        if plan_hash not in self._plans:
            self._plans[plan_hash] = self._read_plan(self.register.epoch, plan_hash)
        return self._plans[plan_hash]

    def think_ahead(self, now_s: float) -> None:
        """Have one plan made for a possible loss, once the epoch has settled; call this with every tick."""
        if not self._is_quiet:
            self._steady_s, self._thinks = now_s, False
            return
        if now_s - self._steady_s < THINK_AFTER_S:
            return
        complete = self._complete()
        about = self.register.key.plan_hash, complete
        if about == self._thought_of:
            return
        held = self._held(self.register, complete)
        self._thinks = self._plan_cache.precompute_next(self.plan(self.register.key.plan_hash), held)
        self._thought_of = None if self._thinks else about

    def _with_plan(self, action: membership.Act) -> membership.Act:
        """Add the plan's text. The value is the same for every rank, so that it is encoded once."""
        if not isinstance(action, Send) or not isinstance(action.message, Activate | Prepare):
            return action
        if self._with_text is None or self._with_text[0] is not action.message:
            self._with_text = (action.message, self._texts_added(action.message))
        return Send(action.target, self._with_text[1])

    def _texts_added(self, message: Activate | Prepare) -> Activate | Prepare:
        if isinstance(message, Activate):
            members, plan_hash = message.activation.assignment.members, message.activation.assignment.plan_hash
            return replace(message, plan=self.plan(plan_hash).text, infos=self.infos_of(members))
        if message.stop_after is None or self._next_planned is None:
            return message
        return replace(message, plan=self._next_planned.text)

    def infos_of(self, ranks: Sequence[Rank]) -> tuple[MemberInfo, ...]:
        """Return the infos of those ranks that have sent them to this coordinator."""
        return tuple(self.infos[rank] for rank in ranks if rank in self.infos)

    def why_no_joiner(self, now_s: float) -> str | None:
        """Why the job accepts no joiner, as text; None if it does."""
        if self.state.phase == membership.OVER:
            return f"the job is over: {self.state.over}"
        if self.state.register is None:
            return None  # not read yet; joiners beyond the room wait
        most, here = self._most_members(self.register), len(self.register.members)
        come = len(self.state.unnumbered) + sum(
            last.heartbeat.joining and rank not in self.register.members and self.state.detector.is_alive(rank, now_s)
            for rank, last in self.state.detector.heard.items()
        )
        if here + come < most:
            return None
        waiting = f", and {come} more ask to join" if come else ""
        return f"the job is full: it has {here} ranks{waiting}, and work for {most}"

    def _complete(self) -> frozenset[Rank]:
        """Ranks whose replicas are all in sync."""
        return frozenset(rank for rank, last in self.state.detector.heard.items() if last.heartbeat.complete)

    @staticmethod
    def _held(register: Register, complete: frozenset[Rank]) -> dict[BoxId, tuple[Rank, ...]]:
        return {
            box_id: tuple(rank for rank in box.replica_ranks if rank not in box.catching_up or rank in complete)
            for box_id, box in numbered(register.activation.assignment.boxes)
        }

    def _may_join(self, register: Register, joining: tuple[Rank, ...]) -> bool:
        """Whether a plan with the joiners is ready; asked with every tick in a steady epoch with joiners."""
        before, members = self.plan(register.key.plan_hash), tuple(sorted((*register.members, *joining)))
        held, joiners = self._held(register, self._complete()), self._joiners(before, members)
        planned = self._plan_cache.ahead(before, members, held, joiners)
        self._next_planned = planned
        return planned is not None and not planned.ends_job

    def _joiners(self, before: Planned, members: tuple[Rank, ...]) -> Joiners:
        """Return the new members, whose infos this coordinator has received."""
        return {rank: member_of(self.infos[rank]) for rank in members if rank not in before.assignment.members}

    def _most_members(self, register: Register) -> int:
        return self.plan(register.key.plan_hash).most_ranks

    def _replan(
        self, members: tuple[Rank, ...], held: Mapping[BoxId, tuple[Rank, ...]], before: Assignment
    ) -> Assignment:
        began = self._clock()
        planned = self.plan(before.plan_hash)
        with self._while_planning():
            planned = self._plan_cache.replan(planned, members, held, self._joiners(planned, members))
        self.plan_ms = 1e3 * (self._clock() - began)
        self._plans[planned.assignment.plan_hash] = planned
        return planned.assignment

    def _measure(self, lines: Sequence[Certificate]) -> None:
        """Measure the unit times of newly committed steps; a ledger line may arrive more than once."""
        register = self.state.register
        if register is None:
            return
        plan_hash = register.key.plan_hash
        if self._meter is None or self._meter[0] != plan_hash:
            self._speeds = {}
            expected = self._planning.expected(self.plan(plan_hash))
            self._meter = (plan_hash, register.activation.resume.version, SpeedMeter.of(expected))
        _, heard, meter = self._meter
        new = [each for each in lines if each.stamp.epoch == register.epoch and each.stamp.version > heard]
        for certificate in new:
            meter = meter.heard({vote.rank: busy_seconds(vote.payload) for vote in certificate.votes})
            heard = certificate.stamp.version
        if new:
            self._meter = (plan_hash, heard, meter)
            self._speeds = steadied(self._speeds, meter.speeds() or {})

    def _find_following(self, register: Register, leaving: Mapping[Rank, Leave], complete: bool) -> Following | None:
        """Return the next plan, if any; asked with every tick in a steady epoch."""
        if self._reshape is not None:
            self._refuse_reshape(self._planning.why_not(self._present(register), self._reshape[1], was_tried=False))
        self._probation = self._probation.seen(self._planning.slow_ranks(self._present(register)), self._now_s)
        request = self._request = ReplanRequest(
            self._speeds,
            tuple(sorted(leaving)),
            tuple(sorted(rank for rank, leave in leaving.items() if leave is Leave.OVERDUE)),
            None if self._reshape is None else self._reshape[1],
            self._probation.speeds(self._now_s),
        )
        if not complete and not request.overdue:
            return None
        present, replicas = self._present(register), self._replicas(register, complete)
        planned = self._plan_cache.successor(present, replicas, request)
        if request.reshape is not None and complete and self._plan_cache.has_no_successor(present, replicas, request):
            self._refuse_reshape(self._planning.why_not(present, request.reshape, was_tried=True))
        self._next_planned = planned
        return None if planned is None else Following(planned.assignment.members, planned.aim)

    def _why_needed(self, register: Register, rank: Rank) -> str | None:
        """Why an overdue draining rank is needed; asked if there is no next plan."""
        before, held = self._present(register), self._replicas(register, self._complete().issuperset(register.members))
        if not self._plan_cache.has_no_successor(before, held, self._request):
            return None
        others = tuple(member for member in register.members if member != rank)
        if not others:
            return "it is the last rank of the job"
        left = {box: tuple(other for other in ranks if other != rank) for box, ranks in held.items()}
        alone = sum(not ranks for ranks in left.values())
        if alone:
            return f"no other rank has a replica of {alone} of {len(left)} boxes"
        planned = self._planning.replan(before, others, left)
        return planned.reason if planned.ends_job else "others leave, too, and not all of them can be spared"

    def _present(self, register: Register) -> Planned:
        return self.plan(register.key.plan_hash)

    def _replicas(self, register: Register, complete: bool) -> Held:
        """The replica holders of each box; the same object while nothing changes, once all are in sync."""
        if not complete:
            return self._held(register, self._complete())
        plan_hash = register.key.plan_hash
        if self._all_replicas is None or self._all_replicas[0] != plan_hash:
            boxes = numbered(register.activation.assignment.boxes)
            self._all_replicas = (plan_hash, {box_id: box.replica_ranks for box_id, box in boxes})
        return self._all_replicas[1]
