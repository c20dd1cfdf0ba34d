"""The launcher's loop over the workers' channels and processes, until all have ended.

Messages become lines of the run's files and progress. A worker that is killed or vanishes is lost: the coordinator is
notified, and the others continue. A worker's error fails the run, as does the loss of a worker before all others are
up, or of the last one; the rest is killed. A failure that only follows from another (a lost peer) waits `SETTLE_S` for
its cause. If the launcher itself fails, workers finish their step, save and end, as after its death.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from typing import Any

from msgspec import UNSET

from elaswave_fx._liveness import LivenessTable
from elaswave_fx.launch.channel import ChannelClosed, Message
from elaswave_fx.launch.coordination import Coordination
from elaswave_fx.launch.failure import Failure, cause_of, from_exit, from_message
from elaswave_fx.launch.job import JobSpec
from elaswave_fx.launch.joiners import Joiners
from elaswave_fx.launch.process import Child, end_children
from elaswave_fx.launch.restore_clocks import put_clocks_back
from elaswave_fx.launch.stop import Stop
from elaswave_fx.observe.job_events import (
    Agreed,
    ClockRestored,
    Coordinator,
    Detected,
    JobEvent,
    Left,
    Over,
    Planned,
    Started,
    Stopping,
)
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.narrative import Narrator
from elaswave_fx.observe.progress import StepProgress
from elaswave_fx.observe.rank_events import CheckpointWritten, Drained, FaultStrikes, RankEvent
from elaswave_fx.observe.recorder import Recorder
from elaswave_fx.observe.run_event import RunEvent, received
from elaswave_fx.observe.run_log import RunLog
from elaswave_fx.scheduling import answer_soon

TICK_S = 0.1
"""Longest delay of a signal or a redraw."""

LET_GO_S = 120.0
"""Time that workers have to save their state after the launcher has failed."""

SETTLE_S = 3.0
"""Longest wait for the cause of a failure."""

COORDINATOR, LIVENESS = -1, -2
"""Values of the selector's data that are no rank."""


