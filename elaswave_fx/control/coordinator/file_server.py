"""Serves program and initial tensors to joiners, by name and piece by piece.

In: the builder's shared files, and requests. Out: answers, later: a thread reads, since the coordinator cannot wait for
a disk. A joiner has one request at a time, so few pieces are in memory.

    server = FileServer({"state.safetensors": SharedFile("/runs/today/.init/state.safetensors", 812, "9f…")})
    server.ask(PartWanted(3, Fetch("state.safetensors", 0)))      `fileno` is readable when the answer is ready
    server.answers()   ->  [(3, FilePart("state.safetensors", 0, b"…"))]
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elaswave_fx.control.coordinator.threads import BackgroundThread
from elaswave_fx.control.protocol.messages import Fetch, FilePart, Offer, PartWanted, Refused
from elaswave_fx.files import file_digest

PART_BYTES = 256 << 10
"""Bytes of a file in one message: small enough that reading, copying and sending delay no rank."""

CLOSE_S = 1.0
"""Time for a read in progress when the coordinator ends."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of the builder: path, size, and SHA-256 in hexadecimal."""

    path: str
    size: int
    digest: str

    @staticmethod
    def of(path: Path) -> SharedFile:
        """Describe a file as it is now. Raises `OSError`."""
        return SharedFile(str(path.absolute()), path.stat().st_size, file_digest(path))


class FileServer:
    """The shared files of a job. One thread calls the methods; `fileno` is for pollers."""

    def __init__(self, files: Mapping[str, SharedFile]) -> None:
        """`files`: the only ones that are served, by name."""
        self._files = files
        self._found: queue.SimpleQueue[tuple[int, FilePart | Refused]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._background = BackgroundThread()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `answers` has any."""
        return self._wake

    def offers(self) -> tuple[Offer, ...]:
        return tuple(Offer(name, file.size, file.digest) for name, file in self._files.items())

    def ask(self, wanted: PartWanted) -> None:
        """Queue a request; does not block."""
        self._background.submit(partial(self._look, wanted))

    def answers(self) -> list[tuple[int, FilePart | Refused]]:
        """Return (connection, answer) pairs since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._found.get_nowait())
        return found

    def close(self) -> None:
        """End the thread, which may hang in a read and then ends with the process."""
        self._background.close(CLOSE_S)

    def _look(self, wanted: PartWanted) -> None:
        self._found.put((wanted.connection, part_of(self._files, wanted.fetch)))
        os.eventfd_write(self._wake, 1)


def part_of(files: Mapping[str, SharedFile], fetch: Fetch) -> FilePart | Refused:
    """Return a piece of a file, or a refusal with the reason."""
    file = files.get(fetch.name)
    if file is None:
        return Refused(f"the job shares no file {fetch.name!r}")
    if not 0 <= fetch.offset < file.size:
        return Refused(f"{fetch.name}: has {file.size} bytes, and none at {fetch.offset}")
    try:
        with open(file.path, "rb", buffering=0) as opened:
            data = os.pread(opened.fileno(), min(PART_BYTES, file.size - fetch.offset), fetch.offset)
    except OSError as error:
        return Refused(f"{fetch.name}: the coordinator cannot read it ({error.strerror})")
    if not data:
        return Refused(f"{fetch.name}: has become shorter than it was built, {file.size} bytes")
    return FilePart(fetch.name, fetch.offset, data)
