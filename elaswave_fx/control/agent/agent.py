"""A rank's side of the control plane: a thread that beats, listens to the coordinator, and looks after the store.

In: what the worker's main thread says: `committed` after every step, `leave` when a step has failed or is called off.
Out: `called_off`, and from `leave` the decision: go on in a new epoch, or not. Decisions are `step_commit`'s; the
engine takes whole steps by itself, so frames between ranks never come here.

    agent.start()
    while not done:
        if agent.called_off or not step_went_well:
            decision = agent.leave(holdings, suspect)   ->  Go(activation, plan) | Excluded(reason) | Over(reason)
        else:
            agent.committed(certificate)
"""

from __future__ import annotations

import math
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import zmq

from elaswave_fx.control.agent.warm_up import warm_up
from elaswave_fx.control.protocol import step_commit
from elaswave_fx.control.protocol.failure_detector import HEARTBEAT_S, STALLED_FLOOR_S, STALLED_OVER_STEP
from elaswave_fx.control.protocol.messages import (
    COORDINATOR,
    Ack,
    Activate,
    Ended,
    Heartbeat,
    Over,
    Prepare,
    Prepared,
    ProbeStore,
    Send,
    StoreSeen,
    Tick,
)
from elaswave_fx.control.protocol.rank_state import STOPPED, Deadlines, Holdings, RankState, install
from elaswave_fx.control.protocol.types import Activation, BoxId, Certificate
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.control.wire import ControlAddress, Message, RankSocket
from elaswave_fx.plan.topology import Rank

__all__ = ["Agent", "ControlAddress", "Decision", "Excluded", "Go", "Holdings", "Over", "Progress"]

DEADLINES = Deadlines(paused_s=1.0, lease_s=10.0)
"""A thread that ticks every `HEARTBEAT_S` and finds a gap of a second was stopped, or starved: it accuses nobody."""

UNLEDGERED = 4096
"""Commits that the ledger has not acknowledged; at the bound `may_step` turns false until it has."""

FLUSH_S = 10.0
"""How long `close` waits for the ledger to have the last steps."""

LINGER_MS = 500
GRACE_S = 2 * STALLED_FLOOR_S
"""For a worker without launcher that neither commits nor says that it gets on; see also the slowest step."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the engine does now, and the rank that it waits for, if it does."""

    phase: str
    awaited: Rank | None = None


@dataclass(frozen=True, slots=True)
class Go:
    """Go on in the epoch of `activation`, by `plan`, the text of its Plan."""

    activation: Activation
    plan: str


@dataclass(frozen=True, slots=True)
class Excluded:
    """The others go on without this rank: it ends, and touches nothing of the job."""

    reason: str


Decision = Go | Excluded | Over


@dataclass(frozen=True, slots=True)
class _Leave:
    holdings: Holdings
    suspect: Rank | None


@dataclass(frozen=True, slots=True)
class _CaughtUp:
    boxes: frozenset[BoxId]


@dataclass(frozen=True, slots=True)
class _Close:
    finished: bool


