"""The store of a local job: its register in memory that survives all processes, its ledger on disk.

    RUN/control -> /dev/shm/elaswave-…   a folder in memory that only its owner may enter, for as long as the job lasts
        register.json                    everything that an epoch changes; replaced as a whole
        committed.json                   the last commits since: small, replaced with every one of them
        plan-EPOCH.json                  the plan of the epoch, which is written before the epoch is
        lock                             locked while one of them changes
        alive                            locked by the process that made the folder and by its later forks
        spare                            reserved room for the next epochs
        run -> RUN
    RUN/ledger.jsonl, RUN/plan-EPOCH.json    what `flush` has written to disk

No swap waits for a disk: a write usually takes 1 ms, but sometimes a second while a file system writes its journal, and
would delay recoveries. A swap keeps its ledger lines with the register. `flush` appends them at the offset of the bytes
on disk, and repeats a partial write, so a killed writer leaves nothing to repair. A power failure loses the register
with all processes of a local job. The next run resumes from a checkpoint; the ledger is synced when the register names
one. `committed.json` counts if it is of the register's epoch and not older. Any `OSError` means: unreachable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from elaswave_fx.control.protocol.register import Register, Swap, swap
from elaswave_fx.control.protocol.types import Certificate, Stamp
from elaswave_fx.control.store import ledger
from elaswave_fx.errors import ConfigError, PlanError
from elaswave_fx.files import open_new, others_may_change, replace_file, sync, write_at
from elaswave_fx.observe.run_directory import RunDirectory
from elaswave_fx.plan.work.topology import Epoch

MEMORY, ELSE = Path("/dev/shm"), Path("/tmp")
"""The folder of files in memory, and the one to use without it; a socket's path must be short."""

LOCK_S = 2.0
"""Longest wait for the lock: other processes hold it for milliseconds, unless they are stopped."""

MOST_WAITING = 1 << 14
"""Maximum number of ledger lines that wait for the disk; with more the store counts as unreachable."""

SPARE_BYTES = 1 << 20
"""Minimum reserved room in memory; it is at least ten times the size of the first plan."""

_LOCK_RETRY_S = 0.002
_PREFIX, _RUN, _ALIVE, _SPARE = "elaswave-", "run", "alive", "spare"
_LEFT = {"register.json", "committed.json", "lock", "job.json"}
"""Files of an ended job in `control`, of this or an earlier version."""

