"""The coordinator process: sockets, store, files and clock around `driver.py`. It holds no tensors.

In: heartbeats and reports of ranks, exits of processes from the launcher. Out: epochs in the store, their plans
(written before the swap that makes the epoch), ACTIVATE to the ranks, events to the launcher. A thread writes the
ledger and the log to disk. Commits do not need this process, and it can be restarted at any time.

    run_coordinator(CoordinatorSpec(address=…, job_folder=…, planning=Planner(replicas=1), conditions=…), channel) -> 0
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from msgspec import UNSET

from elaswave_fx.control.coordinator.driver import CoordinatorDriver
from elaswave_fx.control.coordinator.event_log import job_event, log_line
from elaswave_fx.control.coordinator.file_server import FileServer, SharedFile
from elaswave_fx.control.coordinator.leader_lock import leader_lock
from elaswave_fx.control.coordinator.plan_cache import Planned, Planning
from elaswave_fx.control.coordinator.rank_reports import fault_of_report
from elaswave_fx.control.coordinator.refusal_log import RefusalLog
from elaswave_fx.control.coordinator.threads import BackgroundThread, KeepAlive
from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.protocol import coordinator as membership
from elaswave_fx.control.protocol import events
from elaswave_fx.control.protocol.decide import decide
from elaswave_fx.control.protocol.events import EVENT_TYPES
from elaswave_fx.control.protocol.member_info import Conditions, MemberInfo, other_versions, refusal
from elaswave_fx.control.protocol.messages import (
    Ended,
    Exited,
    Members,
    MembersWanted,
    Numbered,
    NumberWanted,
    Over,
    PartWanted,
    RankReport,
    Refused,
    ReshapeWanted,
    Saved,
    Send,
    Tick,
    Welcome,
)
from elaswave_fx.control.protocol.register import Read, Register, StoreReply, Swap
from elaswave_fx.control.protocol.types import Stamp, Version
from elaswave_fx.control.protocol.validate import AHEAD_MOST, fault_of, fault_of_member
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.wire import ControlAddress, CoordinatorSocket, Heard, OfRank
from elaswave_fx.errors import CommError, PlanError
from elaswave_fx.observe import job_events
from elaswave_fx.observe.job_events import JobEvent
from elaswave_fx.observe.run_event import fields_of
from elaswave_fx.plan.work.topology import Epoch, Rank
from elaswave_fx.scheduling import answer_soon, collect_rarely

ALIVE_S = 0.5
"""Interval of `alive` messages to the launcher."""

PLANS_S = 600.0
"""Longest time of planning while ranks wait: many ranks on a busy machine take seconds."""

BIND_RETRY_S = 0.05
LINGER_S = 0.2
"""Time for the last messages to leave."""

ALONE_S = 10.0
"""Silence of all ranks after which a coordinator without a launcher ends."""

OVER_S = 2.0
"""The same after the end of the job."""

SURE_S = 0.5
"""Age after which a process that has a job's folder open belongs to the job: checks for dead jobs are short."""

PAUSED_S = 1.0
"""Delay of a tick that shows that this process did not run."""

FLUSH_S = 1.0
"""Longest time that ledger lines wait in the store before they go to disk together."""

LAST_WORK_S = 5.0
"""Longest wait for the disk at the end; unwritten lines then stay in the store."""

SWITCH_S = 5e-4
"""Thread switch interval, instead of 5 ms, so that planning delays answers to ranks less."""

STORE_PATIENCE_S = 60.0
"""Longest wait of ranks for an epoch that cannot be written to the store; then the job ends."""

ENDED, SUPERSEDED = 0, 3
"""Exit codes."""


