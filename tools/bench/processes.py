"""Processes of a benchmark: forked as a job's workers are, heard over channels, killed on purpose.

In: a body per process, which gets its end of a channel. Out: what they say. Whatever was started is gone at the end.

    with Processes() as processes:
        processes.fork("rank-0", body)
        processes.hear(["rank-0"], "ready")   ->  {"rank-0": {…}}
        processes.kill("rank-0")
"""

from __future__ import annotations

import json
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elaswave_fx.launch.channel import Channel, ChannelClosed
from elaswave_fx.launch.process import Child, end_children, fork_child

TEST_TIMEOUT_S = 120.0
"""Far more than anything takes on a busy machine."""

_PATIENCE_S = 0.3


class BenchFailed(RuntimeError):
    """A process of a benchmark ended or kept silent; the words name it and show the end of its log."""


class JobEnded(BenchFailed):
    """All ranks of a job ended before one reported what was awaited."""


class Processes:
    """All processes of one job; one thread uses it. `folder` holds their logs, and whatever a benchmark puts there."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        end_children(self._children.values())
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def fork(self, name: str, body: Callable[[Channel], None]) -> Child:
        """Start `body(channel)` in a child that dies with this process."""
        child = fork_child(name, body, self.folder / f"{name}.log", self._children.values())
        self._children[name] = child
        return child

    def tell(self, names: Iterable[str], kind: str, **fields: Any) -> None:
        """Send the same message to each."""
        for name in names:
            try:
                self._children[name].channel.send(kind, **fields)
            except ChannelClosed as error:
                raise self._failed(name, "has ended") from error

    def hear(self, names: Iterable[str], kind: str) -> dict[str, Mapping[str, Any]]:
        """Return one message of `kind` from each; other kinds are passed over. Raises `BenchFailed`."""
        return {name: self._hear(name, kind) for name in names}

    def introduce(self, names: Sequence[str]) -> None:
        """Ranks, in order, get to know where the others listen: the parent's half of `meet`."""
        ports = {name: fields["port"] for name, fields in self.hear(names, "port").items()}
        self.tell(names, "ports", ports=[ports[name] for name in names])

    def kill(self, name: str) -> None:
        """Send SIGKILL."""
        self._children[name].signal(signal.SIGKILL)

    def join(self, name: str, timeout_s: float = TEST_TIMEOUT_S) -> None:
        """Wait for its end. Raises `BenchFailed` when it does not come, or its body has failed."""
        child = self._children[name]
        if not select.select([child.pidfd], [], [], timeout_s)[0]:
            raise self._failed(name, f"did not end within {timeout_s:g} s")
        if child.reap():
            raise self._failed(name, "failed")

    def end(self, name: str) -> None:
        """End a launcher as an impatient user does: SIGTERM to stop, again to stop at once. Raises `BenchFailed`."""
        child, end = self._children[name], time.monotonic() + TEST_TIMEOUT_S
        while child.status is None and not select.select([child.pidfd], [], [], _PATIENCE_S)[0]:
            if time.monotonic() > end:
                raise self._failed(name, "did not end")
            child.signal(signal.SIGTERM)

    def _hear(self, name: str, kind: str) -> Mapping[str, Any]:
        end = time.monotonic() + TEST_TIMEOUT_S
        while True:
            try:
                message = self._children[name].channel.receive(max(0.0, end - time.monotonic()))
            except ChannelClosed as error:
                raise self._failed(name, f"ended before it said {kind}") from error
            if message is None:
                raise self._failed(name, f"did not say {kind} within {TEST_TIMEOUT_S:g} s")
            if message.kind == "error":
                raise self._failed(name, f"failed: {message.fields['message']}")
            if message.kind == kind:
                return message.fields

    def _failed(self, name: str, what: str) -> BenchFailed:
        return BenchFailed(f"bench: {name} {what}\n{self._children[name].log.read_text()[-2000:]}")


class Reports:
    """One socket over which all ranks of a job tell of themselves, whoever forks them: made before the first fork.

    A report is a kind and JSON fields, whole or not there at all, in the order in which reports are sent.
    """

    BYTES_MAX = 1 << 16

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def close_reader(self) -> None:
        """Call this in those who report, and at the end."""
        self._reader.close()

    def close_writer(self) -> None:
        """Call this in who hears, once those who report have been forked: the end of the last of them shows then."""
        self._writer.close()

    def say(self, kind: str, **fields: Any) -> None:
        """Raises OSError when nobody hears any more."""
        self._writer.send(json.dumps([kind, fields]).encode())

    def hear(self, kind: str, log: Path, timeout_s: float = TEST_TIMEOUT_S) -> Mapping[str, Any]:
        """Return the next report of that kind; others are passed over. Raises `BenchFailed` with the end of `log`."""
        end = time.monotonic() + timeout_s
        while select.select([self._reader], [], [], max(0.0, end - time.monotonic()))[0]:
            said = self._reader.recv(self.BYTES_MAX)
            if not said:
                raise JobEnded(f"bench: all ranks ended before one said {kind}\n{log.read_text()[-2000:]}")
            found, fields = json.loads(said)
            if found == kind:
                return fields
        raise BenchFailed(f"bench: no rank said {kind} within {timeout_s:g} s\n{log.read_text()[-2000:]}")


def meet(endpoint: Any, channel: Channel, host_of: Callable[[int], str]) -> None:
    """Link a rank's endpoint with those of all others, once they have been introduced; called in the rank."""
    channel.send("port", port=endpoint.port)
    message = channel.receive(TEST_TIMEOUT_S)
    assert message is not None, "nobody introduced the ranks"
    ports = enumerate(message.fields["ports"])
    endpoint.connect(
        {rank: ("127.0.0.1", port, host_of(rank)) for rank, port in ports if rank != endpoint.rank}, TEST_TIMEOUT_S
    )
