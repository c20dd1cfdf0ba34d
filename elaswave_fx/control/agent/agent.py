"""The thread that carries out the decisions of a rank's control machine: on its stream, its links and the main thread.

In: calls of the worker's main thread: `committed` after every step, `report_and_wait` when a step failed or was
aborted. Out: `stop_requested`, and from `report_and_wait` the decision. All decisions are `protocol/rank.py`'s.

    agent.start()
    while not done:
        if agent.stop_requested or not step_went_well:
            decision = agent.report_and_wait(holdings, suspect)   ->  Go(activation, plan) | Excluded | Left | Over
        else:
            agent.committed(certificate)
"""

from __future__ import annotations

import math
import os
import queue
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from elaswave_fx.control.agent.cut_socket import CutSocket
from elaswave_fx.control.agent.start_coordinator import start_coordinator
from elaswave_fx.control.agent.warm_up import warm_up
from elaswave_fx.control.job_folder import JobFolder
from elaswave_fx.control.protocol import rank as protocol
from elaswave_fx.control.protocol.clock import job_time
from elaswave_fx.control.protocol.failure_detector import HEARTBEAT_S, STALLED_FLOOR_S, STALLED_OVER_STEP
from elaswave_fx.control.protocol.member_info import MemberInfo
from elaswave_fx.control.protocol.messages import (
    Ack,
    Activate,
    MustStay,
    Over,
    Prepare,
    RankReport,
    Refused,
    Send,
    StoreSeen,
)
from elaswave_fx.control.protocol.rank import FLUSH_S
from elaswave_fx.control.protocol.rank_state import (
    Action,
    Answer,
    Closing,
    Committed,
    Decision,
    EndProcess,
    Event,
    Excluded,
    Go,
    HeartbeatDue,
    Holdings,
    Interrupt,
    LeaveAsked,
    Left,
    Limits,
    LinksDown,
    MendLinks,
    Progress,
    RankState,
    StepLeft,
)
from elaswave_fx.control.protocol.replica_sync import ReplicaSync
from elaswave_fx.control.protocol.types import EXPORTING, Activation, Certificate, Version
from elaswave_fx.control.wire import ControlAddress, RankSocket
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.scheduling import answer_soon

__all__ = ["LIMITS", "Agent", "ControlAddress", "Decision", "Excluded", "Go", "Holdings", "Left", "Over", "Progress"]

LIMITS = Limits(
    paused_s=1.0, lease_s=10.0, unledgered=4096, hung_s=2 * STALLED_FLOOR_S, hung_over_step=STALLED_OVER_STEP
)

LINGER_S = 0.5

ALONE_S, ALONE_MORE_S = 0.5, 1.0
"""Time without launcher and coordinator after which a rank starts a coordinator; each later rank waits longer, so that
one usually suffices. Of several, one gets the leader lock and the others end."""

LINKS_S = 0.005
"""Interval of link checks while the main thread waits for the next epoch, since more links may break after the first.
It doubles with every check without news, because many ranks may share the cores that the agreement needs."""

_Said = Committed | StepLeft | ReplicaSync | Closing | RankReport


