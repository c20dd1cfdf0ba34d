"""The register of a local job in files, swapped under a lock, and the ledger beside it.

    RUN/ledger.jsonl               a line per committed step
    RUN/control/register.json      everything that an epoch changes; replaced as a whole
    RUN/control/committed.json     the last commits since: small, replaced with every addition to the ledger
    RUN/control/lock               locked while one of them changes

`committed.json` counts if it is of the register's epoch and newer. Both say how long the ledger is: what a killed
writer left behind that, whole or torn, is cut off before the next line. Any `OSError` of a call means: not reached.

What a swap has written outlives every process of the job, but no loss of power: that ends all processes of a local job
at once, and the next run goes on from a checkpoint. So the ledger is synced with the swap that names a checkpoint, and
no other swap waits for a disk: such a wait is 1 ms as a rule, but now and then 0.2 s, of every step and every recovery.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from elaswave_fx.control.protocol.register import Register, Swap, swap
from elaswave_fx.control.protocol.types import Certificate, Stamp
from elaswave_fx.control.store import ledger
from elaswave_fx.files import json_lines, replace_file, sync, write_at
from elaswave_fx.plan.topology import Epoch

LOCK_S = 2.0
"""How long another process may hold the lock: it does for milliseconds, unless it is stopped."""

_LOCK_RETRY_S = 0.002


@dataclass(frozen=True, slots=True)
class _Saved:
    """The register as of its last whole writing."""

    register: Register
    ledger_bytes: int


@dataclass(frozen=True, slots=True)
class _Since:
    """What commits have changed of it since."""

    epoch: Epoch
    committed: Stamp
    previous: Stamp
    last: Certificate | None
    ledger_bytes: int


class FileStore:
    """A `Store` in a run directory. Any process of the job may read it; coordinators swap."""

    def __init__(self, folder: Path) -> None:
        self._ledger = folder / "ledger.jsonl"
        self._register = folder / "control" / "register.json"
        self._committed = folder / "control" / "committed.json"
        self._lock = folder / "control" / "lock"

    @staticmethod
    def create(folder: Path, register: Register) -> FileStore:
        """A new job's store. Ledger lines of steps before `register.committed` stay, if the folder has some."""
        store = FileStore(folder)
        store._register.parent.mkdir(parents=True, exist_ok=True)
        with store._locked():
            store._committed.unlink(missing_ok=True)
            kept = [line for line in json_lines(store._ledger) if line.get("step", -1) < register.committed.version]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            replace_file(store._ledger, text.encode())
            replace_file(store._register, msgspec.json.encode(_Saved(register, len(text))))
        return store

    def read(self) -> Register:
        """The current register. Takes no lock: files change as a whole, and one of another epoch is passed over."""
        return self._read()[0]

    def swap(self, wanted: Swap) -> Register:
        """Replace the register if its key is the expected one, its ledger lines first; return it as it is then."""
        with self._locked():
            register, length = self._read()
            after, done = swap(register, wanted)
            if not done:
                return after
            length = self._append(length, register, wanted)
            if after.checkpoint != register.checkpoint:
                sync(self._ledger)
            since = replace(register, committed=after.committed, previous=after.previous, last=after.last)
            if after == since:
                news = _Since(after.epoch, after.committed, after.previous, after.last, length)
                replace_file(self._committed, msgspec.json.encode(news))
            else:
                replace_file(self._register, msgspec.json.encode(_Saved(after, length)))
            return after

    def _read(self) -> tuple[Register, int]:
        try:
            saved = msgspec.json.decode(self._register.read_bytes(), type=_Saved)
            text = self._committed.read_bytes() if self._committed.exists() else b""
            since = msgspec.json.decode(text, type=_Since) if text else None
        except msgspec.MsgspecError as error:
            raise OSError(f"store: {self._register.parent} cannot be read ({error})") from error
        register = saved.register
        if since is None or since.epoch != register.epoch or since.committed.version <= register.committed.version:
            return register, saved.ledger_bytes
        newer = replace(register, committed=since.committed, previous=since.previous, last=since.last)
        return newer, since.ledger_bytes

    def _append(self, length: int, old: Register, wanted: Swap) -> int:
        """Add the swap's lines to the ledger, whose first `length` bytes count; returns how many count then."""
        lines = [ledger.line_of(certificate) for certificate in wanted.lines]
        new = wanted.new
        if new.epoch > old.epoch and new.activation.rollback:
            lines.append(ledger.rollback_line(new.committed.version, new.epoch))
        if not lines:
            return length
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = os.open(self._ledger, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            if size < length:
                raise OSError(f"store: {self._ledger} has {size} bytes, of which {length} were written; it was changed")
            os.ftruncate(file, length)
            write_at(file, text, length)
        finally:
            os.close(file)
        return length + len(text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises `OSError` when another process holds the lock for too long."""
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            end = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(_LOCK_RETRY_S)
            yield
        finally:
            os.close(file)
