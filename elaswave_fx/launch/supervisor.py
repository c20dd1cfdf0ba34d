"""The launcher while workers run: one loop over their channels and processes, until all have ended.

Messages become lines of the run's files and progress; an end without `done` is a failure, after which the others are
ended: SIGTERM, and SIGKILL after the grace. A failure that only follows from another (a lost peer) waits `SETTLE_S`
for its cause to show, and committed steps as long for their last reports.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from typing import Any

from elaswave_fx.launch.channel import ChannelClosed, Message
from elaswave_fx.launch.failure import Failure, cause_of, from_exit, from_message
from elaswave_fx.launch.job import JobSpec
from elaswave_fx.launch.process import Child, end_children
from elaswave_fx.launch.stop import Stop
from elaswave_fx.observe.metrics import StepReport
from elaswave_fx.observe.progress import StepProgress
from elaswave_fx.observe.recorder import Recorder

TICK_S = 0.1
"""How long a signal or a redraw may wait at most."""

SETTLE_S = 3.0
"""How long after a failure its cause, and the reports of committed steps, may take to show."""


class Supervisor:
    """Owns the workers from their start to their end. `run` once."""

    def __init__(
        self, spec: JobSpec, children: list[Child], recorder: Recorder, progress: StepProgress, stop: Stop
    ) -> None:
        self._spec, self._children, self._recorder = spec, children, recorder
        self._progress, self._stop = progress, stop
        self._ports: dict[int, int] = {}
        self._done: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._failed_at = 0.0
        self._ending_since: float | None = None  # SIGTERM was sent
        self._heeded = 0  # stop requests
        self._selector = selectors.DefaultSelector()

    def run(self) -> Failure | None:
        """Until every worker has ended; the failure that ended the run, if one did. Leaves no worker behind."""
        pids = ", ".join(f"rank {rank} pid {child.pid}" for rank, child in enumerate(self._children))
        self._progress.message(f"workers: {pids}; logs in {self._recorder.directory.path / 'logs'}")
        self._recorder.event("started", pids={str(rank): child.pid for rank, child in enumerate(self._children)})
        self._progress.phase("starting")
        for rank, child in enumerate(self._children):
            self._selector.register(child.channel, selectors.EVENT_READ, rank)
            self._selector.register(child.pidfd, selectors.EVENT_READ, rank)
        try:
            while any(child.status is None for child in self._children):
                for key, _ in self._selector.select(TICK_S):
                    if isinstance(key.fileobj, int):
                        self._on_exit(key.data)
                    else:
                        self._on_readable(key.data)
                self._on_tick(time.monotonic())
        finally:
            end_children(self._children)
            self._selector.close()
        return cause_of(tuple(self._failures.values())) if self._failures else None

    def _on_readable(self, rank: int) -> None:
        channel = self._children[rank].channel
        for message in channel.drain():
            self._on_message(rank, message)
        if channel.closed and channel in self._selector.get_map():
            self._selector.unregister(channel)

    def _on_message(self, rank: int, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "hello":
                self._on_hello(rank, fields["port"])
            case "step":
                for line in self._recorder.step(rank, StepReport.from_fields(fields)):
                    self._progress.step(line)
            case "eval":
                self._recorder.evaluation(fields["step"], fields["loss"], fields["count"])
                self._progress.message(f"step {fields['step']}: held-out loss {fields['loss']:.4f}")
            case "event":
                extra = {key: value for key, value in fields.items() if key not in ("event", "epoch")}
                self._recorder.event(fields["event"], fields["epoch"], rank=rank, **extra)
                said = ", ".join(f"{key} {value}" for key, value in extra.items())
                self._progress.message(f"rank {rank}: {fields['event'].replace('_', ' ')}: {said}")
            case "at":
                self._stop_before(rank, fields["step"] + 1)
            case "done":
                self._done.add(rank)
                self._recorder.ended(rank, fields["summary"])
            case "error":
                self._fail(rank, from_message(self._children[rank].name, fields))
            case other:
                self._fail(rank, Failure(f"rank-{rank}", f"sent the unknown message {other}"))

    def _on_hello(self, rank: int, port: int) -> None:
        """When the last rank has said where it listens, everyone gets to know."""
        self._ports[rank] = port
        if len(self._ports) == self._spec.ranks:
            places = {rank: ["127.0.0.1", self._ports[rank], self._spec.hosts[rank]] for rank in sorted(self._ports)}
            for other in range(self._spec.ranks):
                self._tell(other, "peers", places=places)

    def _on_exit(self, rank: int) -> None:
        """A process has ended: take what it still said, then judge."""
        child = self._children[rank]
        self._selector.unregister(child.pidfd)
        status = child.reap()
        if not child.channel.closed:
            self._on_readable(rank)
        told_to = self._ending_since is not None and -os.waitstatus_to_exitcode(status) in (
            signal.SIGTERM,
            signal.SIGKILL,
        )
        if rank not in self._done and rank not in self._failures and not told_to:
            self._fail(rank, from_exit(child.name, status, child.log))

    def _fail(self, rank: int, failure: Failure) -> None:
        self._failures.setdefault(rank, failure)
        if len(self._failures) == 1:
            self._failed_at = time.monotonic()
        self._recorder.event("detected", rank=rank, cause=failure.reason)

    def _on_tick(self, now: float) -> None:
        """What is due without a message: signals, ending the others, the progress."""
        if self._stop.requests > self._heeded:
            self._heeded = self._stop.requests
            self._on_stop_request()
        failing = bool(self._failures) and self._ending_since is None
        if failing and (self._settled() or now - self._failed_at >= SETTLE_S):
            self._end_all(now)
        if self._ending_since is not None and now - self._ending_since >= self._spec.grace_s:
            for child in self._children:
                child.signal(signal.SIGKILL)
        self._progress.draw()

    def _settled(self) -> bool:
        """Whether the others may be ended: the cause is known, and no rank is about to report a step that a vote has
        committed, which the run's files must not miss."""
        if cause_of(tuple(self._failures.values())).follows:
            return False
        owing = self._recorder.owing()
        return not owing or any(rank in self._failures or self._children[rank].status is not None for rank in owing)

    def _on_stop_request(self) -> None:
        if self._heeded == 1 and not self._failures:
            self._progress.message("stopping after the current step; once more ends the workers at once")
            self._recorder.event("stopping", steps=self._recorder.steps)
            # Any one rank will do; see `WorkerContext.should_stop`.
            asked = next((rank for rank, child in enumerate(self._children) if child.status is None), None)
            if asked is not None:
                self._tell(asked, "halt")
            return
        self._end_all(time.monotonic(), signal.SIGKILL)

    def _stop_before(self, asked: int, step: int) -> None:
        """Answer the rank that waits at a step's border, after everyone else has been told."""
        others = [rank for rank in range(self._spec.ranks) if rank != asked]
        for rank in (*others, asked):
            self._tell(rank, "stop", before=step)

    def _end_all(self, now: float, number: signal.Signals = signal.SIGTERM) -> None:
        self._ending_since = now
        for child in self._children:
            child.signal(number)

    def _tell(self, rank: int, kind: str, **fields: Any) -> None:
        """A worker that is gone is noticed by its process, not here."""
        try:
            self._children[rank].channel.send(kind, **fields)
        except ChannelClosed:
            return