class Supervisor:
    """Owns the workers and the coordinator from their start to their end. `run` is called once."""

    def __init__(
        self,
        spec: JobSpec,
        children: list[Child],
        coordination: Coordination,
        liveness: LivenessTable,
        recorder: Recorder,
        progress: StepProgress,
        log: RunLog,
        stop: Stop,
    ) -> None:
        self._spec, self._children, self._coordination, self._recorder = spec, children, coordination, recorder
        self._liveness = liveness
        self._progress, self._log, self._stop = progress, log, stop
        self._detached: set[int] = set()  # ranks whose agents run
        self._done: set[int] = set()
        self._ended: set[int] = set()  # ranks whose processes are ending or have ended
        self._gone: set[int] = set()  # of `_ended`, those that the other ranks can spare
        self._failures: dict[int, Failure] = {}
        self._lost: dict[int, Failure] = {}  # ended ranks that the others continue without
        self._left: set[int] = set()  # drained ranks
        self._members = set(range(len(children)))
        self._missed: set[int] = set()  # ranks whose loss ended the last epoch
        self._over = False  # reported by the coordinator
        self._alone_since: float | None = None  # since when neither our processes nor joiners run
        self._failed_at = 0.0
        self._waiting_since: float | None = None  # since when only evicted or stopped processes run
        self._killed = False  # all workers were killed
        self._trouble: str | None = None  # the trouble last shown to the user
        self._store_trouble: str | None = None
        self._joiners = Joiners(spec.joiner, recorder.directory.log("joiners"))
        self._to_join = [fault for fault in spec.faults if fault.kind == "join"]
        self._heeded = 0  # number of stop requests handled
        self._reported: set[tuple[type[JobEvent], int]] = set()  # kinds and epochs of the coordinator's events
        self._narrator = Narrator(log, self._members)
        self._selector = selectors.DefaultSelector()

    def run(self) -> Failure | None:
        """Run until every worker has ended; return the failure that ended the run, if any. No process is left."""
        answer_soon()  # after the forks: ranks compute
        pids = ", ".join(f"rank {rank} pid {child.pid}" for rank, child in enumerate(self._children))
        self._log.debug(f"workers: {pids}")
        self._recorder.event(Started(pids={str(rank): child.pid for rank, child in enumerate(self._children)}))
        ranks = f"{len(self._children)} rank{'s' if len(self._children) != 1 else ''}"
        self._progress.phase(f"starting {ranks}; logs in {self._recorder.directory.path / 'logs'}")
        for rank, child in enumerate(self._children):
            self._watch(child, rank)
            self._liveness.watch(rank)
        self._selector.register(self._liveness, selectors.EVENT_READ, LIVENESS)
        for child in self._coordination.children():
            self._watch(child, COORDINATOR)
        try:
            while any(child.status is None for child in self._children) or self._joined_go_on(time.monotonic()):
                for key, _ in self._selector.select(TICK_S):
                    if key.fd in self._selector.get_map():  # An earlier event may have unregistered it.
                        self._on_ready(key)
                self._on_tick(time.monotonic())
            self._hear_coordinator()
        except Exception:
            self._let_go()
            raise
        finally:
            end_children(self._children)
            self._joiners.end()
            self._put_clocks_back()
            self._store_trouble = self._coordination.end()
            self._show_trouble()
            self._selector.close()
        return self._outcome()

    def _outcome(self) -> Failure | None:
        if self._failures:
            return cause_of((*self._failures.values(), *self._lost.values()))
        # Ranks that finished would have missed a lost one.
        return None if self._done or self._stop.requests or not self._lost else cause_of(tuple(self._lost.values()))

    def _let_go(self) -> None:
        """Let the workers end by themselves, as after the launcher's death, and wait until they have."""
        until_s = time.monotonic() + LET_GO_S
        for child in self._children:
            child.channel.close()
        for child in self._children:
            if child.status is None:
                select.select([child.pidfd], [], [], max(0.0, until_s - time.monotonic()))

    @property
    def _is_ending(self) -> bool:
        """Whether the run failed or is being ended: a worker's end is then no loss to recover from."""
        return bool(self._failures) or self._killed

    def _watch(self, child: Child, who: int) -> None:
        self._selector.register(child.channel, selectors.EVENT_READ, who)
        self._selector.register(child.pidfd, selectors.EVENT_READ, who)

    def _on_ready(self, key: selectors.SelectorKey) -> None:
        exited = isinstance(key.fileobj, int)
        if key.data == LIVENESS:
            self._hear_of_ends()
        elif key.data == COORDINATOR:
            self._on_coordinator_exit() if exited else self._on_coordinator_readable()
        elif exited:
            self._on_exit(key.data)
        else:
            self._on_readable(key.data)

    # --- Workers ---

    def _on_readable(self, rank: int) -> None:
        channel = self._children[rank].channel
        for message in channel.drain():
            self._on_message(rank, message)
        if channel.closed and channel in self._selector.get_map():
            self._selector.unregister(channel)

    def _others_run(self, lost: int) -> bool:
        """Whether the agents of all other live ranks run. Before that nothing is committed; after it they can continue.

        That may be true before it was read here, so pending ends and messages are read first.
        """
        if len(self._detached) < self._spec.ranks:
            self._hear_of_ends()
            for rank, child in enumerate(self._children):
                if not child.channel.closed:
                    self._on_readable(rank)
        others = set(range(self._spec.ranks)) - self._ended - {lost}
        return bool(self._detached) and others <= self._detached

    def _on_message(self, rank: int, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "detached":
                self._detached.add(rank)
            case "step":
                for line in self._recorder.step(StepReport.from_fields(fields)):
                    self._progress.step(line)
                    self._start_those_who_join(line.step)
            case "eval":
                self._recorder.evaluation(fields["step"], fields["loss"], fields["count"])
                self._log.info(f"step {fields['step']}: held-out loss {fields['loss']:.4f}")
            case "event":
                self._on_rank_event(rank, *received(RankEvent, {**fields, "rank": rank}))
            case "share":
                self._recorder.ended(rank, fields["summary"])
            case "done":
                self._done.add(rank)
                self._recorder.ended(rank, fields["summary"])
            case "warned":
                self._stop.ask(signal.Signals(fields["signal"]))
            case "error":
                self._on_error(rank, from_message(self._children[rank].name, fields, self._children[rank].log))
            case other:
                self._fail(rank, Failure(f"rank-{rank}", f"sent the unknown message {other}"))

    def _start_those_who_join(self, step: int) -> None:
        """Start the joiners of `faults` whose previous step is committed."""
        for fault in [fault for fault in self._to_join if fault.step <= step + 1]:
            self._to_join.remove(fault)
            if self._joiners.start():
                strikes = FaultStrikes(step=fault.step, fault=fault.kind, phase=fault.phase, rank=fault.rank)
                self._on_event(strikes)

    def _on_rank_event(self, rank: int, event: RankEvent, epoch: int, at_s: float | None) -> None:
        self._on_event(event, epoch, at_s)
        match event:
            case Drained():
                self._left.add(rank)
            case CheckpointWritten(failed=None):
                self._coordination.saved(event.step, epoch)

    def _on_event(self, event: RunEvent, epoch: int = 0, at_s: float | None = None) -> None:
        """Pass an event on to the file and the user. `at_s`: the monotonic time at which it happened; None: now."""
        recovery = self._recorder.event(event, epoch, at_s)
        if isinstance(event, Agreed):
            self._members = set(event.members)
            if event.rolled_back_to is not UNSET:
                self._progress.rewind(event.rolled_back_to)
        self._narrator.event(event, epoch, recovery)

    def _on_report(self, rank: int, message: Message) -> None:
        """Handle a joiner's message. Its process is not ours; the coordinator detects its end."""
        if message.kind in ("step", "eval", "event", "share"):
            self._on_message(rank, message)

    def _joined_go_on(self, now: float) -> bool:
        """Whether joiners continue after all local workers ended. One that only the coordinator misses may return."""
        joined = self._members - set(range(len(self._children))) - self._done
        if self._is_ending or self._over or self._stop.requests or not joined:
            return False
        if joined - self._missed:
            self._alone_since = None
            return True
        self._alone_since = self._alone_since or now
        return now - self._alone_since < self._spec.grace_s

    def _hear_of_ends(self) -> None:
        ending = self._liveness.ended()
        self._ended.update(ending)
        for rank in ending:
            self._on_ending(rank)

    def _on_ending(self, rank: int) -> None:
        """Handle a process that the kernel has begun to end, which can be reaped once its memory is freed.

        That may take 0.1 s and is not worth a wait: its threads have stopped, and data on its links belongs to the
        epoch that ends now.
        """
        if not self._children[rank].channel.closed:
            self._on_readable(rank)
        if rank not in self._done:
            self._tell_end(rank)
        if rank in self._gone:
            self._children[rank].yield_cores()

    def _tell_end(self, rank: int) -> None:
        """Notify the coordinator once of the end of a process that the other ranks can spare."""
        if rank in self._gone or self._is_ending or not self._others_run(rank):
            return
        self._gone.add(rank)
        if self._spec.exit_words:
            self._coordination.exited(rank)

    def _on_exit(self, rank: int) -> None:
        """Read an ended process's last messages, then judge its end."""
        child = self._children[rank]
        self._selector.unregister(child.pidfd)
        status = child.reap()
        self._ended.add(rank)
        if not child.channel.closed:
            self._on_readable(rank)
        self._put_clocks_back(rank)
        if rank in self._done:
            self._coordination.finished(rank)
        else:
            self._tell_end(rank)
        # An end that was already notified may take long, without using cores.
        was_killed = self._killed and rank not in self._gone and -os.waitstatus_to_exitcode(status) == signal.SIGKILL
        if not was_killed and rank not in (*self._done, *self._left, *self._failures, *self._lost):
            self._lose(rank, from_exit(child.name, status, child.log))

    def _put_clocks_back(self, rank: int | None = None) -> None:
        """Restore the clock of a worker that could not do so itself."""
        for line in put_clocks_back(self._recorder.directory.path, self._spec.power, rank):
            self._recorder.event(ClockRestored(rank=rank, outcome="restored", why=line))
            self._log.info(line)

    def _on_error(self, rank: int, failure: Failure) -> None:
        if failure.costs_the_rank_alone:
            self._lose(rank, failure)
            self._take_back(rank, failure)
        else:
            self._fail(rank, failure)

    def _lose(self, rank: int, failure: Failure) -> None:
        """Record the loss of a worker. If the others still have to meet it, none of them can continue."""
        if not self._others_run(rank):
            return self._fail(rank, failure)
        self._lost[rank] = failure
        self._on_event(Left(rank=rank, cause=failure.reason))

    def _take_back(self, rank: int, failure: Failure) -> None:
        """Start a new process in the place of a rank that was evicted although it lives."""
        if not failure.was_left_out or self._is_ending or self._over or self._done or self._stop.requests:
            return
        if self._joiners.start():
            self._log.info(f"rank {rank} lives: a new process joins the job in its place")

    def _fail(self, rank: int, failure: Failure) -> None:
        self._failures.setdefault(rank, failure)
        if len(self._failures) == 1:
            self._failed_at = time.monotonic()
        self._recorder.event(Detected(rank=rank, cause=failure.reason))

    # --- The coordinator ---

    def _on_coordinator_readable(self) -> None:
        self._hear_coordinator()
        for child in self._coordination.children():
            if child.channel.closed and child.channel in self._selector.get_map():
                self._selector.unregister(child.channel)

    def _hear_coordinator(self) -> None:
        for message in self._coordination.messages():
            if message.kind == "error":
                self._log.info(f"coordinator: {message.fields['message']}")
            elif message.kind == "trouble":
                self._store_trouble = message.fields["text"]
            elif message.kind == "ended":
                if message.fields["rank"] >= len(self._children):  # The launcher detects ends of its own children.
                    self._done.add(message.fields["rank"])
            elif message.kind == "told":
                self._on_report(message.fields["rank"], Message(message.fields["what"], message.fields["fields"]))
            elif message.kind == "event" and not self._is_ending:
                event, epoch, at_s = received(JobEvent, message.fields)
                if not self._is_repeated(event, epoch):
                    self._on_event(event, epoch, at_s)
                    self._follow(event)

    def _follow(self, event: JobEvent) -> None:
        """Keep track of the ranks that the last epoch lost, and of whether the job is over."""
        match event:
            case Agreed():
                self._missed = set()
            case Detected(ranks=list(ranks)):
                self._missed = set(ranks)
            case Over():
                self._over = True

    def _is_repeated(self, event: JobEvent, epoch: int) -> bool:
        """Whether an event is known already: a coordinator that takes over reports its epoch's again."""
        what = type(event), epoch
        if isinstance(event, Agreed | Planned) and what in self._reported:
            return True
        self._reported.add(what)
        return False

    def _on_coordinator_exit(self) -> None:
        """Record the coordinator's end, which stops no rank; another one takes over."""
        self._hear_coordinator()
        for child in self._coordination.children():
            self._selector.unregister(child.pidfd)
            if child.channel in self._selector.get_map():
                self._selector.unregister(child.channel)
        how = self._coordination.ended()
        self._on_event(Coordinator(cause=how))

    # --- The clock ---

    def _on_tick(self, now: float) -> None:
        """Handle signals, hangs, restarts of the coordinator and the progress display, which need no message."""
        if self._stop.requests > self._heeded:
            self._heeded = self._stop.requests
            self._on_stop_request()
        self._look_for_hanging(now)
        if self._failures and not self._killed and (self._settled() or now - self._failed_at >= SETTLE_S):
            self._kill_all()
        if not self._killed and self._only_left_out_run(now):
            self._kill_all()
        again = self._coordination.turn(now, [child for child in self._children if child.status is None])
        if again is not None:
            self._watch(again, COORDINATOR)
        self._show_trouble()
        self._progress.draw()

    def _look_for_hanging(self, now: float) -> None:
        """Fail a member in a hung call that blocks all of its threads: it cannot report that itself."""
        for rank, child in enumerate(self._children):
            hanging = child.watchdog.overdue(now) if child.status is None and rank in self._members else None
            if hanging is not None and rank not in self._failures:
                self._fail(rank, Failure(child.name, hanging))

    def _show_trouble(self) -> None:
        """Show the user once that files cannot be written, and once that they can."""
        trouble = self._recorder.directory.trouble or self._store_trouble
        if trouble != self._trouble:
            self._log.info(trouble or f"{self._recorder.directory.path}: can be written again")
            self._trouble = trouble

    def _settled(self) -> bool:
        """Whether the cause of the failure is known."""
        return not cause_of((*self._failures.values(), *self._lost.values())).follows

    def _only_left_out_run(self, now: float) -> bool:
        """Whether all members have ended, and the rest, such as stopped ranks, has had `grace_s` to do so."""
        running = {rank for rank, child in enumerate(self._children) if child.status is None}
        over = bool(running and (self._done or self._lost)) and not running & self._members
        if not over:
            self._waiting_since = None
            return False
        self._waiting_since = self._waiting_since or now
        return now - self._waiting_since >= self._spec.grace_s

    def _on_stop_request(self) -> None:
        if self._heeded == 1 and not self._failures:
            self._log.info("stopping after the current step; once more ends the workers at once")
            self._recorder.event(Stopping(steps=self._recorder.steps))
            # The request travels with the ranks' votes: all stop after the same step.
            for rank in range(self._spec.ranks):
                self._tell(rank, "halt")
            return
        self._kill_all()

    def _kill_all(self) -> None:
        self._killed = True
        self._joiners.kill()
        for child in self._children:
            child.signal(signal.SIGKILL)

    def _tell(self, rank: int, kind: str, **fields: Any) -> None:
        """Send a message. The end of a worker is detected by its process, not here."""
        try:
            self._children[rank].channel.send(kind, **fields)
        except ChannelClosed:
            return
