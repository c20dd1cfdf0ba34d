"""The coordinator process: sockets, store, plans and clock around `membership.step`. It holds no tensors.

In: heartbeats and reports of ranks, the launcher's word that a process is gone. Out: epochs in the store, plans beside
it (`plan-EPOCH.json`, written before the swap that makes the epoch), ACTIVATE to the ranks, events to the launcher.
Nothing here is needed to commit a step, and all of it can be started again at any time.

    run_coordinator(CoordinatorSpec(address=…, run_dir=…, planning=Planner(copies=1)), channel)  ->  0
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq

from elaswave_fx.control.coordinator.event_log import line_of, log_line
from elaswave_fx.control.coordinator.plan_cache import PlanCache, Planned, Planning
from elaswave_fx.control.lifeline import Lifelines
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.decide import decide
from elaswave_fx.control.protocol.events import EVENT_TYPES
from elaswave_fx.control.protocol.failure_detector import HeartbeatStats
from elaswave_fx.control.protocol.messages import Activate, Ended, Exited, Heartbeat, Saved, Send, Tick
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap
from elaswave_fx.control.protocol.types import Assignment, BoxId, Stamp, Version
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket
from elaswave_fx.errors import CommError, PlanError
from elaswave_fx.plan.box import numbered
from elaswave_fx.plan.topology import Epoch, Rank

TICK_S, IDLE_S = 0.05, 0.2
"""Between two looks at the clock: while something is under way, and else."""

LATE_S = 0.15
"""A look that comes so much later than it should was held up, as the heartbeats of ranks may have been."""

ALIVE_S = 0.5
"""Between words to the launcher that this process gets on."""

THINK_AFTER_S = 0.5
"""Of an epoch without trouble, before plans for the next loss are made."""

BIND_RETRY_S = 0.05
ALONE_S = 10.0
"""Without launcher and without a rank that speaks for so long, nobody needs a coordinator."""

OVER_S = 2.0
"""The same once the job is over."""

ENDED, SUPERSEDED = 0, 3
"""Exit codes."""


class News(Protocol):
    """One message of the launcher."""

    @property
    def kind(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...


class Channel(Protocol):
    """The way to the launcher. In: exited{rank} finished{rank} saved{version, epoch}; out: event{} alive{}."""

    closed: bool

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[News]: ...
    def send(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CoordinatorSpec:
    """One job's coordinator. `run_dir`: where plans lie."""

    address: ControlAddress
    run_dir: Path
    planning: Planning
    allow_rollback: bool = False


def run_coordinator(spec: CoordinatorSpec, channel: Channel | None) -> int:
    """Serve until the job has ended, or another coordinator has taken over. `channel`: to the launcher, if it lives."""
    socket = _take_address(spec, channel)
    if socket is None:
        return ENDED
    service = Service(spec, socket, channel)
    try:
        code = service.run()
        if code == ENDED and service.is_last:
            spec.address.job_file.unlink(missing_ok=True)
        return code
    finally:
        service.close()
        socket.close(200)


def _take_address(spec: CoordinatorSpec, channel: Channel | None) -> CoordinatorSocket | None:
    """The job's address, as soon as no other coordinator has it; None when the launcher is gone before."""
    waits = False
    while True:
        try:
            return CoordinatorSocket(spec.address.url, spec.address.token)
        except CommError as error:
            if not waits:
                print(f"coordinator: waits, {error}", file=sys.stderr, flush=True)
            waits = True
        if channel is not None and (channel.drain(), channel.closed)[1]:
            return None
        time.sleep(BIND_RETRY_S)


