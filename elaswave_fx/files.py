"""Files that readers see whole: what the run directory, the store and the caches have in common.

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

    `durable`: the new ones also survive a loss of power once this returns. Raises `OSError`; the old file stays then.
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
    """A new file, to be written, in the place of whatever has its name; what a link of that name leads to stays as it
    is. Raises `OSError`."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


def open_log(path: Path) -> int:
    """The descriptor of a file that is added to. Raises `OSError`, also for a link: it may lead to any file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def read_plain(path: Path) -> bytes:
    """The bytes of a file that is neither a link nor something whose reading waits for others. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file")
        return file.read()


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of it. A disk that is nearly full takes a part at first; the rest then raises the `OSError`."""
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
    """The folder, or the one above it, if it is another user's or everybody may write to it, so that they may change
    what the folder holds; None if neither is.

    A folder that does not exist is ours to make. Root and a user's group are trusted."""
    for place, may_be_shared in ((folder, False), (folder.parent, True)):
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        is_sticky = may_be_shared and found.st_mode & stat.S_ISVTX  # as /tmp: everybody's, but not what lies in it
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & stat.S_IWOTH and not is_sticky):
            return place
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, none if there is no such file; without the half of one that a kill may have left."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
