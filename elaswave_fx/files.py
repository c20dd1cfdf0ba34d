"""File operations shared by the run directory, the store and the caches: readers see whole files.

replace_file(run_dir / "summary.json", b"{}\\n", durable=True)
json_lines(run_dir / "ledger.jsonl")  ->  [{"step": 0, …}, {"step": 1, …}]
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a file beside `path` and rename it, so that readers see the old bytes or the new ones.

    `durable`: the new bytes survive a loss of power once this returns. If it raises `OSError`, the old file stays.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open_new(beside) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    if durable:
        sync(path.parent)


def open_new(path: Path) -> BinaryIO:
    """Create a file for writing in the place of any entry of its name; a link's target stays. Raises `OSError`."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def open_log(path: Path) -> int:
    """Open a file for appending; return its descriptor. Raises `OSError`, also for a link: it may lead anywhere."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def read_plain(path: Path) -> bytes:
    """The bytes of a regular file. Raises `OSError`, also for a link, a FIFO or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file")
        return file.read()


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`. A nearly full disk accepts a part at first; writing the rest then raises `OSError`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync(path: Path) -> None:
    """Make sure that a file's bytes, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def others_may_change(folder: Path) -> bool:
    """Whether another user may change what a folder holds, see `place_of_others`."""
    return place_of_others(folder) is not None


def place_of_others(folder: Path) -> Path | None:
    """Return `folder` or its parent, whichever another user owns or everybody may write to; None if neither.

    A missing folder counts as ours. Root and a user's own group are trusted.
    """
    for place, may_be_shared in ((folder, False), (folder.parent, True)):
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        is_sticky = may_be_shared and found.st_mode & stat.S_ISVTX  # as /tmp: entries belong to their owners
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & stat.S_IWOTH and not is_sticky):
            return place
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file, without a last one that a kill cut off; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
