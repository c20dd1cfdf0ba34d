"""The thread that performs what a rank's control machine decides: its stream, its links, the way to the main thread.

In: what the worker's main thread says: `committed` after every step, `report_and_wait` when a step has failed or is
called off. Out: `stop_requested`, and from `report_and_wait` the decision. All decisions are `protocol/rank.py`'s.

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
from elaswave_fx.control.protocol.types import HANDING_BACK, Activation, Certificate, Version
from elaswave_fx.control.wire import ControlAddress, RankSocket
from elaswave_fx.plan.work.topology import Rank
from elaswave_fx.scheduling import answer_soon

__all__ = ["LIMITS", "Agent", "ControlAddress", "Decision", "Excluded", "Go", "Holdings", "Left", "Over", "Progress"]

LIMITS = Limits(
    paused_s=1.0, lease_s=10.0, unledgered=4096, hung_s=2 * STALLED_FLOOR_S, hung_over_step=STALLED_OVER_STEP
)

LINGER_S = 0.5

ALONE_S, ALONE_MORE_S = 0.5, 1.0
"""A rank without launcher and without coordinator for so long starts a coordinator; later ones wait longer each, so
that one suffices as a rule. Of several one gets the place, and the others end."""

LINKS_S = 0.005
"""Until the next look at the links while the main thread waits for the next epoch: more may break after the first one.
It doubles with every look that shows nothing new, for many ranks may share the cores that the agreement needs."""

_Said = Committed | StepLeft | ReplicaSync | Closing | RankReport


class Agent:
    """Methods are for the main thread; `interrupt` and `progress` are called from the agent's thread.

    `info`: of this rank, which it shows to every coordinator. `first`: the epoch that the job begins with; None: the
    rank asks to become a member. `job_folder`: where the job is on this machine: the rank starts a coordinator there
    when it is alone. `interrupt(reason)` must make a running step fail soon, here and at the other members, and later
    ones at once until a new epoch is installed. `lost()`: the peers whose links are down; `mend()` starts to open those
    links again. `is_cut()`: whether the rank is cut off from everybody now, for ranks to which that may be done.
    `prepare_next(plan, version)` is given the text of the plan for which a stop after `version` steps is planned, and
    returns at once. `say(text)`: the last words of a process that ends itself.
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
        self._version = self._state.committed.version  # as the main thread knows it
        self._said: deque[_Said] = deque()
        self._decisions: queue.SimpleQueue[Decision] = queue.SimpleQueue()
        self._may_step = threading.Event()
        self._may_step.set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._wake_read = self._wake_write = -1
        self._leave_signal: signal.Signals | None = None
        self._warnings: tuple[signal.Signals, ...] = ()
        self._grace_s, self._orders = 0.0, 0  # to leave, so many came
        self._hands_back = False
        self._look_s = LINKS_S  # until the next look at the links
        self._starts_s: float | None = None  # when this rank starts a coordinator, if none comes before

    # --- For the main thread ---

    def start(self) -> None:
        """Once, after the fork: sockets and the thread are made here. Raises `CommError` for an address of the
        coordinator that cannot be resolved."""
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
        """From now on this signal tells the rank to leave the job within `grace_s`, and a second one to end at once;
        `warnings` tell it to leave, however often they come. The main thread calls this; it need not get to Python for
        a signal to be heard."""
        self._leave_signal, self._warnings, self._grace_s = number, warnings, grace_s
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for each in (number, *warnings):
            signal.signal(each, lambda *_: None)

    @property
    def must_stay(self) -> str | None:
        """Why this rank, which should have left by now, cannot; None if it can, or was not told to."""
        return self._state.must_stay

    def close(self, finished: bool = True) -> None:
        """End the thread, at most some `FLUSH_S` later. Called again, it does nothing.

        `finished`: the job's work is done, and the ledger is to have all of it; the coordinator makes no new epoch
        after that. Otherwise the rank just falls silent.
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
        """A time of this machine's monotonic clock by that of the coordinator, as far as it is known by now."""
        return job_time(self._state.clock, at_s)

    @property
    def stop_requested(self) -> bool:
        """Whether the rank should not start another step, but call `report_and_wait`."""
        return self._failure is not None or protocol.must_leave(self._state, self._version)

    @property
    def may_step(self) -> bool:
        """False while the store, or the ledger, has been out of reach for so long that others may have gone on."""
        return self._may_step.is_set()

    def await_store(self, timeout_s: float) -> bool:
        """Blocked until `may_step`, or a stop is requested; whether one of them is so."""
        return self._may_step.wait(timeout_s) or self.stop_requested

    def committed(self, certificate: Certificate) -> None:
        """A step was committed here; to be said of every one, in order."""
        # The thread learns of it with its next event. It keeps a stop for later first and looks at what was said then,
        # and `stop_requested` reads that stop after this: one of the two sees the other.
        self._version = certificate.stamp.version
        self._said.append(Committed(certificate, time.monotonic(), leaves=self.stop_requested))

    def report_sync(self, sync: ReplicaSync) -> None:
        """What is still to come of copies has changed."""
        self._say_to_thread(sync)

    def hand_back(self, begins: bool = True) -> None:
        """The main thread hands the model back from now on, or does not any more: there are no steps between which a
        planned stop could come."""
        self._hands_back = begins

    def report_and_wait(self, holdings: Holdings, suspect: Rank | None) -> Decision:
        """Say what is in memory, and wait for what comes next; as long as that takes."""
        self._say_to_thread(StepLeft(holdings, suspect))
        return self.wait()

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Have the coordinator pass a message on to the launcher; lost while there is none."""
        self._say_to_thread(RankReport(self._info.number, kind, fields))

    def wait(self) -> Decision:
        """Until it is said what comes next; as long as that takes."""
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
            return  # the pipe is full of wishes to wake up

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
                phase = f"{HANDING_BACK}: {progress.phase}" if self._hands_back else progress.phase
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
        """Until a message, a word of the main thread, or that time."""
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
        """Whether nobody is left who would end this process if it hangs. One that no launcher has started goes by the
        coordinator."""
        if self._job_folder is None:
            return not has_coordinator
        return bool(self._job_folder.launcher) and os.getppid() != self._job_folder.launcher

    def _look_for_coordinator(self, alone: bool, now_s: float) -> None:
        """Without a launcher nobody else starts one, and without one nobody can go on after the next loss."""
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
        """Without a launcher nobody else would end a worker that hangs; and who is told to end at once does."""
        self._say(action.reason)
        os._exit(1)