class Service:
    """One coordinator process's mutable part."""

    def __init__(self, spec: CoordinatorSpec, socket: CoordinatorSocket, channel: Channel | None) -> None:
        self._spec, self._socket, self._channel = spec, socket, channel
        self._store = FileStore(spec.address.store)
        self._lifelines = Lifelines(spec.address)
        self._heartbeats = HeartbeatStats()
        self._plans: dict[int, Planned] = {}
        self._moves: tuple[int, bool] | None = None
        self._plan_ms = 0.0
        self._activates: tuple[Activate, Activate] | None = None  # the last one as decided, and with its plan
        self._plan_cache = PlanCache(spec.planning)
        self._steady_s = 0.0
        self._thinks = False
        self._turn_s = self._tick_s = self._heard_s = self._alive_s = time.monotonic()
        state, actions = membership.start(
            self._heartbeats.timeouts(False, self._turn_s),
            self._replan,
            self._turn_s,
            partial(decide, allow_rollback=spec.allow_rollback),
            self._wants_move,
        )
        self._state = state
        self._perform(actions, self._turn_s)

    def run(self) -> int:
        """Until nobody needs it any more; the exit code."""
        poller = zmq.Poller()
        poller.register(self._socket.pollable, zmq.POLLIN)
        poller.register(self._lifelines.fileno(), zmq.POLLIN)
        if self._channel is not None:
            poller.register(self._channel.fileno(), zmq.POLLIN)
        while self._state.phase != membership.RETIRED:
            due_s = self._tick_s + self._pause_s
            poller.poll(max(0, math.ceil(1e3 * (due_s - time.monotonic()))))
            now = time.monotonic()
            if now - due_s > LATE_S:
                self._heartbeats.gap(now - self._turn_s, now)
            self._turn_s = now
            # What has arrived is heard before the clock is: nobody is silent whose word lies in the queue.
            while (message := self._socket.receive()) is not None:
                if isinstance(message, Heartbeat):
                    self._heartbeats.heard(message, now)
                self._heard_s = now
                self._feed(message)
            for event in self._lifelines.events():
                self._feed(event)
            if self._channel is not None:
                self._listen(poller, self._channel)
            if now >= self._tick_s + self._pause_s:
                self._tick_s = now
                self._tick(now)
                if self._is_alone(now):
                    return ENDED
        return SUPERSEDED

    def close(self) -> None:
        """Ranks see that this coordinator is gone. The socket of the messages is the caller's to close."""
        self._lifelines.close()

    @property
    def is_last(self) -> bool:
        """Whether nobody is left to clear up after the job: the launcher is gone."""
        return self._channel is None

    @property
    def _pause_s(self) -> float:
        """Until the next look at the clock."""
        idle = self._state.phase == membership.STEADY and self._state.proposal is None and not self._thinks
        return IDLE_S if idle else TICK_S

    def _tick(self, now: float) -> None:
        register = self._state.register
        started = register is not None and (
            register.epoch > 0 or register.committed.version > register.activation.resume.version
        )
        self._state = membership.with_timeouts(self._state, self._heartbeats.timeouts(started, now))
        self._feed(Tick())
        self._think_ahead(now)
        if now - self._alive_s > ALIVE_S:
            self._alive_s = now
            self._tell("alive")

    def _is_alone(self, now: float) -> bool:
        alone_s = OVER_S if self._state.phase == membership.OVER else max(ALONE_S, 2 * self._state.timeouts.silent_s)
        return self._channel is None and now - self._heard_s > alone_s

    # --- The launcher ---

    def _listen(self, poller: zmq.Poller, channel: Channel) -> None:
        for message in channel.drain():
            fields = message.fields
            if message.kind == "exited":
                self._heartbeats.forget(fields["rank"])
                self._feed(Exited(Rank(fields["rank"])))
            elif message.kind == "finished":
                self._feed(Ended(Rank(fields["rank"])))
            elif message.kind == "saved":
                self._feed(Saved(Stamp(Version(fields["version"]), Epoch(fields["epoch"]))))
        if channel.closed:
            poller.unregister(channel.fileno())
            self._channel = None

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(kind, **fields)
        except CommError:
            return  # it is gone, as is noticed by `_listen`

    # --- The machine ---

    def _feed(self, event: Any) -> None:
        """One event, and all that follows from it. A planner that finds no plan ends the job."""
        before = self._state
        now = time.monotonic()
        try:
            self._state, actions = membership.step(before, event, now)
        except PlanError as error:
            self._state, actions = membership.end(before, str(error))
        if before.register is not None and self._state.register is not before.register:
            self._on_register(before.register, self._state.register)
        self._perform(actions, now)

    def _on_register(self, old: Register, new: Register | None) -> None:
        if new is not None and new.epoch != old.epoch:
            self._moves = None
            self._plans = {key: plan for key, plan in self._plans.items() if key == new.key.plan_hash}
            for rank in set(old.members) - set(new.members):
                self._heartbeats.forget(rank)

    def _perform(self, actions: tuple[membership.Act, ...], now: float) -> None:
        """Ranks hear first: they wait, the log does not. What the store answers is told after what led to it."""
        told = [action for action in actions if isinstance(action, EVENT_TYPES)]
        stored = [action for action in actions if isinstance(action, Read | Swap)]
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
        for event in told:
            self._tell_event(event, now)
        for action in stored:
            self._at_store(action)

    def _tell_event(self, event: events.Event, now: float) -> None:
        print(f"{now:.3f} {log_line(event)}", flush=True)
        line = line_of(event, now)
        if line is None:
            return
        kind, epoch, fields = line
        self._tell("event", event=kind, epoch=epoch, at_s=now, **fields)
        if isinstance(event, events.Agreed):
            self._tell("event", event="planned", epoch=epoch, at_s=now, **self._planned_fields())

    def _send(self, action: Send) -> None:
        message: Any = action.message
        if isinstance(message, Activate):
            message = self._with_plan(message)
        self._socket.send(action.target, message)

    def _with_plan(self, message: Activate) -> Activate:
        """The same value for every rank."""
        if self._activates is None or self._activates[0] is not message:
            plan = self._plan(message.activation.assignment.plan_hash)
            self._activates = (message, replace(message, plan=plan.text))
        return self._activates[1]

    def _at_store(self, action: Read | Swap) -> None:
        """A store that cannot be reached is asked again by the machine."""
        try:
            if isinstance(action, Swap):
                self._write_plan(action.new)
                register = self._store.swap(action)
            else:
                register = self._store.read()
        except OSError as error:
            print(f"{time.monotonic():.3f} store: not reached ({error})", file=sys.stderr, flush=True)
            return
        self._feed(StoreReply(register))

    # --- Plans ---

    def _plan(self, plan_hash: int) -> Planned:
        """The plan with that hash: made here, or read from its file after a restart."""
        if plan_hash not in self._plans:
            register = self._state.register
            assert register is not None
            path = plan_path(self._spec.run_dir, register.epoch)
            planned = self._spec.planning.read(path.read_text(encoding="utf-8"))
            if planned.assignment.plan_hash != plan_hash:
                raise PlanError(f"{path}: is not the plan of epoch {register.epoch}; its hash is another one")
            self._plans[plan_hash] = planned
        return self._plans[plan_hash]

    def _replan(
        self, members: tuple[Rank, ...], held: Mapping[BoxId, tuple[Rank, ...]], before: Assignment
    ) -> Assignment:
        began = time.perf_counter()
        planned = self._plan_cache.replan(self._plan(before.plan_hash), members, held)
        self._plan_ms = 1e3 * (time.perf_counter() - began)
        self._plans[planned.assignment.plan_hash] = planned
        return planned.assignment

    def _think_ahead(self, now: float) -> None:
        """One plan per tick for a loss that may come, once the epoch has settled."""
        state = self._state
        if state.phase != membership.STEADY or state.proposal is not None or state.register is None:
            self._steady_s, self._thinks = now, False
            return
        if now - self._steady_s < THINK_AFTER_S:
            return
        boxes = state.register.activation.assignment.boxes
        complete = {rank for rank, heard in state.detector.heard.items() if heard.heartbeat.complete}
        held = {
            box_id: tuple(rank for rank in box.replica_ranks if rank not in box.catching_up or rank in complete)
            for box_id, box in numbered(boxes)
        }
        self._thinks = self._plan_cache.precompute_next(self._plan(state.register.key.plan_hash), held)

    def _wants_move(self, register: Register) -> bool:
        """Asked with every tick while nothing is under way; the answer changes with the plan only."""
        plan_hash = register.key.plan_hash
        if self._moves is None or self._moves[0] != plan_hash:
            boxes = register.activation.assignment.boxes
            held = {box_id: box.replica_ranks for box_id, box in numbered(boxes)}
            self._moves = (plan_hash, self._spec.planning.wants_move(self._plan(plan_hash), held))
        return self._moves[1]

    def _write_plan(self, new: Register) -> None:
        register = self._state.register
        if register is None or new.epoch == register.epoch:
            return
        path = plan_path(self._spec.run_dir, new.epoch)
        beside = path.with_name(f".{path.name}.new")
        with beside.open("w", encoding="utf-8") as file:
            file.write(self._plan(new.key.plan_hash).text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def _planned_fields(self) -> dict[str, Any]:
        register = self._state.register
        assert register is not None
        planned = self._plan(register.key.plan_hash)
        return {"reason": planned.reason, "plan_ms": round(self._plan_ms, 3), "lines": list(planned.lines)}


def plan_path(run_dir: Path, epoch: int) -> Path:
    """Where the plan of an epoch lies."""
    return run_dir / f"plan-{epoch}.json"