_PLAN = re.compile(r"plan-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class _Lines:
    """The ledger: `written` bytes are on disk, the `waiting` lines follow; `head` is the hash of the last line."""

    written: int = 0
    waiting: tuple[str, ...] = ()
    head: str = ledger.CHAIN_START

    def followed_by(self, lines: Iterable[Mapping[str, Any]]) -> _Lines:
        waiting, head = list(self.waiting), self.head
        for line in lines:
            text, head = ledger.linked(line, head)
            waiting.append(text + "\n")
        return replace(self, waiting=tuple(waiting), head=head)


@dataclass(frozen=True, slots=True)
class _Saved:
    """The register as last written whole. `fingerprint`: what else decides bits, for ledger lines."""

    register: Register
    lines: _Lines
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class _Since:
    """The changes of commits since then."""

    epoch: Epoch
    committed: Stamp
    previous: Stamp
    last: Certificate | None
    lines: _Lines


class FileStore:
    """A `Store` of a run directory. Any process of the job may read it; coordinators swap; one thread flushes."""

    def __init__(self, run_dir: Path, folder: Path | None = None) -> None:
        """`folder`: in memory, by default that of `run_dir`. The job survives a later removal of `run_dir`."""
        self._run_dir, self._link = run_dir, run_dir / "control"
        self.folder = folder or self._link.resolve()
        self._register = self.folder / "register.json"
        self._known: tuple[bytes, _Saved] | None = None  # the register as last read
        self._committed = self.folder / "committed.json"
        self._lock = self.folder / "lock"
        self._ledger = run_dir / "ledger.jsonl"
        self._synced: Stamp | None = None  # checkpoint up to which the ledger is synced
        self._newest_plan = -1  # epoch of the newest one in the run directory
        self._alive = -1

    @staticmethod
    def create(run_dir: Path, register: Register, plan: str, fingerprint: str = "") -> FileStore:
        """Create a new job's store. A job that resumes at `register.committed` keeps the ledger's lines; those of later
        steps become void. Raises `ConfigError` if the run directory has a foreign `control`."""
        refuse_foreign(run_dir)
        old, first = FileStore(run_dir), register.committed.version
        kept = old._texts() if first else []
        lines = _Lines(head=ledger.hash_of(kept[-1]) if kept else ledger.CHAIN_START)
        if any(line["step"] >= first for line in ledger.standing(map(json.loads, kept))):
            lines = lines.followed_by([ledger.rollback_line(first, register.epoch)])
        text = "".join((*(line + "\n" for line in kept), *lines.waiting)).encode()
        lines = _Lines(written=len(text), head=lines.head)
        old._remove()
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(old._ledger, text)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY if os.access(MEMORY, os.W_OK) else ELSE)
        try:
            old._link.symlink_to(folder)
            return FileStore(run_dir)._begun(_Saved(register, lines, fingerprint), plan)
        except OSError as error:
            shutil.rmtree(folder)
            old._link.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, error.filename or folder) from error

    def _begun(self, saved: _Saved, plan: str) -> FileStore:
        """Write the first files; return the store."""
        (self.folder / _RUN).symlink_to(self._run_dir.absolute())
        beside = self.folder / f".{_ALIVE}"
        self._alive = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        beside.rename(self.folder / _ALIVE)  # It appears locked: an unlocked one marks a dead job.
        self.write_plan(saved.register.epoch, plan)
        with self._locked():
            self._replace(self._register, msgspec.json.encode(saved))
        with open_new(self.folder / _SPARE) as file:
            os.posix_fallocate(file.fileno(), 0, max(SPARE_BYTES, 10 * len(plan)))
        return self

    def read(self) -> Register:
        """The current register. Takes no lock: files are replaced whole, and one of another epoch is ignored."""
        return self._read().register

    def swap(self, wanted: Swap) -> Register:
        """Replace the register if its key is the expected one, and add its ledger lines; return the result."""
        with self._locked():
            saved = self._read()
            register = saved.register
            after, done = swap(register, wanted)
            if not done:
                return after
            lines = saved.lines.followed_by(_lines_of(register, wanted, saved.fingerprint))
            if len(lines.waiting) > MOST_WAITING:
                raise OSError(f"store: {len(lines.waiting)} lines wait to be written to {self._ledger}")
            since = replace(register, committed=after.committed, previous=after.previous, last=after.last)
            if after == since:
                self._write_since(after, lines)
            else:
                self._replace(self._register, msgspec.json.encode(_Saved(after, lines, saved.fingerprint)))
            return after

    def write_plan(self, epoch: int, text: str) -> None:
        """Write a plan; to be called before the swap that makes the epoch."""
        self._replace(self.folder / f"plan-{epoch}.json", text.encode())

    def read_plan(self, epoch: int) -> str:
        """The text of the plan of the current epoch."""
        return (self.folder / f"plan-{epoch}.json").read_text(encoding="utf-8")

    def flush(self) -> None:
        """Write waiting ledger lines and plans to the run directory. May block on the disk."""
        with self._locked():
            saved = self._read()
        register = saved.register
        self._write_lines(saved.lines)
        if register.checkpoint != self._synced:
            sync(self._ledger)
            self._synced = register.checkpoint
        for path in self.folder.iterdir():
            if (match := _PLAN.fullmatch(path.name)) is None:
                continue
            epoch = int(match[1])
            if epoch > self._newest_plan:
                replace_file(self._run_dir / path.name, path.read_bytes())
            if epoch < register.epoch:
                path.unlink(missing_ok=True)
        self._newest_plan = register.epoch

    def settle(self) -> None:
        """Move everything to keep to the run directory at the end of the job; `control` becomes a folder there. Files
        that only the job's ranks need are removed.

        If the disk is full or the run directory was removed, the files stay for the next run, and this raises
        `OSError`. Idempotent.
        """
        try:
            if self._is_linked():
                self._settle()
            else:
                self._run_dir.stat()
        finally:
            if self._alive != -1:
                os.close(self._alive)
                self._alive = -1

    def _settle(self) -> None:
        RunDirectory.drop_initial(self._run_dir)
        self.flush()
        beside = self._run_dir / ".control.new"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        replace_file(beside / self._register.name, msgspec.json.encode(self._read()))
        self._remove()
        beside.rename(self._link)

    def processes(self) -> list[int]:
        """Return the job's other processes: the store's maker and its later forks. Only this user's are visible."""
        others = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
        return [pid for pid in others if _descriptors(pid, self.folder / _ALIVE)]

    def alive_descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that mark this process as one of the job's, to pass to a process that it executes."""
        return _descriptors(os.getpid(), self.folder / _ALIVE)

    # --- Ledger ---

    def _texts(self) -> list[str]:
        """Return all lines of the ledger, in memory or on disk, without one that a killed writer left incomplete."""
        data = self._ledger.read_bytes() if self._ledger.exists() else b""
        with contextlib.suppress(OSError):
            lines = self._read().lines
            data = data[: lines.written] + "".join(lines.waiting).encode()
        return data.decode().split("\n")[:-1]

    def _write_lines(self, lines: _Lines) -> None:
        if not lines.waiting:
            return
        text = "".join(lines.waiting).encode()
        file = os.open(self._ledger, os.O_RDWR | os.O_NOFOLLOW)
        try:
            size = os.fstat(file).st_size
            if size < lines.written:
                raise OSError(
                    f"store: {self._ledger} has {size} bytes, of which {lines.written} were written; it was changed"
                )
            write_at(file, text, lines.written)
        finally:
            os.close(file)
        with self._locked():
            saved = self._read()
            now = saved.lines
            if now.written == lines.written:  # else another process has written them
                waiting = now.waiting[len(lines.waiting) :]
                self._write_since(saved.register, _Lines(lines.written + len(text), waiting, now.head))

    # --- Files ---

    def _read(self) -> _Saved:
        try:
            saved = self._decoded(self._register.read_bytes())
            text = self._committed.read_bytes() if self._committed.exists() else b""
            since = msgspec.json.decode(text, type=_Since) if text else None
        except (msgspec.MsgspecError, ValueError, PlanError, RecursionError) as error:
            raise OSError(f"store: {self.folder} cannot be read ({error})") from error
        register = saved.register
        if since is None or since.epoch != register.epoch or since.committed.version < register.committed.version:
            return saved
        newer = replace(register, committed=since.committed, previous=since.previous, last=since.last)
        return _Saved(newer, since.lines, saved.fingerprint)

    def _decoded(self, text: bytes) -> _Saved:
        """Decode the register; cached, since it is read with every heartbeat but changes only with epochs."""
        if self._known is None or self._known[0] != text:
            self._known = text, msgspec.json.decode(text, type=_Saved)
        return self._known[1]

    def _write_since(self, register: Register, lines: _Lines) -> None:
        news = _Since(register.epoch, register.committed, register.previous, register.last, lines)
        self._replace(self._committed, msgspec.json.encode(news))

    def _replace(self, path: Path, data: bytes) -> None:
        """Replace a file in memory. If memory is full, the reserved room is released first."""
        try:
            replace_file(path, data)
        except OSError as error:
            spare = self.folder / _SPARE
            if error.errno != errno.ENOSPC or not spare.exists():
                raise
            spare.unlink(missing_ok=True)
            replace_file(path, data)

    def _is_linked(self) -> bool:
        """Whether the run directory links to this store, and not to a newer one or to an ended job's folder."""
        return self._link.is_symlink() and self._link.resolve() == self.folder

    def _leads_back(self) -> bool:
        """Whether the folder in memory belongs to this run: another user's link may lead to any folder."""
        return (self.folder / _RUN).resolve() == self._run_dir.resolve()

    def _remove(self) -> None:
        """Remove the folder in memory and the link to it, or an ended job's folder."""
        if self._is_linked():
            self._link.unlink()
            if self.folder.name.startswith(_PREFIX) and self._leads_back():
                shutil.rmtree(self.folder, ignore_errors=True)
        elif self._link.exists():
            shutil.rmtree(self._link)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises `OSError` after `LOCK_S`."""
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


def refuse_foreign(run_dir: Path) -> None:
    """Raise `ConfigError` if `control` in the run directory is not from a run: it would be removed."""
    place = run_dir / "control"
    if place.is_symlink() or not place.exists():
        return
    names = {path.name for path in place.iterdir()} if place.is_dir() else {"control"}
    if not names <= _LEFT:
        raise ConfigError(f"hydra.run.dir={run_dir}: has a control of yours, and a run needs that name; choose another")


def _descriptors(pid: int, path: Path) -> tuple[int, ...]:
    """The descriptors of a process for a file; none if the process has ended or is another user's."""
    wanted, numbers = path.stat(), []
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found = entry.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    numbers.append(int(entry.name))
    return tuple(numbers)


def settle_dead_jobs() -> list[Path]:
    """Settle stores of this user's jobs whose processes were all killed, so that no folder stays in memory forever.

    Returns their run directories.
    """
    found = []
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                found.append(_settle_if_dead(folder))
    return [run_dir for run_dir in found if run_dir is not None]


def _settle_if_dead(folder: Path) -> Path | None:
    alive = os.open(folder / _ALIVE, os.O_RDWR)
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run_dir = (folder / _RUN).readlink()
        store = FileStore(run_dir)
        if store.folder == folder and not others_may_change(run_dir):
            store.settle()
            return run_dir
        shutil.rmtree(folder)  # the run directory was removed, or has another job or owner
        return None
    finally:
        os.close(alive)


def _lines_of(old: Register, wanted: Swap, fingerprint: str) -> list[dict[str, Any]]:
    """The ledger lines of a swap."""
    lines = [ledger.line_of(certificate, old.key.plan_hash, fingerprint) for certificate in wanted.lines]
    new = wanted.new
    if new.epoch > old.epoch and new.activation.rollback:
        lines.append(ledger.rollback_line(new.committed.version, new.epoch))
    return lines