class Agent:
    """A rank's agent, for the main thread; `interrupt` and `progress` are called from the agent's thread.

    `info`: this rank's, which it sends to every coordinator. `first`: the job's first epoch; None: the rank asks to
    join. `job_folder`: the job on this machine, where a rank without launcher and coordinator starts a coordinator.
    `interrupt(reason)` must soon abort a running step, here and at the other members, and later ones immediately until
    a new epoch is installed. `lost()`: peers whose links are down; `mend()` starts to reopen those links. `is_cut()`:
    whether a fault cuts this rank off now. `prepare_next(plan, version)` receives the text of the plan of a planned
    reconfiguration after `version` steps; it must not block. `say(text)`: prints the last line of a process that ends
    itself.
    """

    def __init__(
        self,
        info: MemberInfo,
        first: Activation | None,
        address: ControlAddress,
        job_folder: JobFolder | None,
        *,
        interrupt: Callable[[str], None],
        progress: Callable[[], Progress],
        lost: Callable[[], Iterable[int]],
        mend: Callable[[], None],
        is_cut: Callable[[], bool] | None = None,
        say: Callable[[str], None],
        prepare_next: Callable[[str, Version], None] = lambda plan, version: None,
    ) -> None:
        self._info, self._address, self._job_folder = info, address, job_folder
        self._interrupt, self._progress, self._prepare_next, self._say = interrupt, progress, prepare_next, say
        self._lost, self._mend, self._is_cut, self._first = lost, mend, is_cut, first
        self._state = self._first_state(0.0)
        self._version = self._state.committed.version  # the main thread's newest commit
        self._said: deque[_Said] = deque()
        self._decisions: queue.SimpleQueue[Decision] = queue.SimpleQueue()
        self._may_step = threading.Event()
        self._may_step.set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._wake_read = self._wake_write = -1
        self._leave_signal: signal.Signals | None = None
        self._warnings: tuple[signal.Signals, ...] = ()
        self._grace_s, self._orders = 0.0, 0  # `_orders`: number of leave signals received
        self._exports = False
        self._look_s = LINKS_S  # time until the next check of links
        self._starts_s: float | None = None  # when this rank starts a coordinator, if none appears before

    # --- For the main thread ---

    def start(self) -> None:
        """Create sockets and the thread, once and after the fork. Raises `CommError` for an unresolvable address."""
        socket = (
            RankSocket(self._address, self._info)
            if self._is_cut is None
            else CutSocket(self._address, self._info, self._is_cut)
        )
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._state = self._first_state(time.monotonic())
        self._thread = threading.Thread(target=self._run, args=(socket,), name="control", daemon=True)
        self._thread.start()

    def _first_state(self, now_s: float) -> RankState:
        number = self._info.number
        if self._first is None:
            return protocol.joiner(number, LIMITS, now_s)
        return protocol.member(number, LIMITS, self._first, now_s)

    def leave_on(self, number: signal.Signals, warnings: tuple[signal.Signals, ...], grace_s: float) -> None:
        """Make signal `number` drain the rank within `grace_s`, and end it immediately if repeated; `warnings` drain
        it, however often they come. Called by the main thread, which need not run Python code to react."""
        self._leave_signal, self._warnings, self._grace_s = number, warnings, grace_s
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for each in (number, *warnings):
            signal.signal(each, lambda *_: None)

    @property
    def must_stay(self) -> str | None:
        """Why this overdue draining rank cannot leave; None if it can, or is not draining."""
        return self._state.must_stay

    def close(self, finished: bool = True) -> None:
        """End the thread, within about `FLUSH_S`. Idempotent.

        `finished`: the job is done: flush all ledger lines; the coordinator makes no new epoch after that. Otherwise
        the rank only stops sending.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._leave_signal is not None:
            signal.set_wakeup_fd(-1)
        self._say_to_thread(Closing(finished))
        thread.join(FLUSH_S + 5.0)
        if not thread.is_alive():
            os.close(self._wake_write)
            os.close(self._wake_read)

    def job_time(self, at_s: float) -> float:
        """Convert a time of this machine's monotonic clock to the coordinator's, as far as the offset is known."""
        return job_time(self._state.clock, at_s)

    @property
    def stop_requested(self) -> bool:
        """Whether the rank must not start another step but call `report_and_wait`."""
        return self._failure is not None or protocol.must_leave(self._state, self._version)

    @property
    def may_step(self) -> bool:
        """Whether store and ledger were reachable recently; if not, others may have resumed without this rank."""
        return self._may_step.is_set()

    def await_store(self, timeout_s: float) -> bool:
        """Block until `may_step` or a requested stop; return whether one of them holds."""
        return self._may_step.wait(timeout_s) or self.stop_requested

    def committed(self, certificate: Certificate) -> None:
        """Record a committed step; to be called for every one, in order."""
        # The thread reads this with its next event. It sets a planned stop before it reads `_said`, and
        # `stop_requested` reads the stop after this append: one of the two sees the other.
        self._version = certificate.stamp.version
        self._said.append(Committed(certificate, time.monotonic(), leaves=self.stop_requested))

    def report_sync(self, sync: ReplicaSync) -> None:
        self._say_to_thread(sync)

    def export(self, begins: bool = True) -> None:
        """Begin or end the export of the model, during which there are no steps for a planned stop."""
        self._exports = begins

    def report_and_wait(self, holdings: Holdings, suspect: Rank | None) -> Decision:
        """Report what is in memory and wait for the decision, without a timeout."""
        self._say_to_thread(StepLeft(holdings, suspect))
        return self.wait()

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Send a message to the launcher through the coordinator; lost if there is none."""
        self._say_to_thread(RankReport(self._info.number, kind, fields))

    def wait(self) -> Decision:
        """Wait for the decision on the next epoch, without a timeout."""
        while True:
            try:
                decision = self._decisions.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                if self._failure is not None or self._thread is None:
                    raise RuntimeError(f"control: the agent of rank {self._state.rank} has ended") from self._failure
                continue
            if isinstance(decision, Go):
                self._version = decision.activation.resume.version
            return decision

    def _say_to_thread(self, what: _Said) -> None:
        self._said.append(what)
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            return  # the pipe is full of wake-ups

    # --- The thread ---

    def _run(self, socket: RankSocket) -> None:
        answer_soon()
        try:
            if self._first is not None:
                warm_up(self._state, self._first)
            self._serve(socket)
        except BaseException as error:
            self._failure = error
            self._may_step.set()
            self._interrupt(f"control: the agent failed: {error}")
            raise
        finally:
            says_more = self._state.finished or isinstance(self._state.ended, Left)
            socket.close(LINGER_S if self._state.closed and says_more else 0.0)

    def _serve(self, socket: RankSocket) -> None:
        next_s = time.monotonic()
        while not self._state.closed:
            again_s = socket.connect(time.monotonic())
            if time.monotonic() >= next_s:
                orphaned = self._orphaned(again_s is None)
                progress = self._progress()
                phase = f"{EXPORTING}: {progress.phase}" if self._exports else progress.phase
                self._feed(socket, HeartbeatDue(replace(progress, phase=phase), orphaned))
                self._look_for_coordinator(orphaned and again_s is not None, time.monotonic())
                next_s = time.monotonic() + (HEARTBEAT_S if self._state.closes_by_s is None else HEARTBEAT_S / 5)
            wake_s = min(next_s, time.monotonic() + self._look_s) if self._state.waiting else next_s
            self._sleep(socket, wake_s if again_s is None else min(wake_s, again_s))
            if self._state.waiting:
                self._look_at_links(socket)
            if select.select([self._wake_read], [], [], 0)[0]:
                self._hear_signals(socket, os.read(self._wake_read, 4096))
            self._hear_main_thread(socket)
            for message in socket.receive():
                if isinstance(message, Prepare):
                    if message.plan and message.stop_after is not None:
                        self._prepare_next(message.plan, message.stop_after)
                    self._feed(socket, self._links_down())
                if isinstance(message, Ack | Prepare | Activate | MustStay | Over | StoreSeen | Refused):
                    self._feed(socket, message)
                self._hear_main_thread(socket)

    def _hear_signals(self, socket: RankSocket, numbers: bytes) -> None:
        for number in numbers:
            self._orders += number == self._leave_signal
            is_told = number == self._leave_signal or number in self._warnings
            if is_told and (self._state.leaves_by_s is None or (number == self._leave_signal and self._orders > 1)):
                self._feed(socket, LeaveAsked(self._grace_s))

    def _sleep(self, socket: RankSocket, until_s: float) -> None:
        """Sleep until a message, a call of the main thread, or `until_s`."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        socket.watch(poll)
        poll.poll(max(0, math.ceil(1e3 * (until_s - time.monotonic()))))

    def _look_at_links(self, socket: RankSocket) -> None:
        links = self._links_down()
        self._look_s = min(2 * self._look_s, HEARTBEAT_S)
        if links.peers != self._state.broken:
            self._look_s = LINKS_S
            self._feed(socket, links)

    def _orphaned(self, has_coordinator: bool) -> bool:
        """Whether no other process would end this one if it hangs: its launcher has died or, for a joiner, it has no
        coordinator."""
        if self._job_folder is None:
            return not has_coordinator
        return bool(self._job_folder.launcher) and os.getppid() != self._job_folder.launcher

    def _look_for_coordinator(self, alone: bool, now_s: float) -> None:
        """Start a coordinator if there is neither it nor a launcher: without one the next loss ends the job."""
        if not alone or self._job_folder is None:
            self._starts_s = None
        elif self._starts_s is None:
            place = self._state.members.index(self._state.rank) if self._state.rank in self._state.members else 0
            self._starts_s = now_s + ALONE_S + place * ALONE_MORE_S
        elif now_s >= self._starts_s:
            self._starts_s = now_s + ALONE_S + len(self._state.members) * ALONE_MORE_S
            start_coordinator(self._job_folder)

    def _links_down(self) -> LinksDown:
        return LinksDown(frozenset(map(Rank, self._lost())).intersection(self._state.members))

    def _hear_main_thread(self, socket: RankSocket) -> None:
        while self._said:
            said = self._said.popleft()
            if isinstance(said, RankReport):
                socket.send(said)
                continue
            if isinstance(said, StepLeft):
                self._look_s = LINKS_S
                self._feed(socket, self._links_down())
            self._feed(socket, said)

    def _feed(self, socket: RankSocket, event: Event) -> None:
        now = time.monotonic()
        state, actions = protocol.step(self._state, event, now)
        self._state = state
        if not state.stop_requested and not protocol.may_step(state, now):
            self._may_step.clear()
        elif not self._may_step.is_set():
            self._may_step.set()
        for action in actions:
            self._perform(socket, action)

    def _perform(self, socket: RankSocket, action: Action) -> None:
        if isinstance(action, Send):
            socket.send(action.message)
        elif isinstance(action, Interrupt):
            self._interrupt(action.reason)
        elif isinstance(action, Answer):
            self._decisions.put(action.decision)
        elif isinstance(action, MendLinks):
            self._mend()
        else:
            self._end_process(action)

    def _end_process(self, action: EndProcess) -> None:
        """End a hung worker without a launcher, or one that was asked to end immediately."""
        self._say(action.reason)
        os._exit(1)