class Agent:
    """Methods are for the main thread; `interrupt` and `progress` are called from the agent's thread.

    `interrupt(reason)` must make a running step fail soon, here and at the other members, and later ones at once until
    a new epoch is installed. `lost()`: the peers whose links are down; `mend()` starts to open those links again.
    """

    def __init__(
        self,
        rank: Rank,
        first: Activation,
        address: ControlAddress,
        *,
        interrupt: Callable[[str], None],
        progress: Callable[[], Progress],
        lost: Callable[[], Iterable[int]],
        mend: Callable[[], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._address, self._interrupt, self._progress, self._say = address, interrupt, progress, say
        self._lost, self._mend, self._first = lost, mend, first
        state = RankState(rank, DEADLINES, joining=False)
        self._state = install(state, first)
        self._store = FileStore(address.store)
        self._asked: deque[Certificate | _Leave | _CaughtUp | _Close] = deque()
        self._decisions: queue.SimpleQueue[Decision] = queue.SimpleQueue()
        self._kept: list[Prepare | Activate] = []  # news for a main thread that has not left its step yet
        self._leaving = False
        self._left_epoch = first.epoch
        self._news: Activate | None = None  # the newest epoch
        self._stop_after: int | None = None  # as in the state, for the main thread to read
        self._ended: Excluded | Over | None = None
        self._closing: _Close | None = None
        self._close_by_s = 0.0
        self._called_off = False
        self._may_step = threading.Event()
        self._may_step.set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._wake_read = self._wake_write = -1
        self._commit_s = self._slowest_s = self._got_on_s = 0.0
        self._place: object = None

    # --- For the main thread ---

    def start(self) -> None:
        """Once, after the fork: sockets and the thread are made here."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        now = time.monotonic()
        self._state = replace(self._state, store_seen_s=now, tick_s=now)
        self._commit_s = self._got_on_s = now
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def close(self, finished: bool = True) -> None:
        """End the thread, at most some `FLUSH_S` later. Called again, it does nothing.

        `finished`: the job's work is done, and the ledger is to have all of it; the coordinator makes no new epoch
        after that. Otherwise the rank just falls silent.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ask(_Close(finished))
        thread.join(FLUSH_S + 5.0)
        if not thread.is_alive():
            os.close(self._wake_write)
            os.close(self._wake_read)

    @property
    def called_off(self) -> bool:
        """Whether the rank should not start another step, but call `leave`."""
        return self._called_off

    @property
    def may_step(self) -> bool:
        """False while the store, or the ledger, has been out of reach for so long that others may have gone on."""
        return self._may_step.is_set()

    def await_store(self, timeout_s: float) -> bool:
        """Blocked until `may_step`, or the step is called off; whether one of them is so."""
        return self._may_step.wait(timeout_s) or self._called_off

    def committed(self, certificate: Certificate) -> None:
        """A step was committed here; to be said of every one, in order."""
        self._asked.append(certificate)
        # The thread sets `_stop_after` first and looks at what was asked then: one of the two sees the other.
        after = self._stop_after
        if after is not None and certificate.stamp.version >= after:
            self._called_off = True

    def caught_up(self, boxes: frozenset[BoxId]) -> None:
        """The base of these boxes has arrived and is in step."""
        self._ask(_CaughtUp(boxes))

    def leave(self, holdings: Holdings, suspect: Rank | None) -> Decision:
        """Say what is in memory, and wait for what comes next; as long as that takes."""
        self._ask(_Leave(holdings, suspect))
        while True:
            try:
                return self._decisions.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                if self._failure is not None or self._thread is None:
                    raise RuntimeError(f"control: the agent of rank {self._state.rank} has ended") from self._failure

    def _ask(self, what: _Leave | _CaughtUp | _Close) -> None:
        self._asked.append(what)
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            return  # the pipe is full of wishes to wake up

    # --- The thread ---

    def _run(self) -> None:
        socket = RankSocket(self._address)
        try:
            warm_up(self._state, self._first)
            self._serve(socket)
        except BaseException as error:
            self._failure = error
            self._stop_main(f"control: the agent failed: {error}")
            raise
        finally:
            goodbye = self._closing is not None and self._closing.finished
            if goodbye:
                socket.send(Ended(self._state.rank))
            socket.close(LINGER_MS if goodbye else 0)

    def _serve(self, socket: RankSocket) -> None:
        poller = zmq.Poller()
        poller.register(socket.pollable, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_s = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_s:
                self._tick(socket, now)
                next_s = now + (HEARTBEAT_S if self._closing is None else HEARTBEAT_S / 5)
            if self._closing is not None and self._flushed(now):
                return
            poller.poll(max(0, math.ceil(1e3 * (next_s - time.monotonic()))))
            self._drain_wishes()
            self._heed_all(socket)
            while (message := socket.receive()) is not None:
                self._hear(socket, message, time.monotonic())
                self._heed_all(socket)

    def _drain_wishes(self) -> None:
        if select.select([self._wake_read], [], [], 0)[0]:
            os.read(self._wake_read, 4096)

    def _tick(self, socket: RankSocket, now: float) -> None:
        self._feed(socket, Tick(), now)
        state = self._state
        reached = now - state.store_seen_s <= DEADLINES.lease_s and len(state.certificates) < UNLEDGERED
        if reached or self._called_off:
            self._may_step.set()
        else:
            self._may_step.clear()
        self._guard(now)

    def _hear(self, socket: RankSocket, message: Message, now: float) -> None:
        """A message of the coordinator. What would stop the rank waits until the main thread has left its step."""
        if isinstance(message, Over):
            self._end(message)
        elif isinstance(message, Prepare | Activate) and not self._leaving and self._stops(message):
            if not self._kept or message.ballot >= self._kept[-1].ballot:
                self._kept.append(message)
            self._stop_main(f"epoch {self._state.epoch} is over")
        elif isinstance(message, Prepare | Activate | Ack):
            if isinstance(message, Activate):
                self._news = message
            elif isinstance(message, Prepare):
                self._look_at_links()
                if self._state.broken:
                    self._mend()
            self._feed(socket, message, now)

    def _look_at_links(self) -> None:
        """They go down one by one, and may be up again."""
        lost = frozenset(Rank(rank) for rank in self._lost())
        self._state = replace(self._state, broken=lost.intersection(self._state.members))

    def _stops(self, message: Prepare | Activate) -> bool:
        if isinstance(message, Activate):
            return message.activation.epoch > self._state.epoch
        if message.ballot < self._state.ballot:
            return False
        return message.stop_after is None or self._state.committed.version >= message.stop_after

    def _heed_all(self, socket: RankSocket) -> None:
        while self._asked:
            self._heed(socket, self._asked.popleft(), time.monotonic())

    def _heed(self, socket: RankSocket, asked: Certificate | _Leave | _CaughtUp | _Close, now: float) -> None:
        """What the main thread said."""
        if isinstance(asked, Certificate):
            self._on_committed(asked, now)
        elif isinstance(asked, _CaughtUp):
            self._state = replace(self._state, complete=self._state.complete | asked.boxes)
        elif isinstance(asked, _Close):
            self._closing, self._close_by_s = asked, now + FLUSH_S
            self._state = replace(self._state, finished=asked.finished)
            self._feed(socket, Tick(), now)
        else:
            self._on_leave(socket, asked, now)

    def _on_committed(self, certificate: Certificate, now: float) -> None:
        if self._state.joining:
            return  # of an epoch that is over: the others have decided what becomes of it
        self._state = step_commit.commit_whole(self._state, certificate)
        self._slowest_s, self._commit_s = max(self._slowest_s, now - self._commit_s), now
        after = self._state.stop_after
        if after is not None and self._state.committed.version >= after and not self._called_off:
            self._stop_main(f"epoch {self._state.epoch} ends with version {after}")

    def _on_leave(self, socket: RankSocket, asked: _Leave, now: float) -> None:
        self._leaving, self._left_epoch = True, self._state.epoch
        self._look_at_links()
        state, actions = step_commit.left(self._state, asked.holdings, asked.suspect, now)
        self._take(socket, state, actions, now)
        kept, self._kept = self._kept, []
        for message in kept:
            self._hear(socket, message, now)
        self._settle()

    def _feed(self, socket: RankSocket, event: Any, now: float) -> None:
        state, actions = step_commit.control(self._state, event, now)
        self._take(socket, state, actions, now)
        if self._state.joining:
            self._end(Excluded(f"the job went on without rank {self._state.rank}"))
        self._settle()

    def _take(self, socket: RankSocket, state: RankState, actions: tuple[Any, ...], now: float) -> None:
        """Perform what the machine wants. Aborts between ranks travel on the engine's own links, not here."""
        self._state, self._stop_after = state, state.stop_after
        for action in actions:
            if isinstance(action, ProbeStore):
                self._probe(socket, now)
            elif isinstance(action, Send) and action.target == COORDINATOR:
                message = action.message
                if isinstance(message, Heartbeat):
                    self._beat(socket, message)
                elif isinstance(message, Prepared):
                    socket.send(message)

    def _beat(self, socket: RankSocket, heartbeat: Heartbeat) -> None:
        """With what the engine does. A rank that was left out ends, and does not ask to be taken back."""
        if heartbeat.joining or isinstance(self._ended, Excluded):
            return
        if heartbeat.phase != STOPPED:
            progress = self._progress()
            heartbeat = replace(heartbeat, phase=progress.phase, awaited=progress.awaited)
        place = (heartbeat.epoch, heartbeat.version, heartbeat.phase)
        if place != self._place:
            self._place, self._got_on_s = place, time.monotonic()
        socket.send(heartbeat)

    def _probe(self, socket: RankSocket, now: float) -> None:
        try:
            register = self._store.read()
        except OSError:
            return
        self._feed(socket, StoreSeen(register.term, register.epoch, register.members), now)

    def _settle(self) -> None:
        """Answer the main thread, if it waits and there is an answer."""
        if not self._leaving:
            return
        state = self._state
        if self._ended is not None:
            decision: Decision = self._ended
        elif state.epoch > self._left_epoch and state.phase != STOPPED:
            assert self._news is not None and self._news.activation.epoch == state.epoch
            decision = Go(self._news.activation, self._news.plan)
            self._called_off = False
        else:
            return
        self._leaving = False
        self._decisions.put(decision)

    def _end(self, end: Excluded | Over) -> None:
        if self._ended is None:
            self._ended = end
            self._stop_main(end.reason)
        self._settle()

    def _stop_main(self, reason: str) -> None:
        self._called_off = True
        self._may_step.set()
        if not self._leaving:
            self._interrupt(reason)

    def _flushed(self, now: float) -> bool:
        assert self._closing is not None
        in_vain = not self._closing.finished or self._ended is not None or now > self._close_by_s
        return in_vain or not self._state.certificates

    def _guard(self, now: float) -> None:
        """Without a launcher nobody else would end a worker that hangs."""
        if not self._address.launcher or os.getppid() == self._address.launcher:
            return
        if now - self._got_on_s > max(GRACE_S, STALLED_OVER_STEP * self._slowest_s):
            self._say(f"rank {self._state.rank}: the launcher is gone and nothing gets on: the process ends")
            os._exit(1)
