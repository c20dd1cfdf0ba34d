"""The launcher's side of the coordinator: starts it, restarts it if it ended or hangs, and passes messages both ways.

In: exits of workers, finished checkpoints. Out: the coordinator's messages. Training continues without any of this.

    coordination = Coordination(spec, listener, store, log); coordination.start(siblings=()); coordination.exited(2)
    coordination.turn(now, siblings=workers)   # restarts a coordinator that ended, with growing pauses
"""

from __future__ import annotations

import signal
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elaswave_fx.control.coordinator.service import SUPERSEDED, CoordinatorSpec, run_coordinator
from elaswave_fx.control.store.file_store import FileStore
from elaswave_fx.launch.channel import Channel, ChannelClosed, Message
from elaswave_fx.launch.failure import describe_exit
from elaswave_fx.launch.process import Child, end_children, fork_child, outlive_parent

PAUSE_S, PAUSE_MOST_S = 0.02, 5.0
"""Pause before a restart, and its maximum; it doubles for every coordinator that ended within the last `WINDOW_S`."""

WINDOW_S = 60.0
HUNG_S = 10.0
"""Silence after which a coordinator is killed; it sends `alive` twice a second."""


class Coordination:
    """The coordinator as the launcher sees it. Only the launcher's one thread uses it."""

    def __init__(self, spec: CoordinatorSpec, listener: socket.socket, store: FileStore, log: Path) -> None:
        """`listener`: at the job's address; every coordinator started here serves it."""
        self._spec, self._listener, self._store, self._log = spec, listener, store, log
        self._child: Child | None = None
        self._exited: list[int] = []
        self._ends: deque[float] = deque()
        self._again_s = 0.0
        self._alive_s = 0.0
        self.restarts = 0

    def children(self) -> tuple[Child, ...]:
        return (self._child,) if self._child is not None else ()

    def start(self, siblings: Iterable[Child]) -> Child:
        """Fork a coordinator and send it all exits so far."""
        spec = self._spec

        def body(channel: Channel) -> None:
            outlive_parent()  # Workers that finish without a launcher may still need it.
            code = run_coordinator(spec, channel, listener=self._listener)
            if code == SUPERSEDED:
                print("superseded by another coordinator", flush=True)

        # The run directory may be removed, or its disk full: the job needs a coordinator more than its log.
        self._child = fork_child("coordinator", body, self._log, siblings, needs_log=False)
        self._alive_s = time.monotonic()
        for rank in self._exited:
            self._tell("exited", rank=rank)
        return self._child

    def exited(self, rank: int) -> None:
        """Report that a worker's process has ended for certain."""
        self._exited.append(rank)
        self._tell("exited", rank=rank)

    def finished(self, rank: int) -> None:
        """Report that a worker ended because the job did."""
        self._tell("finished", rank=rank)

    def saved(self, version: int, epoch: int) -> None:
        """Report that a checkpoint is complete on disk."""
        self._tell("saved", version=version, epoch=epoch)

    def messages(self) -> list[Message]:
        """Return the coordinator's messages."""
        if self._child is None:
            return []
        found = self._child.channel.drain()
        if found:
            self._alive_s = time.monotonic()
        return [message for message in found if message.kind != "alive"]

    def ended(self) -> str:
        """Return how the coordinator ended; call this once the child's `pidfd` is readable."""
        child, self._child = self._child, None
        assert child is not None
        how = describe_exit(child.reap())
        child.channel.close()
        now = time.monotonic()
        self._ends.append(now)
        while now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        self._again_s = now + min(PAUSE_MOST_S, PAUSE_S * 2 ** (len(self._ends) - 1))
        return how

    def turn(self, now: float, siblings: Iterable[Child]) -> Child | None:
        """Restart the coordinator if it is time, or kill it if it hangs; return the new process, if any."""
        if self._child is None:
            if now < self._again_s:
                return None
            self.restarts += 1
            return self.start(siblings)
        if now - self._alive_s > HUNG_S:
            self._child.signal(signal.SIGKILL)
        return None

    def end(self) -> str | None:
        """End the coordinator, remove the token's file, write the whole ledger; return why that failed, if it did."""
        end_children(self.children())
        self._child = None
        try:
            self._store.settle()
        except OSError as error:
            return f"store: not written ({error}); what is missing stays in {self._store.folder}"
        return None

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._child is None:
            return
        try:
            self._child.channel.send(kind, **fields)
        except ChannelClosed:
            return  # Its process's end is reported too.