class News(Protocol):
    """A message of the launcher."""

    @property
    def kind(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...


class Channel(Protocol):
    """The channel to the launcher. In: exited{} finished{} saved{}; out: event{} told{} ended{} trouble{} alive{}."""

    closed: bool

    def fileno(self) -> int: ...
    def drain(self) -> Sequence[News]: ...
    def send(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CoordinatorSpec:
    """The coordinator of one job. `facts` (a text) and `files` (by name): passed on to joiners."""

    address: ControlAddress
    job_folder: JobFolder
    planning: Planning
    conditions: Conditions
    allow_rollback: bool = False
    patience_s: float = math.inf
    facts: str = ""
    files: Mapping[str, SharedFile] = field(default_factory=dict[str, SharedFile])


def run_coordinator(
    spec: CoordinatorSpec, channel: Channel | None, *, listener: socket.socket | None = None, waits: bool = True
) -> int:
    """Serve until the job ends or another coordinator takes over; return an exit code.

    `channel`: to the launcher, if it lives. `listener`: at the job's address; None: opened here, which works once
    launcher and earlier coordinators have ended. `waits`: wait until the leader lock is free.
    """
    with ExitStack() as stack:
        end = _take_place(spec, channel, listener, waits, stack)
        if end is None:
            return ENDED
        service = Service(spec, end, channel)
        stack.callback(service.close)
        return service.run()


def _take_place(
    spec: CoordinatorSpec, channel: Channel | None, listener: socket.socket | None, waits: bool, stack: ExitStack
) -> CoordinatorSocket | None:
    """Return the socket with the leader lock, until `stack` unwinds; None if launcher or job ended before."""
    said = False
    while True:
        try:
            return stack.enter_context(leader_lock(spec.job_folder, spec.address, listener, LINGER_S))
        except CommError as error:
            if not waits or not spec.job_folder.path.exists():
                return None
            if not said:
                print(f"coordinator: waits, {error}", file=sys.stderr, flush=True)
            said = True
        if channel is not None and (channel.drain(), channel.closed)[1]:
            return None
        time.sleep(BIND_RETRY_S)


class Service:
    """The mutable part of a coordinator process."""

    def __init__(self, spec: CoordinatorSpec, end: CoordinatorSocket, channel: Channel | None) -> None:
        self._spec, self._socket, self._channel = spec, end, channel
        self._store = FileStore(spec.job_folder.run_dir, spec.job_folder.path)
        self._background, self._planning_thread = BackgroundThread(), BackgroundThread()
        self._files, self._refusals = FileServer(spec.files), RefusalLog()
        self._flush_at_s = 0.0  # at the start the store may have unwritten lines
        self._trouble: str | None = None  # the newest error of the thread
        self._told_trouble: str | None = None
        self._unwritten: tuple[str, float] | None = None  # (reason, since when) the store refuses swaps
        self._tick_s = self._heard_s = self._alive_s = time.monotonic()
        self._driver = CoordinatorDriver(
            spec.planning,
            self._read_plan,
            time.perf_counter,
            self._tick_s,
            partial(decide, allow_rollback=spec.allow_rollback),
            self._planning_thread.submit,
            KeepAlive(partial(self._tell, "alive"), ALIVE_S, PLANS_S),
            spec.patience_s,
        )
        self._perform(self._driver.first_actions, self._tick_s)
        end.admit, end.doubt = self._admit, self._doubt
        end.on_stranger = end.on_fault = self._turned_away

    def run(self) -> int:
        """Serve until the job ends or another coordinator takes over; return the exit code. The last one cleans up."""
        answer_soon()
        collect_rarely()
        sys.setswitchinterval(SWITCH_S)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._files, select.POLLIN)
        if self._channel is not None:
            poll.register(self._channel, select.POLLIN)
        while not self._driver.retired:
            due_s = self._tick_s + self._driver.pause_s
            poll.poll(max(0, math.ceil(1e3 * (due_s - time.monotonic()))))
            now = time.monotonic()
            self._driver.turn(now, due_s)
            if now - due_s > PAUSED_S:
                self._heard_s = now  # Nothing could be received: the whole job may have been frozen.
            # Read all pending messages before the clock: no rank is silent whose message is queued.
            while said := self._socket.receive():
                self._heard_s = now
                for event in said:
                    self._hear(event, now)
            for joiner, part in self._files.answers():
                self._socket.answer(joiner, part)
            if self._channel is not None:
                self._listen(poll, self._channel)
            if now >= self._tick_s + self._driver.pause_s:
                self._tick_s = now
                self._tick(now)
                if self._is_alone(now):
                    self._background.submit(self._settle)
                    return ENDED
        return SUPERSEDED

    def close(self) -> None:
        """Wait for writes in progress, but not for plans. The caller closes the socket."""
        self._files.close()
        self._background.close(LAST_WORK_S)

    def _tick(self, now: float) -> None:
        self._feed(Tick())
        self._driver.think_ahead(now)
        self._look_after_disk(now)
        if now - self._alive_s > ALIVE_S:
            self._alive_s = now
            self._tell("alive")

    def _look_after_disk(self, now: float) -> None:
        """Flush plans and checkpoints with the next tick after a swap, ledger lines later; report disk trouble."""
        if now >= self._flush_at_s:
            self._flush_at_s = math.inf
            self._background.submit(self._flush)
        trouble = self._trouble if self._unwritten is None else self._unwritten[0]
        if trouble != self._told_trouble:
            self._told_trouble = trouble
            self._tell("trouble", text=trouble)
        if self._unwritten is not None and now - self._unwritten[1] > STORE_PATIENCE_S and self._driver.is_awaited:
            self._perform(self._driver.end(f"{self._unwritten[0]}, and no rank can go on without"), now)

    def _is_alone(self, now: float) -> bool:
        state = self._driver.state
        alone_s = OVER_S if state.phase == membership.OVER else max(ALONE_S, 2 * state.timeouts.silent_s)
        return self._channel is None and now - self._heard_s > alone_s

    # --- The launcher ---

    def _listen(self, poll: select.poll, channel: Channel) -> None:
        for message in channel.drain():
            fields = message.fields
            if message.kind == "exited":
                self._feed(Exited(Rank(fields["rank"])))
            elif message.kind == "finished":
                self._feed(Ended(Rank(fields["rank"])))
            elif message.kind == "saved":
                self._feed(Saved(Stamp(Version(fields["version"]), Epoch(fields["epoch"]))))
        if channel.closed:
            poll.unregister(channel)
            self._channel = None

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(kind, **fields)
        except CommError:
            return  # `_listen` notices the closed channel

    # --- Ranks and joiners ---

    def _hear(self, event: Heard, now: float) -> None:
        """Handle a message. Reports go to the launcher; refused joiners do not reach the machine."""
        if isinstance(event, RankReport):
            self._tell("told", rank=event.rank, what=event.kind, fields=event.fields)
            return
        if isinstance(event, Ended):
            self._tell("ended", rank=event.rank)
        if isinstance(event, PartWanted):
            self._files.ask(event)
            return
        if isinstance(event, MembersWanted):
            answer = self._members(event.info)
            if answer is not None:
                self._socket.answer(event.connection, answer)
            return
        if isinstance(event, ReshapeWanted):
            self._log(f"wanted: {event.reshape.words()}")
            self._driver.reshape(event)
            self._answer()
            return
        if isinstance(event, NumberWanted):
            differs = other_versions(event.versions, self._spec.conditions)
            reason = differs if differs is not None else self._driver.why_no_joiner(now)
            if reason is not None:
                self._log(f"refused: somebody who wants to join: {reason}")
                self._socket.answer(event.connection, Refused(reason))
                return
        self._feed(event)

    def _welcome(self, joiner: Numbered) -> None:
        self._log(f"rank {joiner.number} gets ready to join")
        infos = self._driver.infos_of(self._driver.register.members)
        welcome = Welcome(joiner.number, self._spec.facts, infos, self._files.offers())
        self._socket.answer(joiner.connection, welcome)

    def _members(self, info: MemberInfo) -> Members | Refused | None:
        """Keep the info of a rank without links; return its answer, None before the store has been read: it retries."""
        register = self._driver.state.register
        if register is None:
            return None
        if info.number not in register.members and self._driver.state.phase == membership.OVER:
            return Refused(f"the job is over: {self._driver.state.over}")
        reason = self._admit(info)
        if reason is not None:
            return Refused(reason)
        missing = tuple(rank for rank in register.members if rank not in self._driver.infos)
        return Members(self._driver.infos_of(register.members), missing)

    def _log(self, line: str) -> None:
        self._background.submit(partial(print, f"{time.monotonic():.3f} {line}", flush=True))

    def _turned_away(self, why: str) -> None:
        """Log a refused peer, or a rank disconnected for its report. Any number of these may come."""
        line = self._refusals.line(why, time.monotonic())
        if line is not None:
            self._log(line)

    def _admit(self, info: MemberInfo) -> str | None:
        """Return why a rank is refused. Keep the infos of all others, which send them to each new coordinator."""
        register = self._driver.state.register
        if register is None:
            raise CommError("control: nobody is taken before the store has been read; ranks dial again")
        infos = self._driver.infos
        if infos.get(info.number) == info:
            return None
        reason = fault_of_member(info) or refusal(info, self._spec.conditions, register.numbers, infos.get(info.number))
        if reason is None:
            infos[info.number] = info
        else:
            self._log(f"refused: rank {info.number} of {info.host} port {info.port}: {reason}")
        return reason

    def _doubt(self, message: OfRank) -> str | None:
        """Return the fault in a rank's message, so that it harms no other rank."""
        register = self._driver.state.register
        assert register is not None, "until the store has been read no rank is admitted"
        wrong = fault_of(message, register)
        if wrong is None and isinstance(message, RankReport):
            return fault_of_report(message, register.committed.version + AHEAD_MOST)
        return wrong

    # --- The machine ---

    def _feed(self, event: membership.Event) -> None:
        now = time.monotonic()
        self._perform(self._driver.handle(event, now), now)
        self._answer()

    def _answer(self) -> None:
        """Answer connections without a number."""
        while self._driver.answers:
            connection, message = self._driver.answers.popleft()
            self._log(f"refused: {message.reason}" if isinstance(message, Refused) else "what was wanted is planned")
            self._socket.answer(connection, message)

    def _perform(self, actions: tuple[membership.Act, ...], now: float) -> None:
        """Perform actions: messages first, since ranks wait; the store last, since its answer causes further events."""
        told = [action for action in actions if isinstance(action, EVENT_TYPES)]
        stored = [action for action in actions if isinstance(action, Read | Swap)]
        for action in actions:
            if isinstance(action, Send):
                self._socket.send(action.target, action.message)
            elif isinstance(action, Numbered):
                self._welcome(action)
        for event in told:
            self._tell_event(event, now)
        for action in stored:
            self._at_store(action)

    def _tell_event(self, event: events.Event, now: float) -> None:
        self._background.submit(partial(print, f"{now:.3f} {log_line(event)}", flush=True))
        found = job_event(event, now)
        if found is None or isinstance(event, events.Attempt | events.Superseded):
            return
        following: list[JobEvent] = [found]
        if isinstance(event, events.Agreed):
            following += self._plan_events()
        for each in following:
            self._tell("event", epoch=event.epoch, at_s=now, **fields_of(each))

    def _at_store(self, action: Read | Swap) -> None:
        """Access the store. The machine, or the rank that asked, retries if it is unreachable."""
        probe = action.probe if isinstance(action, Read) else None
        try:
            if isinstance(action, Swap):
                self._write_plan(action.new)
                register = self._store.swap(action)
                self._unwritten = None
                self._flush_at_s = min(self._flush_at_s, time.monotonic() + self._may_wait_s(action.new))
            else:
                register = self._store.read()
        except OSError as error:
            now = time.monotonic()
            self._background.submit(partial(print, f"{now:.3f} store: not reached ({error})", flush=True))
            if isinstance(action, Swap):
                since_s = now if self._unwritten is None else self._unwritten[1]
                why = f"store: {self._store.folder} cannot be written ({error.strerror or error})"
                self._unwritten = (why, since_s)
            if probe is not None and not self._store.folder.exists():
                self._socket.send(probe.rank, Over(f"{self._store.folder} was removed, without which no job can go on"))
            return
        self._feed(StoreReply(register, probe))

    def _may_wait_s(self, new: Register) -> float:
        old = self._driver.state.register
        only_lines = old is not None and (old.epoch, old.checkpoint) == (new.epoch, new.checkpoint)
        return FLUSH_S if only_lines else 0.0

    # --- In the background thread ---

    def _flush(self) -> None:
        try:
            self._store.flush()
            self._trouble = None
        except OSError as error:
            self._flush_at_s = 0.0
            self._trouble = f"store: not written ({error}); what is missing is kept until it can be"

    def _settle(self) -> None:
        """Kill the remaining processes of a job without launcher and reports: they hang, or are stopped."""
        try:
            left = self._store.processes()
            if self._spec.job_folder.launcher in left:
                return
            time.sleep(SURE_S if left else 0.0)
            for pid in set(left).intersection(self._store.processes()):
                print(f"process {pid} is left of the job, and is ended", flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._store.settle()
        except OSError as error:
            print(f"store: not written ({error}); what is missing stays in {self._store.folder}", flush=True)

    # --- Plans ---

    def _read_plan(self, epoch: Epoch, plan_hash: int) -> Planned:
        """Read the plan that the epoch's coordinator has written. Raises `PlanError` if its hash differs."""
        planned = self._spec.planning.read(self._store.read_plan(epoch))
        if planned.assignment.plan_hash != plan_hash:
            raise PlanError(f"{self._store.folder}: the plan of epoch {epoch} is another one; its hash says so")
        return planned

    def _write_plan(self, new: Register) -> None:
        register = self._driver.state.register
        if register is not None and new.epoch != register.epoch:
            self._store.write_plan(new.epoch, self._driver.plan(new.key.plan_hash).text)

    def _plan_events(self) -> Iterator[JobEvent]:
        """Return the events of the new epoch's plan."""
        planned = self._driver.plan(self._driver.register.key.plan_hash)
        yield job_events.Planned(
            reason=planned.reason,
            plan_ms=round(self._driver.plan_ms, 3),
            lines=list(planned.lines),
            layout=planned.layout or UNSET,
        )
        if planned.speeds:
            speeds = {str(rank): speed for rank, speed in planned.speeds.items()}
            yield job_events.Slowed(speeds=speeds, tried=list(planned.tried))
